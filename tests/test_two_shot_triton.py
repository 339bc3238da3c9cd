"""The two-shot kernel on virtual ranks, which also cross to the one-shot kernel and back; on two GPUs, against NCCL."""

import random
import time

import pytest
import torch
from test_finalize_all_reduce_triton import H, K, Ranks, Stress, all_nan, expected, failed, inputs

import moetail
from moetail import Workspace, guards, reference
from moetail.comm import memory
from moetail.testing import assert_same_bits, finalize_inputs

MAX_TOKENS = 8192
LARGE = 2000  # above the switch at every W


def made(W, timeout_s=20.0, max_tokens=MAX_TOKENS):
    """Virtual ranks, everything loaded: an empty call compiles both kernels of its op."""
    assert memory.one_shot_tokens(torch.device("cuda", 0), W) < LARGE
    return Ranks(W, timeout_s, max_tokens=max_tokens)


def on_every_rank(ranks, call):
    """call(r) on each rank's stream; a barrier of the host behind it."""
    outs = []
    for r, stream in enumerate(ranks.streams):
        with torch.cuda.stream(stream):
            outs.append(call(r))
    torch.cuda.synchronize()
    for workspace in ranks.workspaces:
        workspace.check()
    return outs


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_bits(W):
    """Sizes around the switch, multiples of W and not; both ops."""
    ranks, switch = made(W), memory.one_shot_tokens(torch.device("cuda", 0), W)
    pool = [inputs(T, W) for T in (switch, switch + 1, 1, 1000, 1023, LARGE, 4096, MAX_TOKENS, switch)]
    wanted = [expected(x) for x in pool]
    torch.cuda.synchronize()
    with guards.no_jit():
        for x, want in zip(pool, wanted, strict=True):
            for out in ranks.call(x).values():
                torch.cuda.synchronize()
                assert_same_bits(out, want)
    for workspace in ranks.workspaces:
        workspace.check()
    partials = [reference.finalize(i.rows, i.row_map, i.weights, i.shared) for i in pool[5]]
    outs = on_every_rank(ranks, lambda r: moetail.all_reduce(partials[r], workspace=ranks.workspaces[r]))
    for out in outs:
        assert_same_bits(out, wanted[5])
    on_every_rank(  # in place
        ranks, lambda r: moetail.all_reduce(partials[r], workspace=ranks.workspaces[r], out=partials[r])
    )  # fmt: skip
    for out in partials:
        assert_same_bits(out, wanted[5])


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 8])
def test_norms(W):
    """The sandwich, in place; the weights of another dtype."""
    ranks = made(W)
    weights = {"norm_weight": torch.randn(H, device="cuda"), "post_norm_weight": torch.randn(H, device="cuda")}
    for T in (0, 1, 1023, LARGE):  # 0: loads the kernels
        x = inputs(T, W)
        residual = torch.randn(T, H, device="cuda").bfloat16()
        h, new = reference.all_reduce_norm([expected(x)], residual=residual, eps=1e-6, **weights)
        residuals = [residual.clone() for _ in range(W)]
        torch.cuda.synchronize()

        def call(r, x=x, residuals=residuals):
            i = x[r]
            return moetail.finalize_all_reduce_norm(
                i.rows, i.row_map, i.weights, i.shared, workspace=ranks.workspaces[r], residual=residuals[r],
                residual_out=residuals[r], out=i.shared, eps=1e-6, **weights,
            )  # fmt: skip

        for got, changed in on_every_rank(ranks, call):
            assert_same_bits(got, h)
            assert_same_bits(changed, new)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4])
