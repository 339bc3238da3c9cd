"""mhc_collapse: every implementation against the reference on raw bits, mhc's own collapse, and its contract."""

import machine_code
import pytest
import torch
from test_finalize_mhc import streams_of

import moetail
from moetail import guards, reference
from moetail.testing import assert_same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def run_on(name, residual, **rest):
    if name != "interpreter":
        return moetail.mhc_collapse(residual, **rest)
    from moetail.ops import mhc_collapse_triton

    out = torch.full((residual.shape[0], residual.shape[2]), float("nan"), dtype=residual.dtype)
    mhc_collapse_triton.launch(residual, *rest.values(), out)
    return out


@pytest.fixture(params=["cpu", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def name(request):
    return request.param


def arguments(T, hc, H, dtype=BF16, device="cpu"):
    mhc = streams_of(T, hc, H, dtype=dtype, norm_dtype=F32, device=device)
    return {n: mhc[n] for n in ("residual", "pre_mix", "norm_weight", "eps")}


CASES = {"hc-4": (3, 4, 5120, BF16), "hc-1": (5, 1, 96, BF16), "hc-3": (4, 3, 257, F16), "hc-8": (2, 8, 1, F32)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bits(name, case):
    named = arguments(*case, device="cuda" if name == "cuda" else "cpu")
    got = run_on(name, **named)
    assert_same_bits(got, reference.mhc_collapse(**named))
    S = named["residual"].double()
    c = (named["pre_mix"].double()[:, :, None] * S).sum(1).to(named["residual"].dtype).double()
    want = c / torch.sqrt(c.square().mean(1, keepdim=True) + named["eps"]) * named["norm_weight"].double()
    torch.testing.assert_close(got.double(), want, rtol=1.6e-2, atol=1e-3)  # bf16's; c may round the other way


def test_the_bits_of_mhc():
    mhc = streams_of(5, 4, 64)
    h, residual = moetail.mhc(torch.randn(5, 64).to(BF16), **mhc)
    rest = {n: mhc[n] for n in ("pre_mix", "norm_weight", "eps")}
    assert_same_bits(moetail.mhc_collapse(residual, **rest), h)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"residual": torch.zeros(3, 64, dtype=BF16)}, "residual must have three dimensions"),
        ({"residual": torch.zeros(3, 9, 64, dtype=BF16)}, "residual must have 1 <= hc <= 8 streams, got 9"),
        ({"residual": torch.zeros(3, 4, 64, dtype=torch.int32)}, "residual must be float32"),
        ({"residual": torch.zeros(3, 64, 4, dtype=BF16).transpose(1, 2)}, "residual must have inner stride 1"),
        ({"pre_mix": torch.zeros(3, 3)}, "pre_mix must have shape"),
        ({"pre_mix": torch.zeros(3, 4, dtype=BF16)}, "pre_mix must be float32"),
        ({"pre_mix": torch.zeros(4, 3).T}, "pre_mix must have inner stride 1"),
        ({"norm_weight": torch.ones(63)}, "norm_weight must have shape"),
        ({"eps": 0.0}, "eps must be between"),
        ({"norm_weight": torch.ones(64, requires_grad=True)}, "norm_weight must not require gradients"),
    ],
)
def test_refused(change, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.mhc_collapse(**{**arguments(3, 4, 64), **change})


def test_no_tokens_opcheck_and_one_graph():
    assert moetail.mhc_collapse(**arguments(0, 4, 8)).shape == (0, 8)
    named = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments(3, 4, 40).items()}
    torch.library.opcheck(torch.ops.moetail.mhc_collapse.default, tuple(named.values()))
    compiled = torch.compile(lambda: moetail.mhc_collapse(**named), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(), reference.mhc_collapse(**named))


COMPILE = """
import json
from machine_code import sm_90
from moetail.ops import mhc_collapse_triton as m
kernel, results = m._collapse_kernel, {}
for config in m.every_config(m.ROW_SHAPES, 5120, 2):
    options = m._options(5120, 4, True, config)
    constants = {n: options.pop(n) for n in list(options) if n.isupper()}
    aligned = [n for n in kernel.arg_names if n.startswith(("residual_stride", "out_stride"))]
    code = sm_90(kernel, dict.fromkeys(("residual", "norm_weight", "out"), "*bf16"), constants, options, aligned,
                 dict(pre_mix="*fp32"))
    results[str(config.warps)] = dict(local=code.local, stack=code.stack, wait=code.before_wait,
                                      fma=code.count("fma.rn.f32"), vectors=code.vectors)
print(json.dumps(results))
"""


def test_machine_code():
    for warps, code in machine_code.run(COMPILE).items():
        assert code["local"] == code["stack"] == code["wait"] == code["fma"] == 0 < code["vectors"], warps


@pytest.mark.gpu
def test_no_compilation_for_any_t_after_the_first():
    calls = [arguments(T, 4, 1024, device="cuda") for T in (5, 1, 2, 16, 17, 255, 256, 700)]
    moetail.mhc_collapse(**calls[0])
    with guards.no_jit("error"):
        for named in calls:
            moetail.mhc_collapse(**named)
