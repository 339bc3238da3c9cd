"""The ops across ranks: each takes what every rank holds, in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moetail.reference.norms import residual_norm
from moetail.reference.rows import finalize
from moetail.reference.streams import mhc


def all_reduce(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """Definition of `moetail.all_reduce`: `partials` holds every rank's x [T, H], in rank order."""
    total = partials[0].float()  # not from +0.0: a zero that is negative on every rank stays so
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)


def finalize_all_reduce(ranks: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Definition of `moetail.finalize_all_reduce`: `ranks` holds every rank's arguments of `finalize`, by name."""
    return all_reduce([finalize(**arguments) for arguments in ranks])


def finalize_reduce_scatter(ranks: Sequence[Mapping[str, Any]], rank: int) -> torch.Tensor:
    """Definition of `moetail.finalize_reduce_scatter`: what rank `rank` keeps of `finalize_all_reduce`."""
    return finalize_all_reduce(ranks).chunk(len(ranks))[rank]


def all_reduce_norm(
    partials: Sequence[torch.Tensor],
    *,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.all_reduce_norm`: the norm of the sum, never the sum of norms."""
    return residual_norm(all_reduce(partials), residual, norm_weight, eps, post_norm_weight, zero_centred)


def finalize_all_reduce_norm(ranks: Sequence[Mapping[str, Any]], **norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_all_reduce_norm`: as `finalize_all_reduce`, then as `all_reduce_norm`."""
    return all_reduce_norm([finalize(**arguments) for arguments in ranks], **norm)


def all_reduce_mhc(partials: Sequence[torch.Tensor], **streams: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.all_reduce_mhc`: the streams take up the sum, once."""
    return mhc(all_reduce(partials), **streams)


def finalize_all_reduce_mhc(ranks: Sequence[Mapping[str, Any]], **streams: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_all_reduce_mhc`: as `finalize_all_reduce`, then as `all_reduce_mhc`."""
    return all_reduce_mhc([finalize(**arguments) for arguments in ranks], **streams)
