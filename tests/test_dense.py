"""The definitions that every part uses."""

import pytest
import torch

from moetail.models.dense import product_f32, rms_norm, swiglu
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
LIMIT = 10.0


def silu(v):
    return v / (1 + torch.exp(torch.tensor(-v)))


def test_the_gate_is_clamped_from_above_only():  # pitfall 9
    got = swiglu(torch.tensor([[20.0, -20, 1, 1, 20, -20]]), LIMIT)
    want = torch.tensor([[silu(10.0), silu(-20.0) * 10, silu(1.0) * -10]])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert got[0, 1].abs() < 1e-6 and silu(-10.0) * 10 < -4e-3


def test_swiglu_rounds_once():
    x = torch.randn(40, 64).to(BF16)
    gate, up = x.float().chunk(2, -1)
    assert_same_bits(swiglu(x, 1e9), (torch.nn.functional.silu(gate) * up).to(BF16))


def test_the_norm_of_small_values_needs_the_small_eps():  # pitfall 3
    x, ones = torch.full((1, 8), 2e-4, dtype=BF16), torch.ones(8, dtype=BF16)
    torch.testing.assert_close(rms_norm(x, ones, 1e-20), torch.ones(1, 8, dtype=BF16))
    assert rms_norm(x, ones, 1e-6)[0, 0] < 0.25


def test_the_norm_rounds_once():
    x, w = torch.randn(40, 64).to(BF16), torch.randn(64).to(BF16)
    f = x.float()
    want = (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-20) * w.float()).to(BF16)
    assert_same_bits(rms_norm(x, w, 1e-20), want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_product_is_not_rounded(device):
    a, b = torch.randn(3, 5, 64).to(BF16), torch.randn(3, 64, 7).to(BF16)
    want = (a.double() @ b.double()).float()
    for x, y, w in ((a, b, want), (a[0], b[0], want[0]), (a, b.mT.contiguous().mT, want)):
        got = product_f32(x.to(device), y.to(device)).cpu()
        torch.testing.assert_close(got, w)
        assert (got.to(BF16).float() != got).any()
