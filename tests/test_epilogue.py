"""The epilogue's device functions on bare rows: what must not show in the bits, and where a row ends."""

import pytest
import torch
import triton
import triton.language as tl

from moetail import Quant, reference
from moetail.ops.epilogue_triton import _mhc, _quantize, _residual_norm, _rms_norm
from moetail.testing import assert_same_bits

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def rms_norm_kernel(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    c = tl.program_id(0) * H + tl.arange(0, BLOCK)
    here = tl.arange(0, BLOCK) < H
    # Beyond H: what the kernels must never let in.
    row = tl.load(x + c, mask=here, other=float("nan")).to(tl.float32)
    w = tl.load(weight + tl.arange(0, BLOCK), mask=here, other=float("nan"))
    tl.store(out + c, _rms_norm(row, w, here, eps, H, ZERO_CENTRED), mask=here)


@triton.jit
def residual_norm_kernel(y, residual, weight, h, residual_out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0) * H + tl.arange(0, BLOCK)
    here = tl.arange(0, BLOCK) < H
    w = tl.load(weight + tl.arange(0, BLOCK), mask=here, other=0.0)
    old = tl.load(residual + c, mask=here, other=0.0)
    normed, new = _residual_norm(tl.load(y + c, mask=here, other=0.0), old, w, None, here, eps, H, False)
    tl.store(h + c, normed, mask=here)
    tl.store(residual_out + c, new, mask=here)


@triton.jit
def mhc_kernel(y, old, new, post, comb, pre, weight, h, T, eps, H: tl.constexpr, HC: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    here = tl.where(T > 0, c < H, False)
    w = tl.load(weight + c, mask=here, other=float("nan"))
    row = tl.load(y + t * H + c, mask=here, other=float("nan"))
    normed = _mhc(
        row, old + t * HC * H + c, H, new + t * HC * H + c, H, post + t * HC, comb + t * HC * HC, pre + t * HC, w,
        T > 0, here, eps, H, HC,
    )  # fmt: skip
    tl.store(h + t * H + c, normed, mask=here)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def norm(x, weight, eps=1e-6, *, block=None, warps=4, zero_centred=False):
    out = torch.full_like(x, float("nan"))
    block = block or triton.next_power_of_2(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](
        x, weight, out, eps, H=x.shape[1], BLOCK=block, ZERO_CENTRED=zero_centred, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("H", [1, 3, 96, 257])
def test_neither_block_nor_warps_show(device, H):
    x, weight = torch.randn(4, H, device=device), torch.randn(H, device=device)
    want = reference.rms_norm(x, weight, 1e-6)
    for block in (triton.next_power_of_2(H), 512, 2048):
        for warps in (1, 2, 4, 8):
            assert_same_bits(norm(x, weight, block=block, warps=warps), want)


def test_the_order_of_the_columns_does_not_show(device):
    """Permuted columns give permuted bits, which no sum in floating point does."""
    x, weight = torch.randn(16, 1025, device=device) * 3.0, torch.randn(1025, device=device)
    x[:, 0] = 1e4
    want = norm(x, weight)
    for seed in range(3):
        order = torch.randperm(1025, generator=torch.Generator().manual_seed(seed)).to(device)
        assert_same_bits(norm(x[:, order].contiguous(), weight[order]), want[:, order])
        assert_same_bits(reference.rms_norm(x[:, order], weight[order], 1e-6), want[:, order])


def test_zero_centred_adds_one_in_fp32(device):
    """1 + 2**-9 is no bf16."""
    x, weight = torch.randn(4, 64, device=device), torch.full((64,), 2.0**-9, device=device).to(BF16)
    got = norm(x, weight, zero_centred=True)
    assert_same_bits(got, reference.rms_norm(x, weight, 1e-6, zero_centred=True))
    assert_same_bits(got, norm(x, 1.0 + weight.float()))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_norm_is_of_the_rounded_residual(device, dtype):
    y, residual = (torch.randn(5, 100, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(100, device=device).to(dtype)
    h, new = torch.empty_like(y), torch.empty_like(y)
    residual_norm_kernel[(5,)](y, residual, weight, h, new, 1e-6, H=100, BLOCK=128, enable_fp_fusion=False)
    assert_same_bits(new, y + residual)
    assert_same_bits(h, reference.rms_norm(y + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_mhc_at_any_width(device, dtype):
    """Programs wider than a row, as the collective's are; memory without a token is neither read nor written."""
    T, HC, H = 3, 4, 100
    y, old = torch.randn(T, H, device=device).to(dtype), torch.randn(T, HC, H, device=device).to(dtype)
    mixes = [torch.rand(T, *shape, device=device) for shape in ((HC,), (HC, HC), (HC,))]
    weight = torch.randn(H, device=device).to(dtype)
    want = reference.mhc(y, old, *mixes, weight, 1e-6)
    for block, warps in ((128, 1), (128, 4), (512, 16)):
        h, new = torch.empty_like(y), torch.empty_like(old)
        mhc_kernel[(T,)](y, old, new, *mixes, weight, h, T, 1e-6, H=H, HC=HC, BLOCK=block, num_warps=warps,
                         enable_fp_fusion=False)  # fmt: skip
        assert_same_bits(new, want[1])
        assert_same_bits(h, want[0])
    nothing = [t[:0] for t in (y, old, old, *mixes)]
    mhc_kernel[(1,)](*nothing, weight, y[:0], 0, 1e-6, H=H, HC=HC, BLOCK=512, num_warps=16, enable_fp_fusion=False)


@triton.jit
def quantize_kernel(
    h, values, scales, scales_stride_t, scales_stride_g, T, H: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr
):
    t = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    here = tl.where(T > 0, c < H, False)
    row = tl.load(h + t * H + c, mask=here, other=float("nan"))
    at = scales + t * scales_stride_t
    _quantize(row, values + t * H + c, at, scales_stride_g, T > 0, here, H, BLOCK, QUANT)


def quantized(h, quant, *, block=None, warps=4, column_major=False):
    """Values and scales by the device function; where nothing may be written they stay 0x55."""
    T, H = h.shape
    values = torch.full((T + 1, H), 0x55, dtype=torch.uint8, device=h.device)
    groups = H // quant.group
    scales = torch.full((T + 1, groups), 0x55, device=h.device).to(quant.scale_dtype)
    scales = scales.t().contiguous().t() if column_major else scales
    quantize_kernel[(max(T, 1),)](
        h, values, scales, *scales.stride(), T, H=H, BLOCK=block or triton.next_power_of_2(H), QUANT=quant.name,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert (values[T] == 0x55).all() and (scales[T] == 0x55).all()
    return values[:T].view(torch.float8_e4m3fn), scales[:T]


def every_bf16():
    """All 65536 of them, sorted so that a group's elements are close: in every group some are rounded."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16)


FORMATS = [Quant.FP8_GROUP128, Quant.FP8_GROUP128_UE8M0, Quant.MXFP8]


@pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
def test_every_bf16_is_quantized_as_the_reference_does(device, quant):
    """Infinities and NaNs in groups of their own, and once more shuffled. Not subnormals in the interpreter, which
    reads them wrongly (Triton 3.9)."""
    x = every_bf16()
    x = torch.where((x.float().abs() < 2.0**-126) & (device == "cpu"), 0.0, x)
    finite = torch.where(x.isfinite(), x, 1.0)
    shuffled = finite[torch.randperm(2**16)]
    steps = torch.linspace(-460, 460, 2**15).to(BF16)  # a group has the full range
    h = torch.cat([x, shuffled, steps.view(-1, 128).t().reshape(-1)]).view(-1, 1024).to(device)
    values, scales = quantized(h, quant)
    want, want_scales = reference.quantize(h, quant)
    assert_same_bits(values.view(torch.uint8), want.view(torch.uint8))
    assert_same_bits(scales, want_scales)


@pytest.mark.parametrize("quant", FORMATS, ids=lambda quant: quant.name)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_quantize_at_any_width(device, quant, dtype):
    """Programs wider than a row, scales of any strides, and no tokens: nothing is written."""
    for H in (128, 384, 640):
        h = (torch.randn(3, H, device=device) * torch.logspace(-7, 4, H, device=device)).to(dtype)
        h[0, :128] = 0.0
        want = reference.quantize(h, quant)
        for block, warps, column_major in ((None, 1, False), (1024, 4, True), (2048, 16, False)):
            got = quantized(h, quant, block=block, warps=warps, column_major=column_major)
            assert_same_bits(got[0].view(torch.uint8), want[0].view(torch.uint8))
            assert_same_bits(got[1], want[1])
    quantized(h[:0], quant)
