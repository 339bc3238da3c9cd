"""The two-shot kernel without a GPU: its machine code, and its arithmetic and places in Triton's interpreter, where the
ranks are processes that share memory. On a GPU: test_two_shot_triton.py."""

import pytest
import torch
from ranks import Ranks

from moetail import Numerics, reference
from moetail.comm import workspace as words
from moetail.comm.memory import Layout, cleared
from moetail.comm.workspace import Kind
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


def interpreted(group, folder, H, calls, programs, config):
    """A rank's calls, (op, T) each, one program after another, against the definition. Its memory is a mapped file."""
    from moetail.comm import finalize_all_reduce_triton as one_shot
    from moetail.comm import two_shot_triton as two_shot
    from moetail.ops.finalize_triton import Facts

    rank, W = group.rank(), group.size()
    layout = Layout(W, MAX_TOKENS, H, 1)
    memory = [
        torch.from_file(f"{folder}/{r}", shared=True, size=layout.size // 2, dtype=torch.int16) for r in range(W)
    ]  # fmt: skip
    cleared(memory[rank], layout)
    group.barrier().wait()
    control = torch.tensor([1, 0, 0, 0, 2**62, 0, *(part.data_ptr() for part in memory)])
    for number, (op, T) in enumerate(calls, start=1):
        everyone = [call_arguments(r, T, H, number) for r in range(W)]
        x, follows = everyone[rank], {"norm": norm_arguments, "mhc": mhc_arguments}.get(op, lambda *_: {})(T, H)
        kind = {
            "none": Kind.FINALIZE_ALL_REDUCE, "x": Kind.ALL_REDUCE, "scatter": Kind.FINALIZE_REDUCE_SCATTER,
            "norm": Kind.FINALIZE_ALL_REDUCE_NORM, "mhc": Kind.FINALIZE_ALL_REDUCE_MHC,
        }[op]  # fmt: skip
        residual_out = torch.empty_like(follows["residual"]) if follows else None
        name = op if follows else "none"
        e = one_shot.Epilogue(name, residual_out=residual_out, **follows)
        partials = [reference.finalize(**arguments) for arguments in everyone]
        out = torch.full((T // W if op == "scatter" else T, H), 7.0, dtype=BF16)
        if op == "x":
            inputs, strides_of_map = (partials[rank], None, None, None, None, None), (0, 0, 0, 0)
        else:
            inputs = (x["rows"], x["row_map"], x["weights"], x["shared"], None, None)
            strides_of_map = (*x["row_map"].stride(), *x["weights"].stride())
        tensors, strides, mixes = one_shot.operands(inputs, control, out, e)
        facts = Facts.of(K, H, Numerics.TRTLLM, 1.0, False)
        place = one_shot.Place(rank, W, MAX_TOKENS, True)
        constants = one_shot.shared_constants(e, facts, place, finalize=op != "x")
        fitted = two_shot._fitted(config, H, name)
        numbers = (T, inputs[0].shape[0], *strides_of_map, 0, 1.0, EPS, *mixes, layout.slice_tokens)
        two_shot._two_shot_kernel[(programs,)](
            *tensors, *numbers, *strides, *two_shot._offsets(layout), **two_shot._options(kind, rank, constants, fitted)
        )
        assert int(control[words.STATUS]) == 0 and int(control[words.CALL]) == number + 1
        want = reference.all_reduce(partials)
        if op == "scatter":
            want = want.chunk(W)[rank] if T else want
        elif follows:
            want, new = getattr(reference, f"all_reduce_{op}")(partials, **follows)
            assert_same_bits(residual_out, new)
        assert_same_bits(out, want)
    return True


# name: (ranks, H, programs, (tile, block, warps), (op, T) of each call)
CALLS = {
    "two-ranks": (2, 72, 2, (1, 32, 1), (("none", 24), ("x", 5), ("scatter", 24), ("none", 1), ("none", 0))),
    "two-ranks-tiles": (2, 40, 1, (4, 64, 2), (("none", 23), ("scatter", 10), ("scatter", 24), ("scatter", 6))),
    "three-ranks": (3, 40, 1, (2, 32, 1), (("none", 20), ("scatter", 9), ("scatter", 0), ("x", 22), ("none", 2))),
    "four-ranks-norm": (4, 33, 1, (1, 0, 1), (("norm", 17), ("norm", 8), ("none", 24))),
    "two-ranks-mhc": (2, 33, 2, (1, 0, 1), (("mhc", 9), ("norm", 7), ("mhc", 4))),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_bits_in_the_interpreter(tmp_path, case):
    from moetail.comm.two_shot_triton import TwoShotConfig

    W, H, programs, (tile, block, warps), calls = case
    with Ranks(W) as ranks:
        config = TwoShotConfig(tile, block, warps, 1)
        assert ranks.run(interpreted, tmp_path, H, calls, programs, config) == [True] * W