def test_mhc(W):
    ranks, hc = made(W), 4
    for T in (0, 1, LARGE + 1):
        x = inputs(T, W)
        streams = torch.randn(T, hc, H, device="cuda").bfloat16()
        mixes = {"post_mix": torch.rand(T, hc, device="cuda"), "res_mix": torch.rand(T, hc, hc, device="cuda"),
                 "pre_mix": torch.rand(T, hc, device="cuda")}  # fmt: skip
        rest = mixes | {"norm_weight": torch.randn(H, device="cuda").bfloat16(), "eps": 1e-6}
        h, new = reference.all_reduce_mhc([expected(x)], residual=streams, **rest)
        torch.cuda.synchronize()

        def call(r, x=x, streams=streams, rest=rest):
            i = x[r]
            return moetail.finalize_all_reduce_mhc(
                i.rows, i.row_map, i.weights, i.shared, workspace=ranks.workspaces[r], residual=streams, **rest
            )

        for got, changed in on_every_rank(ranks, call):
            assert_same_bits(got, h)
            assert_same_bits(changed, new)


def scatter(ranks, x):
    def call(r):
        i = x[r]
        return moetail.finalize_reduce_scatter(
            i.rows, i.row_map, i.weights, i.shared, workspace=ranks.workspaces[r]
        )  # fmt: skip

    return call


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 4])
def test_reduce_scatter(W):
    """Back to back, so that a rank may be a call ahead; between all-reduces of both paths."""
    ranks = made(W)
    pool = [inputs(T, W) for T in (0, W, 17 * W, 600 * W)]
    wanted = [expected(x) for x in pool]
    on_every_rank(ranks, scatter(ranks, pool[0]))
    torch.cuda._sleep(1)  # loaded before any rank polls
    torch.cuda.synchronize()
    draw, got = random.Random(W), []
    for _ in range(40):
        i = draw.randrange(len(pool))
        if draw.random() < 0.3:
            ranks.call(pool[draw.randrange(1, len(pool))])
        late = draw.randrange(W)
        for r in draw.sample(range(W), W):
            with torch.cuda.stream(ranks.streams[r]):
                if r == late:
                    torch.cuda._sleep(100_000)
                got.append((r, i, scatter(ranks, pool[i])(r)))
    torch.cuda.synchronize()
    for r, i, out in got:
        assert_same_bits(out, wanted[i].chunk(W)[r] if pool[i][0].shared.shape[0] else wanted[i])
    for workspace in ranks.workspaces:
        workspace.check()


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3, 8])
def test_sizes_that_cross_the_switch(W):
    """Eager calls and two graphs, mixed, back to back, with late ranks."""
    stress = Stress(made(W), seed=W, tokens=(0, 1, 17, 128, 129, 257, 700, LARGE))
    with guards.no_jit():
        graphs = [stress.graphs(40), stress.graphs(40)]
        torch.cuda.synchronize()
        for _ in range(30):
            stress.replay(graphs[stress.draw.randrange(2)])
            stress.eager(5)
        torch.cuda.synchronize()
    for workspace in stress.ranks.workspaces:
        workspace.check()
    assert [int(w) for w in stress.wrong] == [0] * W


@pytest.mark.gpu
def test_a_rank_that_never_calls():
    ranks, x, few = made(2, timeout_s=0.3), inputs(LARGE, 2), inputs(16, 2)
    torch.cuda.synchronize()
    start = time.monotonic()
    out = ranks.call(x, [0])[0]
    failed(ranks, 0, "rank 0 waited 0.3 s for rank 1 at call 5")
    assert 0.25 < time.monotonic() - start < 1.5 and all_nan(out)
    start = time.monotonic()
    out, small = ranks.call(x, [0])[0], ranks.call(few, [0])[0]  # later calls do not wait, on either path
    torch.cuda.synchronize()
    assert time.monotonic() - start < 0.2 and all_nan(out) and all_nan(small)
    failed(ranks, 0, "at call 5")  # the first fault stays
    out = ranks.call(x, [1])[1]  # late: rank 0 has given up and sends no results
    failed(ranks, 1, "rank 1 waited 0.3 s for rank 0 at call 5")
    assert all_nan(out)
    for workspace in ranks.workspaces:
        workspace.destroy()
    ranks = made(2)  # the next workspace in this process works
    outs = ranks.call(x)
    torch.cuda.synchronize()
    assert_same_bits(outs[1], expected(x))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(LARGE, LARGE - 1), (17, LARGE), (LARGE, 0), (LARGE, 300)], ids=str)
