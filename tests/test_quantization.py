"""The formats: `reference.quantize` against exact arithmetic, and what a Quantized is."""

from fractions import Fraction

import pytest
import torch

from moetail import Quant, Quantized, reference
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
FORMATS = [Quant.FP8_GROUP128, Quant.FP8_GROUP128_UE8M0, Quant.MXFP8]
by_name = pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)

# e4m3 has 127 sizes; the byte is their place in rising order.
SIZES = [Fraction(m, 512) for m in range(8)]
SIZES += [Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-6, 9) for m in range(8)][:-1]


def element(x):
    """The byte of the e4m3 nearest to a Fraction, the even one of two; beyond 448 it is 448."""
    gaps = [abs(abs(x) - size) for size in SIZES]
    near = min(gaps)
    places = [i for i, gap in enumerate(gaps) if gap == near]
    return min(places, key=lambda i: i % 2) | (0x80 if x < 0 else 0)


def fp32(x):
    return Fraction(torch.tensor(float(x), dtype=torch.float32).item())


def oracle(row, quant):
    """(bytes, scales) of one row of floats, in Fractions. A quotient of two fp32 is rounded to fp32 once, by fp64."""
    values, scales = [], []
    for first in range(0, len(row), quant.group):
        group = [Fraction(v) for v in row[first : first + quant.group]]
        largest = max(max(map(abs, group)), fp32(1e-10) if quant.scale_dtype == torch.float32 else Fraction(0))
        if quant.power_of_two:
            k = -127
            while largest > 448 * Fraction(2) ** k:
                k += 1
            scale = Fraction(2) ** k
            scales.append(k + 127 if quant.scale_dtype == torch.uint8 else float(scale))
        else:
            scale = fp32(float(largest) / 448)
            scales.append(float(scale))
        values += [element(fp32(float(v) / float(scale))) for v in group]
    return values, scales


def rows():
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(256, generator=g) * torch.exp2(torch.randint(-12, 12, (256,), generator=g).float())
    tiny = torch.randn(256, generator=g) * 1e-12
    edges = torch.tensor([448.0, -447.0, 1.75, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 0.0, -3.5]).repeat(32)
    above = edges.clone()
    above[::32] = 450.0  # the next bf16 above 448: the power of two is the next one
    ties = (torch.arange(256) / 16.0 + 1.0) * 16
    zeros = torch.cat([torch.zeros(128), torch.full((128,), 1e30)])
    return torch.stack([spread, tiny, edges, above, ties, zeros]).to(BF16)


@by_name
def test_against_exact_arithmetic(quant):
    h = rows()
    values, scales = reference.quantize(h, quant)
    for t, row in enumerate(h.tolist()):
        want, want_scales = oracle(row, quant)
        got = values[t].view(torch.uint8).tolist()
        nonzero = [i for i, byte in enumerate(want) if byte & 0x7F]  # Fractions have no -0
        assert [got[i] for i in nonzero] == [want[i] for i in nonzero], t
        assert all(got[i] & 0x7F == 0 for i in range(len(want)) if i not in set(nonzero)), t
        assert scales[t].tolist() == want_scales, t


def test_the_power_of_two_at_its_edge():
    """448 still has 1; the next fp32 has 2."""
    h = torch.zeros(2, 32)
    h[0, 3], h[1, 4] = 448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    assert reference.quantize(h, Quant.MXFP8)[1].tolist() == [[127], [128]]


@by_name
def test_it_is_about_the_input(quant):
    """Within half a step of e4m3's three bits: 1/16; twice that where the scale is rounded up and a subnormal lies."""
    h = torch.randn(4, 256).to(BF16)
    values, scales = reference.quantize(h, quant)
    size = scales.float() if quant.scale_dtype != torch.uint8 else torch.exp2(scales.float() - 127)
    back = values.float() * size.repeat_interleave(quant.group, 1)
    torch.testing.assert_close(back, h.float(), rtol=1 / 16, atol=float(size.max()) * 2.0**-10)


def test_the_mx_rule_never_saturates_and_the_specifications_own_would():
    h = torch.full((1, 32), 1.9).to(BF16)
    values, scales = reference.quantize(h, Quant.MXFP8)
    assert int(scales) - 127 == -7  # floor(log2(1.9)) - 8 is -8, and 1.9 * 256 is above 448
    assert float(values.float().max()) == 240.0  # 1.8984375 * 128 = 243


@by_name
def test_a_group_that_is_not_finite_has_no_scale(quant):
    h = torch.randn(3, 256).to(BF16)
    h[0, 5], h[1, 130] = float("inf"), float("nan")
    values, scales = reference.quantize(h, quant)
    nan = scales == 0xFF if quant.scale_dtype == torch.uint8 else scales.isnan()
    bad = torch.zeros(3, 256 // quant.group, dtype=torch.bool)
    bad[0, 5 // quant.group] = bad[1, 130 // quant.group] = True
    assert torch.equal(nan, bad)
    assert torch.equal(values.view(torch.uint8) == 0x7F, bad.repeat_interleave(quant.group, 1))


@by_name
def test_empty(quant):
    q = Quantized.empty(quant, 3, 256, "cpu")
    values, scales = reference.quantize(torch.randn(3, 256), quant)
    for made, wanted in ((q.values, values), (q.scales, scales)):
        assert made.shape == wanted.shape and made.dtype == wanted.dtype and made.is_contiguous()
    with pytest.raises(ValueError, match=rf"^quant_out must have H % {quant.group} == 0 columns for {quant.name}"):
        Quantized.empty(quant, 3, 200, "cpu")
    with pytest.raises(ValueError, match="got H=200"):
        reference.quantize(torch.randn(3, 200), quant)


def test_a_row_does_not_depend_on_the_batch():
    h = torch.randn(5, 128).to(BF16)
    for ours, alone in zip(reference.quantize(h, Quant.MXFP8), reference.quantize(h[2:3], Quant.MXFP8), strict=True):
        assert_same_bits(ours[2:3].view(torch.uint8), alone.view(torch.uint8))


def test_what_is_no_format_is_refused():
    with pytest.raises(ValueError, match="quant must be a moetail.Quant, got 'MXFP8'"):
        Quantized.empty("MXFP8", 4, 128, "cpu")
    for name, sizes in (("T", (-1, 128)), ("T", ("4", 128)), ("H", (4, 1.5)), ("H", (4, None)), ("T", (2**40, 128))):
        with pytest.raises(ValueError, match=f"^{name} must be from 0 to "):
            Quantized.empty(Quant.MXFP8, *sizes, "cpu")
