"""The CUDA kernel on virtual ranks: W workspaces in one process on one GPU, each on a stream of its own."""

import os
import random
import signal
import time

import machine_code
import pytest
import torch

import moetail
from moetail import Workspace, guards, reference
from moetail.testing import assert_same_bits, finalize_inputs

H, K, MAX_TOKENS = 1000, 6, 256  # H is no multiple of a program's columns
TOKENS = (0, 1, 2, 15, 16, 17, 64, 128, 256)


COMPILE = """
import json, triton
from machine_code import sm_90
from moetail.comm import finalize_all_reduce_triton as m
results = {}
for W, H, K, epilogue, quant in ((2, 5120, 6, "none", None), (8, 7168, 8, "none", None), (2, 5120, 6, "norm", None),
                                 (4, 7168, 8, "norm", None), (2, 5120, 6, "mhc", None), (4, 5120, 6, "mhc", None),
                                 (4, 5120, 6, "norm", "fp8_group128"), (2, 5120, 6, "mhc", "mxfp8")):
    warps = m._WARPS if epilogue == "none" else m._ROW_WARPS
    block = m._BLOCK if epilogue == "none" else triton.next_power_of_2(H)
    constants = dict(K=K, H=H, PRODUCT="fma", GROUPS=1, SCALE="none", TWO_ROUNDINGS=True, POSITIVE_ZERO=False, PDL=True,
                     KIND=2, FINALIZE=True, EPILOGUE=epilogue, HC=4, ZERO_CENTRED=False, W=W, BLOCK=block,
                     THREADS=32 * warps, gate=None, num_valid_rows=None, post_norm_weight=None, QUANT=quant)
    pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", out="*bf16", control="*i64",
                    residual="*bf16", norm_weight="*bf16", residual_out="*bf16", values="*u8",
                    scales="*u8" if quant == "mxfp8" else "*fp32")
    mixes = dict.fromkeys(("post_mix", "res_mix", "pre_mix"), "*fp32")  # may be parts of one tensor, at any alignment
    absent = ([] if epilogue == "mhc" else [*mixes]) + (
        ["residual", "norm_weight", "residual_out"] if epilogue == "none" else []) + (
        [] if quant else ["values", "scales"])
    constants |= dict.fromkeys(absent)
    pointers = {n: kind for n, kind in pointers.items() if n not in absent}
    strides = [n for n in m._finalize_all_reduce_kernel.arg_names
               if n in ("rows_stride", "shared_stride", "out_stride", "capacity", "values_stride")
               or n.startswith("residual")]
    options = dict(num_warps=warps, enable_fp_fusion=False, launch_pdl=True)
    code = sm_90(m._finalize_all_reduce_kernel, pointers, constants, options,
                 [n for n in strides if n not in constants], {n: k for n, k in mixes.items() if n not in absent})
    results[f"W={W} H={H} {epilogue} {quant}"] = dict(
        registers=code.registers, stack=code.stack, narrow=code.count(r"(?:st|ld\\.volatile)\\.global\\.b16"),
        remote_atomics=code.count(r"\\.sys\\."), before_wait=code.before_wait)
print(json.dumps(results))
"""


def test_machine_code():
    """Compiled here for sm_90: at most the registers that residency counts on, 16 bytes an inbox access, nothing read
    before the wait for the kernel before, no atomic that leaves the GPU. Spills: none with Triton 3.9 (24 bytes where
    h is quantized too), up to 64 bytes with 3.6 (the mHC variant at four ranks). At eight ranks 136 to 472 bytes."""
    for name, code in machine_code.run(COMPILE).items():
        assert code["registers"] <= 128 and code["stack"] <= 64, f"{name}: {code}"
        assert code["narrow"] == code["remote_atomics"] == code["before_wait"] == 0, f"{name}: {code}"


class Ranks:
    """W virtual ranks: their workspaces and streams."""

    def __init__(self, W, timeout_s=20.0, hidden=H, max_tokens=MAX_TOKENS):
        self.workspaces = Workspace.virtual(W, max_tokens, hidden, timeout_s=timeout_s)
        self.streams = [torch.cuda.Stream() for _ in range(W)]
        for x in (inputs(0, W, hidden), inputs(1, W, hidden)):  # every kernel is loaded before any rank may poll
            self.call(x)
            self.call(x, op=moetail.all_reduce)
            moetail.finalize(x[0].rows, x[0].row_map, x[0].weights, x[0].shared)
        torch.cuda.synchronize()

    def call(self, x, ranks=None, op=moetail.finalize_all_reduce):
        """The op on every rank's inputs; what is returned belongs to the rank's stream."""
        outs = {}
        for r in range(len(self.streams)) if ranks is None else ranks:
            with torch.cuda.stream(self.streams[r]):
                if op is moetail.all_reduce:
                    outs[r] = op(x[r].shared, workspace=self.workspaces[r])
                else:
                    outs[r] = op(x[r].rows, x[r].row_map, x[r].weights, x[r].shared, workspace=self.workspaces[r])
        return outs


