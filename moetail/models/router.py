"""The router of DeepSeek-V4.1: sqrt(softplus) scores; a bias that selects and never weighs; renormalized; scaled.

The definition, in torch. Image tokens, which select with a bias of their own, are left out: this is the text router.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def route(logits: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] fp32, bias [E] fp32 -> ids [T, K] int32 by descending score + bias, the lowest id first where they
    tie, and weights [T, K] fp32 that add up to `scale`: nobody multiplies by it again."""
    score = torch.sqrt(functional.softplus(logits))
    ids = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = score.gather(1, ids)
    total = chosen.sum(-1, keepdim=True)
    return ids.to(torch.int32), chosen / torch.where(total > 0, total, 1.0) * scale
