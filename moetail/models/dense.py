"""What every part of a decoder layer uses: a product kept in fp32, RMSNorm, clamped SwiGLU. Definitions, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional


def product_f32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two bf16 matrices, or of two batches of them, not rounded: fp32 sums of exact products."""
    if a.device.type == "cuda":
        return (torch.bmm if a.dim() == 3 else torch.mm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [.., n] and weight [n], bf16 -> [.., n]: fp32 inside, rounded once. `x` is rounded before its statistic."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """gate_up [.., 2 * I], gate first -> silu(min(gate, limit)) * clamp(up, -limit, limit) [.., I], rounded once.

    The gate is clamped from above only: silu goes to 0 below.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)