def inputs(T, W, hidden=H, seed=0):
    """Each rank's own."""
    return [finalize_inputs(T, K, hidden, absent=0.1, device="cuda", seed=100 * seed + r) for r in range(W)]


def expected(x):
    parts = [reference.finalize(i.rows, i.row_map, i.weights, i.shared) for i in x]
    return reference.all_reduce(parts)


class Stress:
    """Calls of random size on every rank, each compared on the device: `wrong` counts elements, by rank."""

    def __init__(self, ranks, seed, tokens=TOKENS):
        self.ranks, self.W = ranks, len(ranks.streams)
        self.draw = random.Random(seed)
        self.pool = [inputs(T, self.W, seed=s) for T in tokens for s in range(3)]
        self.wanted = [expected(x).view(torch.int16) for x in self.pool]
        self.wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(self.W)]
        for want in self.wanted:  # torch too loads a kernel at its first launch, which waits for whoever polls
            self.wrong[0] += (want != want.clone()).sum()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()

    def plan(self, calls):
        """(inputs, which op, the late rank or None) of each call: the same on every rank."""
        return [
            (self.draw.randrange(len(self.pool)), self.draw.random() < 0.15,
             self.draw.randrange(self.W) if self.draw.random() < 0.05 else None)
            for _ in range(calls)
        ]  # fmt: skip

    def call(self, r, i, finalized, late):
        """On the current stream."""
        if r == late:
            torch.cuda._sleep(100_000)  # about 60 us
        x, workspace = self.pool[i][r], self.ranks.workspaces[r]
        if finalized:
            got = moetail.all_reduce(moetail.finalize(x.rows, x.row_map, x.weights, x.shared), workspace=workspace)
        else:
            got = moetail.finalize_all_reduce(x.rows, x.row_map, x.weights, x.shared, workspace=workspace)
        self.wrong[r] += (got.view(torch.int16) != self.wanted[i]).sum()

    def eager(self, calls):
        for one in self.plan(calls):
            for r in self.draw.sample(range(self.W), self.W):
                with torch.cuda.stream(self.ranks.streams[r]):
                    self.call(r, *one)

    def graphs(self, calls):
        """One graph a rank, of the same calls."""
        plan, graphs = self.plan(calls), []
        for r in range(self.W):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[r], stream=self.ranks.streams[r]):
                for one in plan:
                    self.call(r, *one)
        return graphs

    def replay(self, graphs):
        for r in self.draw.sample(range(self.W), self.W):
            with torch.cuda.stream(self.ranks.streams[r]):
                graphs[r].replay()


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 4, 5, 8])
def test_ten_thousand_calls_of_changing_size(W):  # B11, B37, B48, B50
    """Eager calls and two graphs of 100 calls, mixed, back to back."""
    stress = Stress(Ranks(W), seed=W)
    with guards.no_jit():
        graphs = [stress.graphs(100), stress.graphs(100)]
        torch.cuda.synchronize()
        for _ in range(95):
            stress.replay(graphs[stress.draw.randrange(2)])
            stress.eager(6)
        torch.cuda.synchronize()
    for workspace in stress.ranks.workspaces:
        workspace.check()
    assert [int(w) for w in stress.wrong] == [0] * W
    calls = int(stress.ranks.workspaces[0].control[0])
    assert calls > 10_000, f"{calls} calls"


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3])
def test_graphs_and_eager_calls_mixed(W):
    ranks, draw = Ranks(W), random.Random(1)
    pool = [inputs(T, W, seed=7) for T in (1, 17, 256)]
    wanted = [expected(x) for x in pool]
    torch.cuda.synchronize()
    graphs, outs = [], []
    for x in pool:  # a graph a size and rank, two calls in each
        graphs.append([torch.cuda.CUDAGraph() for _ in range(W)])
        outs.append([])
        for r in range(W):
            with torch.cuda.graph(graphs[-1][r], stream=ranks.streams[r]):
                outs[-1].append([ranks.call(x, [r])[r] for _ in range(2)])
    for _ in range(300):
        i, graph = draw.randrange(len(pool)), draw.random() < 0.7
        if graph:
            for r in draw.sample(range(W), W):
                with torch.cuda.stream(ranks.streams[r]):
                    for out in outs[i][r]:
                        out.fill_(float("nan"))
                    graphs[i][r].replay()
            got = [out for r in range(W) for out in outs[i][r]]
        else:
            got = list(ranks.call(pool[i]).values())
        torch.cuda.synchronize()
        for out in got:
            assert_same_bits(out, wanted[i])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_order_zeros_and_nans(dtype):  # B38
    W = 3
    values = torch.tensor([[2.0**11, 1.0, -(2.0**11)], [-0.0, -0.0, -0.0], [-0.0, 0.0, -0.0], [1.0, float("nan"), 2.0],
                           [float("inf"), 1.0, -float("inf")], [2.0**14, 2.0**-10, -(2.0**14)]])  # fmt: skip
    x = [values[:, r].to(dtype).repeat_interleave(2).view(1, -1).cuda() for r in range(W)]
    x[1][0, 7] = torch.tensor(-1, dtype=torch.int16).view(dtype).cuda()  # the sentinel's own bits
    workspaces = Workspace.virtual(W, 4, 12, dtype=dtype, timeout_s=5.0)
    streams = [torch.cuda.Stream() for _ in range(W)]
    torch.cuda.synchronize()
    for _ in range(3):
        got = []
        for r in range(W):
            with torch.cuda.stream(streams[r]):
                got.append(moetail.all_reduce(x[r], workspace=workspaces[r]))
        torch.cuda.synchronize()
        for y in got:
            assert_same_bits(y, reference.all_reduce(x))


