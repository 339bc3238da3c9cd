"""Manifold-constrained hyper-connections: the residual streams behind an op, their collapse and their mixes."""

from __future__ import annotations

import torch

from moetail.numerics import Numerics
from moetail.reference.norms import rms_norm
from moetail.reference.rows import finalize


def finalize_mhc(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_mhc`: (h, residual); shapes, dtypes and errors are documented there."""
    y = finalize(
        rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
        num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    return mhc(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps)


def mhc(
    y: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor, pre_mix: torch.Tensor,
    norm_weight: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Definition of `moetail.mhc`: (h, residual); shapes, dtypes and errors are documented there.

    In fp32 each product and each sum is rounded, no FMA; a sum starts from its first product, so that a zero keeps its
    sign.
    """
    hc, streams = residual.shape[1], residual.float()
    mixed = post_mix[:, :, None] * y.float()[:, None]
    for source in range(hc):
        mixed = mixed + res_mix[:, source, :, None] * streams[:, source, None]
    residual = mixed.to(y.dtype)
    return mhc_collapse(residual, pre_mix=pre_mix, norm_weight=norm_weight, eps=eps), residual


def mhc_collapse(
    residual: torch.Tensor, *, pre_mix: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:  # fmt: skip
    """Definition of `moetail.mhc_collapse`: h; shapes, dtypes and errors are documented there."""
    weighted = pre_mix[:, :, None] * residual.float()
    collapsed = weighted[:, 0]
    for stream in range(1, residual.shape[1]):
        collapsed = collapsed + weighted[:, stream]
    return rms_norm(collapsed.to(residual.dtype), norm_weight, eps)


def mhc_mixes(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, rms_eps: float, hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Definition of `moetail.mhc_mixes`: (pre, post, comb). The order of the product's sums is left to torch."""
    T, hc, _ = streams.shape
    f = streams.flatten(1).float()
    m = (f @ fn.T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + rms_eps)
    sizes = (hc, hc, hc * hc)
    parts = zip(m.split(sizes, dim=-1), scale, base.split(sizes), strict=True)
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
    return (
        torch.sigmoid(pre) + hc_eps,
        2.0 * torch.sigmoid(post),
        sinkhorn(comb.reshape(T, hc, hc), hc_eps, iterations),
    )


def sinkhorn(a: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """a [.., source, target] -> comb, whose targets each sum to 1 over the sources.

    The softmax is the first row step; the last step is a column step.
    """
    comb = torch.softmax(a, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
