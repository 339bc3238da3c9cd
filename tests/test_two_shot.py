"""The two-shot kernel without a GPU: its machine code, and its arithmetic and places in Triton's interpreter, where the
ranks are processes that share memory. On a GPU: test_two_shot_triton.py."""

import contextlib
import dataclasses

import machine_code
import pytest
import torch
from ranks import Ranks

from moetail import Numerics, Quant, reference, tuning
from moetail.comm import workspace as words
from moetail.comm.memory import Layout, cleared
from moetail.comm.workspace import Fault, FaultKind, Kind
from moetail.testing import assert_same_bits, finalize_inputs

K, BF16 = 3, torch.bfloat16
MAX_TOKENS = 24
EPS = 1e-6


def norm_arguments(T, H):
    generator = torch.Generator().manual_seed(T)
    return {
        "residual": torch.randn(T, H, generator=generator).to(BF16),
        "norm_weight": torch.randn(H, generator=generator).to(BF16), "eps": EPS,
    }  # fmt: skip


def mhc_arguments(T, H, hc=2):
    generator = torch.Generator().manual_seed(T)
    return {
        "residual": torch.randn(T, hc, H, generator=generator).to(BF16),
        "post_mix": torch.rand(T, hc, generator=generator), "res_mix": torch.rand(T, hc, hc, generator=generator),
        "pre_mix": torch.rand(T, hc, generator=generator),
        "norm_weight": torch.randn(H, generator=generator).to(BF16), "eps": EPS,
    }  # fmt: skip


