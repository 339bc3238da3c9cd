"""The RMS norm, and an op that ends in one."""

from __future__ import annotations

import torch

from moetail.numerics import Numerics
from moetail.reference.rows import finalize


def finalize_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_norm`: (h, residual); shapes, dtypes and errors are documented there."""
    y = finalize(
        rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
        num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    return residual_norm(y, residual, norm_weight, eps, post_norm_weight, zero_centred)


def residual_norm(
    y: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    post_norm_weight: torch.Tensor | None, zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, residual) behind a finished y [T, H]."""
    if post_norm_weight is not None:
        y = rms_norm(y, post_norm_weight, eps, zero_centred=zero_centred)
    residual = (residual.float() + y.float()).to(y.dtype)
    return rms_norm(residual, norm_weight, eps, zero_centred=zero_centred), residual


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight (1 + weight where zero-centred) of [T, H], in x's dtype.

    All in fp32, rounded to x's dtype once, after the weight (as FlashInfer and vLLM do; transformers' Llama rounds
    before the weight too).

    Adding the squares in floating point would make the bits depend on a kernel's layout. Here the sum is of integers:
    a row is scaled by a power of two so that its largest element lies in [2**22, 2**23), each |element| is rounded to
    an integer q (ties to even), and q**2 is added in int64. H <= 16384 numbers of at most 2**46 stay below 2**63, so
    every order of addition gives the same sum, and any block size, warp count or thread count the same bits.

    The error of that sum: q differs from the scaled |x| by at most 1/2, and only where |x| < 2**7 (bf16, 8 significant
    bits), 2**10 (fp16, 11 bits) or 2**23 (fp32); the sum is at least 2**44. So it is off by at most H * 2**-37 of
    itself (bf16; 2**-24 at H 8192, half an ulp of fp32), H * 2**-34 (fp16) or sqrt(H) * 2**-22 (fp32, where all errors
    have one sign). What follows (to fp32, / H, + eps, square root, reciprocal) is correctly rounded by IEEE operations.

    Range: every finite x, 1e-20 <= eps <= 1. In the scaled row nothing overflows, whatever x is (an fp32 mean of
    squares would be inf from an RMS of 2**64 on). The scale stops at 2**60: below a largest element of 2**-37 the grid
    stays at 2**-60, an error of 2**-97 beside an eps of at least 2**-67. A row with an infinity has mean inf: NaN at
    the infinity and zeros elsewhere; a row with a NaN is NaN.
    """
    x32, one = x.float(), torch.ones((), device=x.device)
    largest = (x32.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)  # |fp32| are ordered as their bits are
    scale = ((276 - (largest >> 23).clamp(min=89)) << 23).view(torch.float32)  # 2**23 / the power of two above largest
    scaled = x32 * scale
    # In [2**23, 2**24] neighbouring fp32 are integers, and their bits count them: the addition rounds.
    q = ((scaled.abs() + 2.0**23).view(torch.int32) - 0x4B000000).long()
    # Divided by a tensor: on CUDA torch turns a division by a Python number into a multiplication.
    mean = (q * q).sum(-1, keepdim=True).float() / (one * x.shape[1])
    mean = torch.where(largest < 0x7F800000, mean, largest.view(torch.float32))  # inf or NaN
    # torch.sqrt of fp32 is not correctly rounded on a CPU (MKL; torch 2.13: 18 % of values). By fp64 it is: the square
    # root of an fp32 lies at least four fp64 ulps from the middle of two fp32.
    inverse = one / torch.sqrt((mean + one * eps * scale * scale).double()).float()
    factor = 1.0 + weight.float() if zero_centred else weight.float()
    return (scaled * inverse * factor).to(x.dtype)
