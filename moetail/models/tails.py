"""The tail of a MoE block, by arm: how expert rows and the shared expert become the output that every rank holds.

Both arms give the same bits: each rank rounds its routed sum, rounds again after the shared add, and the ranks are
added in fp32, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moetail.comm.finalize_all_reduce import finalize_all_reduce
from moetail.contract import TailSpec, UnfinalizedMoEOutput
from moetail.models.parallel import TensorParallel

TailInputs = tuple[UnfinalizedMoEOutput, torch.Tensor]  # routed, and shared [T, H]: this rank's part of both
Tail = Callable[[UnfinalizedMoEOutput, torch.Tensor, TensorParallel], torch.Tensor]
_SPEC = TailSpec()  # TRTLLM; the routed scale is in the weights


def separate(routed: UnfinalizedMoEOutput, shared: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """[T, H] in three steps: finalize, add, all-reduce."""
    return tp.all_reduce(routed.finalize(None, _SPEC) + shared)


def fused(routed: UnfinalizedMoEOutput, shared: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """[T, H] in one."""
    if tp.workspace is None or tp.size == 1:
        return routed.finalize(shared, _SPEC)
    return finalize_all_reduce(
        routed.rows, routed.row_map, routed.weights, shared, workspace=tp.workspace, numerics=_SPEC.numerics
    )


def recorded(tail: Tail, seen: list[TailInputs]) -> Tail:
    """`tail`, which appends to `seen` what it is called with."""

    def recording(routed: UnfinalizedMoEOutput, shared: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        seen.append((routed, shared))
        return tail(routed, shared, tp)

    return recording


TAILS: dict[str, Tail] = {"separate": separate, "fused": fused}
