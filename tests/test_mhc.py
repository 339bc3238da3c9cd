"""mhc: every implementation against the reference on raw bits, and its contract.

The same device function and definition as finalize_mhc's, whose tests hold the formulas against fp64.
"""

import machine_code
import pytest
import torch
from test_finalize_mhc import streams_of

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def run_on(name, y, **mhc):
    if name != "interpreter":
        return moetail.mhc(y, **mhc)
    from moetail.ops import mhc_triton

    h, new = torch.full_like(y, float("nan")), torch.full(mhc["residual"].shape, float("nan"), dtype=y.dtype)
    mhc_triton.launch(y, *mhc.values(), h, new)
    return h, new


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def name(request):
    return request.param


def arguments(T, hc, H, dtype=BF16, device="cpu", norm_dtype=None, seed=0):
    """In the order of the schema; y is a window of something wider, with a row of negative zeros."""
    mhc = streams_of(T, hc, H, dtype=dtype, norm_dtype=norm_dtype, device=device, seed=seed)
    names = ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight", "eps")
    wide = torch.full((T, H + 8), float("nan"))
    wide[:, :H] = torch.randn(T, H, generator=torch.Generator().manual_seed(seed + 7))
    wide[-1:, :H] = -0.0
    return wide.to(dtype).to(device)[:, :H], {n: mhc[n] for n in names}


CASES = {
    "hc-4": (3, 4, 5120, BF16),
    "hc-1": (5, 1, 96, BF16),
    "hc-3": (4, 3, 257, BF16),
    "hc-8": (2, 8, 72, BF16),
    "fp16": (4, 4, 255, F16),
    "fp32": (3, 2, 255, F32),
    "one-column": (3, 4, 1, BF16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits(name, case):
    y, mhc = arguments(*case, device="cuda" if name == "cuda" else "cpu", norm_dtype=F32)
    for got, want in zip(run_on(name, y, **mhc), reference.mhc(y, **mhc), strict=True):
        assert torch.isfinite(got).all()
        assert_same_bits(got, want)


def test_a_negative_zero_reaches_streams_of_zeros(name):
    """Where a finalize of one row would have made it positive."""
    y, mhc = arguments(2, 2, 8, device="cuda" if name == "cuda" else "cpu")
    mhc |= {"residual": torch.full_like(mhc["residual"], -0.0), "post_mix": torch.ones_like(mhc["post_mix"])}
    mhc |= {"res_mix": torch.ones_like(mhc["res_mix"])}
    _, new = run_on(name, y, **mhc)
    assert torch.signbit(new[-1]).all() and (new[-1] == 0).all()


def test_no_tokens_and_in_place():
    y, mhc = arguments(0, 4, 64)
    h, new = moetail.mhc(y, **mhc)
    assert h.shape == (0, 64) and new.shape == (0, 4, 64)
    y, mhc = arguments(3, 4, 64)
    want = reference.mhc(y, **mhc)
    got = moetail.mhc(y, **mhc, out=y, residual_out=mhc["residual"])
    assert got[0] is y and got[1] is mhc["residual"]
    for ours, theirs in zip(got, want, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"y": torch.zeros(64, dtype=BF16)}, "y must have two dimensions"),
        ({"y": torch.zeros(3, 64, dtype=torch.int32)}, "y must be float32"),
        ({"y": torch.zeros(3, 64)}, "residual must have the dtype of y"),
        ({"y": torch.zeros(64, 3, dtype=BF16).T}, "y must have inner stride 1"),
        ({"post_mix": torch.zeros(3, 3)}, "post_mix must have shape"),
        ({"eps": "small"}, "eps must be a number"),
        ({"out": torch.zeros(2, 64, dtype=BF16)}, "out must have shape"),
        ({"norm_weight": torch.ones(64, requires_grad=True)}, "norm_weight must not require gradients"),
    ],
)
def test_refused(change, says):
    y, mhc = arguments(3, 4, 64)
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.mhc(**{"y": y, **mhc, **change})


def test_overlap_is_refused():
    y, mhc = arguments(3, 4, 64)
    with pytest.raises(ValueError, match="^out must not overlap residual"):
        moetail.mhc(y, **mhc, out=mhc["residual"][:, 1])
    new = torch.zeros(3, 4, 64, dtype=BF16)
    with pytest.raises(ValueError, match="^residual_out must not overlap y"):
        moetail.mhc(new[:, 1], **mhc, residual_out=new)


def test_opcheck_and_one_graph():
    y, mhc = arguments(3, 4, 40, norm_dtype=F32)
    own = [t.clone() if isinstance(t, torch.Tensor) else t for t in mhc.values()]
    outputs = torch.empty(3, 40, dtype=BF16), torch.empty(3, 4, 48, dtype=BF16)[:, :, :40]
    torch.library.opcheck(torch.ops.moetail.mhc.default, (y.clone(), *own, *outputs))
    compiled = torch.compile(lambda y: moetail.mhc(y, **mhc), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(y), reference.mhc(y, **mhc), strict=True):
        assert_same_bits(got, want)


COMPILE = """
import json
from machine_code import sm_90
from moetail.ops import mhc_triton as m
kernel, results = m._mhc_kernel, {}
strides = [n for n in kernel.arg_names if n.startswith(("y_stride", "out_stride", "residual_stride", "residual_out_s"))]
pointers = dict.fromkeys(("y", "residual", "norm_weight", "out", "residual_out"), "*bf16")
mixes = dict.fromkeys(("post_mix", "res_mix", "pre_mix"), "*fp32")
for config in m.every_config(m.ROW_SHAPES, 5120, 2):
    options = m._options(m._Kind(5120, 4, True), config)
    constants = {n: options.pop(n) for n in list(options) if n.isupper()}
    code = sm_90(kernel, pointers, constants, options, strides, mixes)
    results[str(config.warps)] = dict(local=code.local, stack=code.stack, registers=code.registers,
                                      wait=code.before_wait, fma=code.count("fma.rn.f32"), threads=32 * config.warps)
print(json.dumps(results))
"""


def test_machine_code():
    for warps, code in machine_code.run(COMPILE).items():
        assert code["local"] == code["stack"] == code["wait"] == code["fma"] == 0, warps
        assert code["registers"] * code["threads"] <= 65536, warps


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls = [arguments(T, 4, 1024, device="cuda") for T in (5, 1, 2, 16, 17, 255, 256, 700)]
    moetail.mhc(calls[0][0], **calls[0][1])
    with guards.no_jit("error"):
        for y, mhc in calls:
            moetail.mhc(y, **mhc)
