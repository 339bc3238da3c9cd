"""The reference against loops written by another route: Python's fractions for the FMA, numpy fp64 for the sum."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from moetail import Numerics, reference
from moetail.testing import assert_same_bits, finalize_inputs


def exact_fma(a, b, c):
    """a * b + c over the rationals, rounded once to fp32."""
    value = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    nearest = np.float32(float(value))  # within one ulp: fp64 rounds first
    around = [np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf))]
    gaps = [abs(Fraction(float(n)) - value) for n in around]
    best = [n for n, gap in zip(around, gaps, strict=True) if gap == min(gaps)]
    return min(best, key=lambda n: int(n.view(np.uint32)) & 1)  # ties to even


def test_fma_is_rounded_once():
    a, b, c = (torch.tensor([x], dtype=torch.float32) for x in (205.0, 5237765 * 2.0**-54, 1.0))
    assert (a.double() * b.double() + c.double()).float().item() == 1.0  # the trap: two roundings
    assert reference.fma(a, b, c).item() == np.float32(1.0000001)
    assert reference.fma(-a, b, -c).item() == -np.float32(1.0000001)
    below = torch.tensor([5237765 * 2.0**-54 * (1 - 2.0**-23)], dtype=torch.float32)  # the product just below the tie
    for sign in (1.0, -1.0):
        assert reference.fma(sign * a, below, sign * c).item() == exact_fma(sign * 205.0, below.item(), sign)


def test_fma_against_rationals():
    g = np.random.default_rng(0)
    scale = 2.0 ** g.integers(-40, 40, size=(3, 3000))
    a, b, c = (torch.from_numpy((g.standard_normal(3000) * s).astype(np.float32)) for s in scale)
    c[:1000] = -(a * b)[:1000]  # cancellation
    got = reference.fma(a, b, c).numpy()
    want = np.array([exact_fma(*x) for x in zip(a.numpy(), b.numpy(), c.numpy(), strict=True)])
    assert (got == want).all()


def test_fma_keeps_what_is_not_finite():
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([inf, inf, nan, 1.0, 3e38])
    got = reference.fma(a, torch.ones(5), torch.tensor([1.0, -inf, 1.0, inf, 3e38]))
    assert torch.equal(torch.isnan(got), torch.tensor([False, True, True, False, False]))
    assert got[0] == got[3] == got[4] == inf


def fp64_finalize(x, scale=1.0):
    """An independent loop: no rounding at all."""
    rows, row_map, weights, shared = (t.double().numpy() for t in (x.rows, x.row_map, x.weights, x.shared))
    y = np.array(shared)
    for t, k in np.ndindex(*row_map.shape):
        r = int(row_map[t, k])
        if 0 <= r < rows.shape[0]:
            y[t] += scale * weights[t, k] * rows[r]
    return torch.from_numpy(y)


@pytest.mark.parametrize("name", ["TRTLLM", "TRANSFORMERS", "FLASHINFER", "SINGLE_ROUNDING"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_an_unrounded_sum(name, dtype):
    x = finalize_inputs(9, 6, 96, dtype=dtype, absent=0.2)
    got = reference.finalize(x.rows, x.row_map, x.weights, x.shared, routed_scale=2.5, numerics=getattr(Numerics, name))
    want = fp64_finalize(x, 2.5)
    # Cancellation between slots: the error is one of the largest term, so compare on the scale of the sum's terms.
    magnitude = 2.5 * x.rows.double().nan_to_num().abs().max()
    torch.testing.assert_close(got.double() / magnitude, want / magnitude, rtol=0, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        (torch.bfloat16, ("TRTLLM", "TRANSFORMERS", "SINGLE_ROUNDING")),
        (torch.float32, ("TRTLLM", "TRANSFORMERS", "FLASHINFER")),
    ],
)
def test_presets_differ_in_bits(dtype, names):
    """The presets are different functions: a reference that ignored the profile would pass every other test."""
    x = finalize_inputs(64, 8, 256, dtype=dtype, weights_dtype=dtype)
    results = [reference.finalize(x.rows, x.row_map, x.weights, x.shared, numerics=getattr(Numerics, n)) for n in names]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(results[a], results[b]), (names[a], names[b])


def test_signed_zero():
    rows = torch.tensor([[-1e-30]])
    call = (rows, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[1e-30]]))
    kept = reference.finalize(*call)
    assert_same_bits(kept, torch.tensor([[-0.0]]))  # an FMA that underflows keeps its sign
    assert_same_bits(reference.finalize(*call, numerics=Numerics("fma", zero="positive")), torch.tensor([[0.0]]))
    assert_same_bits(reference.finalize(*call, numerics=Numerics("round_f32")), torch.tensor([[0.0]]))  # +0 + -0


def test_no_rows_at_all():
    got = reference.finalize(torch.empty(0, 8), torch.full((3, 2), -1), torch.ones(3, 2), torch.ones(3, 8))
    assert_same_bits(got, torch.ones(3, 8))


def relative_error_of_a_norm(small):
    """The first element of a row of H 8192: 2**22 on rms_norm's grid beside 8191 elements `small`, as its own error."""
    H = 8192
    x = torch.full((1, H), small * 2.0**-22)
    x[0, 0] = 1.0
    got = reference.rms_norm(x, torch.ones(H), 1e-20)[0, 0].item()
    assert small == float(np.float32(small))
    mean = (Fraction(1) + (H - 1) * Fraction(small) ** 2 / 2**44) / H
    return abs(got * float(mean) ** 0.5 - 1.0)


@pytest.mark.parametrize(
    ("small", "bound"),
    [(127.5, 2.0**-24), (1023.5, 2.0**-21), (46340.5, 2.0**-15.5)],
    ids=["8-bits-of-bf16", "11-bits-of-fp16", "24-bits-of-fp32"],
)
def test_the_bound_of_a_norms_error(small, bound):
    """Every element is rounded up by one half, the worst there is: half the sum's bound, and six roundings of fp32."""
    error = relative_error_of_a_norm(small)
    assert error <= bound / 2 + 6 * 2.0**-24
    if bound > 2.0**-16:
        assert error > bound / 8  # the bound of fp32 is met within a factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_is_torchs_within_one_rounding(dtype):
    """F.rms_norm on a CPU computes in fp32 and rounds once, as this does: few elements differ, none by much."""
    x, weight = (torch.randn(64, 2880) * 3.0).to(dtype), torch.randn(2880).to(dtype)
    got, want = reference.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (2880,), weight, 1e-6)
    torch.testing.assert_close(got, want)
    assert (got != want).float().mean() < 1e-3
    assert reference.rms_norm(x[:0], weight, 1e-6).shape == (0, 2880)