def failed(ranks, r, match):
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=match):
        ranks.workspaces[r].check()


def all_nan(out):
    return bool(out.isnan().all())


@pytest.mark.gpu
def test_a_rank_that_never_calls(capsys):
    ranks = Ranks(2, timeout_s=0.3)
    x = inputs(17, 2)
    torch.cuda.synchronize()
    start = time.monotonic()
    out = ranks.call(x, [0])[0]
    failed(ranks, 0, "rank 0 waited 0.3 s for rank 1 at call 5")
    assert 0.25 < time.monotonic() - start < 1.0 and all_nan(out)
    start = time.monotonic()
    out = ranks.call(x, [0])[0]  # later calls do not wait
    torch.cuda.synchronize()
    assert time.monotonic() - start < 0.1 and all_nan(out)
    failed(ranks, 0, "at call 5")  # the first fault stays
    out = ranks.call(x, [1])[1]  # late: rank 0 had pushed before it gave up, so this sum is right
    torch.cuda.synchronize()
    assert_same_bits(out, expected(x))
    ranks.call(x, [1])
    failed(ranks, 1, "rank 1 waited 0.3 s for rank 0 at call 6")
    for workspace in ranks.workspaces:
        workspace.destroy()
    ranks = Ranks(2)  # the next workspace in this process works
    assert_same_bits(ranks.call(x)[1], expected(x))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(17, 16), (1, 0), (0, 256)], ids=str)
def test_ranks_with_different_tokens(sizes):
    ranks = Ranks(2, timeout_s=5.0)
    x = [inputs(T, 2)[r] for r, T in enumerate(sizes)]
    torch.cuda.synchronize()
    start = time.monotonic()
    outs = ranks.call(x)
    for r in range(2):
        failed(ranks, r, f"rank {r} and rank {1 - r} disagree at call 5")
    assert time.monotonic() - start < 2.0  # told by the header, not by the time-out
    assert all(all_nan(out) for out in outs.values())


@pytest.mark.gpu
def test_ranks_with_different_ops():
    ranks = Ranks(2, timeout_s=5.0)
    x = inputs(16, 2)
    ranks.call(x, op=moetail.all_reduce)
    torch.cuda.synchronize()
    ranks.call(x, [0])
    ranks.call(x, [1], op=moetail.all_reduce)
    failed(ranks, 0, "disagree at call 6")
    failed(ranks, 1, "disagree at call 6")