def test_ranks_with_different_tokens(sizes):
    """On one path, and on one path each."""
    ranks = made(2, timeout_s=5.0)
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
    ranks, x = made(2, timeout_s=5.0), inputs(LARGE, 2)
    on_every_rank(ranks, scatter(ranks, inputs(0, 2)))
    torch.cuda.synchronize()
    ranks.call(x, [0])
    with torch.cuda.stream(ranks.streams[1]):
        out = scatter(ranks, x)(1)
    failed(ranks, 0, "disagree at call 6")
    failed(ranks, 1, "disagree at call 6")
    assert all_nan(out)


@pytest.mark.gpu
def test_concurrent_use_is_refused():
    ranks, x, other = made(2, timeout_s=1.0), inputs(LARGE, 2), torch.cuda.Stream()
    torch.cuda.synchronize()
    first = ranks.call(x, [0])[0]  # polls: rank 1 has not called
    with torch.cuda.stream(other):
        second = moetail.finalize_all_reduce(
            x[0].rows, x[0].row_map, x[0].weights, x[0].shared, workspace=ranks.workspaces[0]
        )
    failed(ranks, 0, "rank 0 began call 5 inside another")
    assert all_nan(second) and all_nan(first)


@pytest.mark.gpu
def test_a_graph_outlives_its_workspace():
    ranks, x = made(2), inputs(LARGE, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=ranks.streams[0]):
        out = ranks.call(x, [0])[0]
    for workspace in ranks.workspaces:
        workspace.destroy()
    torch.cuda.empty_cache()
    graph.replay()
    torch.cuda.synchronize()
    assert all_nan(out)


def two_gpus(rank, folder):
    """One of two processes: calls of random size on both paths, one rank late, against NCCL and the reference."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device)
    workspace = Workspace(dist.group.WORLD, MAX_TOKENS, H, timeout_s=20.0)
    draw, wrong, nccl = random.Random(5), torch.zeros((), dtype=torch.int64, device=device), 0
    sizes = (0, 1, 64, 512, 514, 1000, 1023, 4096, MAX_TOKENS)
    pool = [finalize_inputs(T, K, H, absent=0.1, device="cuda", seed=10 * i + rank) for i, T in enumerate(sizes)]
    wanted = []
    for x in pool:
        partial = reference.finalize(x.rows, x.row_map, x.weights, x.shared)
        both = [torch.empty_like(partial) for _ in range(2)]
        dist.all_gather(both, partial)
        wanted.append(reference.all_reduce(both).view(torch.int16))
        dist.all_reduce(partial)
        nccl += int((partial.view(torch.int16) != wanted[-1]).sum())
    for _ in range(2000):
        i = draw.randrange(len(pool))
        if draw.random() < 0.03 and draw.randrange(2) == rank:
            torch.cuda._sleep(100_000)
        x, want = pool[i], wanted[i]
        args = (x.rows, x.row_map, x.weights, x.shared)
        if draw.random() < 0.2 and want.shape[0] % 2 == 0:
            got = moetail.finalize_reduce_scatter(*args, workspace=workspace)
            want = want.chunk(2)[rank] if want.shape[0] else want
        else:
            got = moetail.finalize_all_reduce(*args, workspace=workspace)
        wrong += (got.view(torch.int16) != want).sum()
    torch.cuda.synchronize()
    workspace.check()
    assert int(wrong) == 0 and nccl == 0, (int(wrong), nccl)
    dist.barrier()
    workspace.destroy()
    dist.destroy_process_group()


@pytest.mark.gpu2
def test_two_gpus(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    both = [context.Process(target=two_gpus, args=(rank, tmp_path)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=150)
    assert [process.exitcode for process in both] == [0, 0]