def call_arguments(rank, T, H, call):
    x = finalize_inputs(T, K, H, absent=0.2, seed=100 * call + rank)
    return {"rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared}


COMPILE = """
import json, re
from machine_code import sm_90
from moetail.comm import two_shot_triton as m
from moetail.comm.workspace import Kind
kernel, results = m._two_shot_kernel, {}
for W, H, K, epilogue, kind in (
    (2, 5120, 6, "none", Kind.FINALIZE_ALL_REDUCE), (3, 5120, 6, "none", Kind.FINALIZE_ALL_REDUCE),
    (4, 7168, 8, "none", Kind.FINALIZE_ALL_REDUCE), (8, 7168, 8, "none", Kind.FINALIZE_ALL_REDUCE),
    (2, 5120, 6, "none", Kind.FINALIZE_REDUCE_SCATTER), (8, 5120, 6, "none", Kind.FINALIZE_REDUCE_SCATTER),
    (2, 5120, 1, "none", Kind.ALL_REDUCE), (2, 5120, 6, "norm", Kind.FINALIZE_ALL_REDUCE_NORM),
    (4, 7168, 8, "norm", Kind.FINALIZE_ALL_REDUCE_NORM), (2, 5120, 6, "mhc", Kind.FINALIZE_ALL_REDUCE_MHC),
):
    config, finalize = m.heuristic(W, H, epilogue), kind != Kind.ALL_REDUCE
    options = m._options(kind, W - 1, {}, config)
    backend = dict(num_warps=options.pop("num_warps"), maxnreg=options.pop("maxnreg"), enable_fp_fusion=False,
                   launch_pdl=True)
    constants = options | dict(K=K, H=H, PRODUCT="fma", GROUPS=1, SCALE="none", TWO_ROUNDINGS=True, POSITIVE_ZERO=False,
                               PDL=True, FINALIZE=finalize, EPILOGUE=epilogue, HC=4 if epilogue == "mhc" else 0,
                               ZERO_CENTRED=False, QUANT=None, W=W, gate=None, num_valid_rows=None,
                               post_norm_weight=None, map_stride_k=1, weights_stride_k=1)
    pointers = dict(rows="*bf16", row_map="*i32", weights="*fp32", shared="*bf16", out="*bf16", control="*i64",
                    residual="*bf16", norm_weight="*bf16", residual_out="*bf16")
    mixes = dict.fromkeys(("post_mix", "res_mix", "pre_mix"), "*fp32")
    absent = [] if epilogue == "mhc" else [*mixes]
    absent += ["residual", "norm_weight", "residual_out"] if epilogue == "none" else []
    absent += ["values", "scales"]
    absent += [] if finalize else ["row_map", "weights", "shared"]
    constants |= dict.fromkeys(absent)
    pointers = {n: k for n, k in pointers.items() if n not in absent}
    aligned = [n for n in kernel.arg_names if n not in (*constants, *pointers) and (
        n in ("rows_stride", "shared_stride", "out_stride", "arrivals", "result_flags", "inbox", "results")
        or n.startswith("residual"))]
    code = sm_90(kernel, pointers, constants, backend, aligned, {n: k for n, k in mixes.items() if n not in absent})
    releases = [before[before.rindex("bar.sync"):] for before in code.ptx.split("st.release.sys.global.b64")[:-1]]
    acquired = [after[: after.index("ld.global.cg")] for after in code.ptx.split("ld.acquire.sys.global.b64")[2:]
                if "ld.global.cg" in after]
    results[f"W={W} H={H} {kind.name}"] = dict(
        registers=code.registers, allowed=config.registers, stack=code.stack, before_wait=code.before_wait,
        threads=config.threads * config.programs, narrow=code.count(r"(?:st|ld)\\.global(?:\\.cg)?\\.b16"),
        vectors=code.count(r"st\\.global\\.v4\\.b32"), releases=len(releases),
        stores_after_the_barrier=sum(text.count("st.global") for text in releases),
        no_barrier=sum("bar.sync" not in text for text in acquired),
        remote_atomics=code.count(r"(?:atom|red)\\.[^;]*\\.sys|multimem"))
print(json.dumps(results))
"""


def test_machine_code():
    """Compiled here for sm_90: all programs resident, 16 bytes a store to a peer, flags behind a barrier, data behind
    the flag and a barrier, nothing read before the wait for the kernel before, no atomic that leaves the GPU.

    Spills with Triton 3.9: none but in the mHC variant, 152 bytes."""
    for name, code in machine_code.run(COMPILE).items():
        assert code["registers"] <= code["allowed"] and code["registers"] * code["threads"] <= 65536, f"{name}: {code}"
        assert code["stack"] <= (256 if "MHC" in name else 64), f"{name}: {code}"
        assert code["narrow"] == code["remote_atomics"] == code["before_wait"] == 0, f"{name}: {code}"
        assert code["vectors"] >= 2 and code["stores_after_the_barrier"] == code["no_barrier"] == 0, f"{name}: {code}"
        assert code["releases"] == (1 if "SCATTER" in name else 2), f"{name}: {code}"


def test_configs():
    """Every config a tuner may try keeps its promise of residency, and vectors."""
    from moetail.comm import two_shot_triton as two_shot

    for H in (12, 1000, 2048, 5120, 7168):
        for epilogue in ("none", "norm", "mhc"):
            for config in (two_shot.heuristic(2, H, epilogue), *two_shot.every_config(H, epilogue)):
                threads = config.threads * config.programs
                assert threads <= 2048 and config.registers * threads <= 65536 and config.registers >= 40
                assert config.tile in (1, 2, 4) and config.block >= config.threads
                assert config.block >= H if epilogue != "none" else True
                assert config.block >= min(8 * config.threads, H)


def interpreted(group, folder, H, calls, programs, config):
    """A rank's calls, (op, T) each, through the kernels' own launches, one program after another, against the
    definition. Its memory is a mapped file."""
    from moetail.comm import finalize_all_reduce_triton as one_shot
    from moetail.comm import two_shot_triton as two_shot

    rank, W = group.rank(), group.size()
    tuning.ONE_SHOT_TOKENS["cpu", W] = 0
    torch.cuda.device = lambda _: contextlib.nullcontext()  # this process is this test's own
    one_shot._compile = two_shot._compile_scatter = lambda *_: None
    one_shot.Place.programs = lambda *_: programs
    two_shot.heuristic = lambda _, H, epilogue: two_shot._fitted(config, H, epilogue)
    layout = Layout(W, MAX_TOKENS, H, 0)
    memory = [
        torch.from_file(f"{folder}/{r}", shared=True, size=layout.size // 2, dtype=torch.int16) for r in range(W)
    ]  # fmt: skip
    cleared(memory[rank], layout)
    group.barrier().wait()
    control = torch.tensor([1, 0, 0, 0, 2**62, 0, *(part.data_ptr() for part in memory)])
    place = one_shot.Place(rank, W, MAX_TOKENS, True)
    for number, (op, T) in enumerate(calls, start=1):
        everyone = [call_arguments(r, T, H, number) for r in range(W)]
        partials = [reference.finalize(**arguments) for arguments in everyone]
        want, epilogue, follows = reference.all_reduce(partials), one_shot.Epilogue(), {}
        if op in ("norm", "mhc", "fp8"):
            name = "mhc" if op == "mhc" else "norm"
            follows = {"norm": norm_arguments, "mhc": mhc_arguments}[name](T, H)
            want, new = getattr(reference, f"all_reduce_{name}")(partials, **follows)
            epilogue = one_shot.Epilogue(name, residual_out=torch.empty_like(new), **follows)
        if op == "fp8":  # h is quantized too
            quant = Quant.FP8_GROUP128
            values, scales = torch.zeros(T, H, dtype=torch.uint8), torch.zeros(T, H // 128)
            epilogue = dataclasses.replace(epilogue, quant=quant.name, values=values, scales=scales)
        out = torch.full((T // W if op == "scatter" else T, H), 7.0, dtype=BF16)
        if op == "x":
            one_shot.launch_all_reduce(partials[rank], control, place, out)
        else:
            inputs = (*everyone[rank].values(), None, None, 1.0, Numerics.TRTLLM, control, place, out)
            if op == "scatter":
                two_shot.launch_reduce_scatter(*inputs)
                want = want.chunk(W)[rank] if T else want
            else:
                one_shot.launch(*inputs, epilogue)
        assert int(control[words.STATUS]) == 0 and int(control[words.CALL]) == number + 1
        assert_same_bits(out, want)
        if follows:
            assert_same_bits(epilogue.residual_out, new)
        if op == "fp8":
            wanted_values, wanted_scales = reference.quantize(want, quant)
            assert_same_bits(values, wanted_values.view(torch.uint8))
            assert_same_bits(scales, wanted_scales)
    return True


def disagreeing(group, folder):
    """The ranks' T differ: the fault word and the output of this rank, and of its next call."""
    from moetail.comm import finalize_all_reduce_triton as one_shot
    from moetail.comm import two_shot_triton as two_shot
    from moetail.ops.finalize_triton import Facts

    rank, H = group.rank(), 40
    layout = Layout(2, MAX_TOKENS, H, 1)
    memory = [torch.from_file(f"{folder}/{r}", shared=True, size=layout.size // 2, dtype=torch.int16) for r in range(2)]
    cleared(memory[rank], layout)
    group.barrier().wait()
    host = torch.zeros(1, dtype=torch.int64)
    control = torch.tensor([1, 0, 0, 0, 2**62, host.data_ptr(), *(part.data_ptr() for part in memory)])
    outs = []
    for _ in range(2):
        x = torch.randn(9 + rank, H).to(BF16)
        out = torch.full_like(x, 7.0)
        tensors, strides, mixes = one_shot.operands((x, *(None,) * 5), control, out, one_shot.Epilogue())
        place = one_shot.Place(rank, 2, MAX_TOKENS, True)
        constants = one_shot.shared_constants(
            one_shot.Epilogue(), Facts.of(1, H, Numerics.TRTLLM, 1.0, False), place, finalize=False
        )  # fmt: skip
        options = two_shot._options(Kind.ALL_REDUCE, rank, constants, two_shot.TwoShotConfig(2, 64, 1, 1))
        numbers = (*x.shape[:1], *x.shape[:1], 0, 0, 0, 0, 0, 1.0, 0.0, *mixes, layout.slice_tokens)
        two_shot._two_shot_kernel[(2,)](*tensors, *numbers, *strides, *two_shot._offsets(layout), **options)
        outs.append(bool(out.isnan().all()))
    return int(host), int(control[words.STATUS]), int(control[words.CALL]), outs


def test_ranks_that_disagree_in_the_interpreter(tmp_path):
    with Ranks(2) as ranks:
        for rank, (host, status, calls, outs) in enumerate(ranks.run(disagreeing, tmp_path)):
            assert Fault.decode(host) == Fault(FaultKind.DISAGREED, 1 - rank, 1) and host == status
            assert calls == 3 and outs == [True, True]


# name: (ranks, H, programs, (tile, block, warps), (op, T) of each call)
CALLS = {
    "two-ranks": (2, 72, 2, (1, 32, 1), (("none", 24), ("x", 5), ("scatter", 24), ("none", 1))),
    "two-ranks-tiles": (2, 40, 1, (4, 64, 2), (("none", 23), ("scatter", 10), ("scatter", 24), ("scatter", 6))),
    "three-ranks": (3, 40, 1, (2, 32, 1), (("none", 20), ("scatter", 9), ("scatter", 0), ("x", 22), ("none", 2))),
    "four-ranks-norm": (4, 33, 1, (1, 0, 1), (("norm", 17), ("norm", 8), ("none", 24))),
    "two-ranks-fp8": (2, 128, 1, (2, 0, 1), (("fp8", 7), ("norm", 4))),
    "two-ranks-mhc": (2, 33, 2, (1, 0, 1), (("mhc", 9), ("norm", 7), ("mhc", 4))),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_bits_in_the_interpreter(tmp_path, case):
    from moetail.comm.two_shot_triton import TwoShotConfig

    W, H, programs, (tile, block, warps), calls = case
    with Ranks(W) as ranks:
        config = TwoShotConfig(tile, block, warps, 1)
        assert ranks.run(interpreted, tmp_path, H, calls, programs, config) == [True] * W