@pytest.mark.gpu
def test_graphs_of_different_calls_disagree():
    """Replays make no host check: the header does."""
    ranks = Ranks(2, timeout_s=5.0)
    graphs, pool = [], [inputs(16, 2), inputs(17, 2)]
    torch.cuda.synchronize()
    for r in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[r], stream=ranks.streams[r]):
            ranks.call(pool[r], [r])
    for r in range(2):
        with torch.cuda.stream(ranks.streams[r]):
            graphs[r].replay()
    failed(ranks, 0, "disagree")
    failed(ranks, 1, "disagree")


@pytest.mark.gpu
def test_concurrent_use_is_refused():
    ranks = Ranks(2, timeout_s=1.0)
    x, other = inputs(16, 2), torch.cuda.Stream()
    torch.cuda.synchronize()
    first = ranks.call(x, [0])[0]  # polls: rank 1 has not called
    with torch.cuda.stream(other):
        second = moetail.finalize_all_reduce(
            x[0].rows, x[0].row_map, x[0].weights, x[0].shared, workspace=ranks.workspaces[0]
        )
    failed(ranks, 0, "rank 0 began call 5 inside another")
    assert all_nan(second) and all_nan(first)


@pytest.mark.gpu
def test_use_from_two_streams_in_order():
    ranks = Ranks(2)
    x = inputs(16, 2)
    torch.cuda.synchronize()
    ranks.call(x)
    for r, stream in enumerate([torch.cuda.Stream(), torch.cuda.Stream()]):
        stream.wait_stream(ranks.streams[r])
        ranks.streams[r] = stream
    outs = ranks.call(x)
    torch.cuda.synchronize()
    for r in range(2):
        ranks.workspaces[r].check()
        assert_same_bits(outs[r], expected(x))


@pytest.mark.gpu
def test_a_graph_outlives_its_workspace():
    ranks = Ranks(2)
    x = inputs(16, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks.streams[0]):
        out = ranks.call(x, [0])[0]
    control = ranks.workspaces[0].control
    for workspace in ranks.workspaces:
        workspace.destroy()
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    assert all_nan(out) and control is ranks.workspaces[0].control
    with pytest.raises(RuntimeError, match="destroyed"):
        ranks.call(x, [0])


@pytest.mark.gpu
def test_made_inside_a_capture_is_refused():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="outside of a CUDA graph capture"), torch.cuda.graph(graph):
        Workspace.virtual(2, 4, 64)


def two_gpus(rank, folder):
    """One of two processes: 10,000 calls of random size, one rank late, against NCCL and the reference."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device)
    workspace = Workspace(dist.group.WORLD, MAX_TOKENS, H, timeout_s=10.0)
    draw, wrong, nccl = random.Random(5), torch.zeros((), dtype=torch.int64, device=device), 0
    pool = [finalize_inputs(T, K, H, absent=0.1, device="cuda", seed=10 * i + rank) for i, T in enumerate(TOKENS)]
    wanted = []
    for x in pool:
        partial = reference.finalize(x.rows, x.row_map, x.weights, x.shared)
        both = [torch.empty_like(partial) for _ in range(2)]
        dist.all_gather(both, partial)
        wanted.append(reference.all_reduce(both).view(torch.int16))
        dist.all_reduce(partial)
        nccl += int((partial.view(torch.int16) != wanted[-1]).sum())
    for want in wanted:
        wrong += (want != want.clone()).sum()
    torch.cuda._sleep(1)
    for _ in range(10_000):
        i, late = draw.randrange(len(pool)), draw.random() < 0.03 and draw.randrange(2) == rank
        if late:
            torch.cuda._sleep(100_000)
        x = pool[i]
        got = moetail.finalize_all_reduce(x.rows, x.row_map, x.weights, x.shared, workspace=workspace)
        wrong += (got.view(torch.int16) != wanted[i]).sum()
    torch.cuda.synchronize()
    workspace.check()
    assert int(wrong) == 0 and nccl == 0, (int(wrong), nccl)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()  # rank 0 goes on alone
    out = moetail.finalize_all_reduce(x.rows, x.row_map, x.weights, x.shared, workspace=workspace)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="rank 0 waited 10.0 s for rank 1"):
        workspace.check()
    assert all_nan(out) and time.monotonic() - start < 15
    (folder / "seen").touch()
    os._exit(0)


@pytest.mark.gpu2
def test_two_gpus(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    both = [context.Process(target=two_gpus, args=(rank, tmp_path)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=150)
    assert [process.exitcode for process in both] == [0, -signal.SIGKILL]
    assert (tmp_path / "seen").exists()
