"""How a decoder ends its sublayers, by arm: what becomes of a sublayer's output until the next sublayer's input.

    separate  the best separate kernels: finalize, add, all-reduce, and one for the streams, their collapse and its norm
    fused     each layer's output is finalized where the plan says; a boundary is one op, from what it is handed to h
    here      as fused, but no layer hands its output to the next

All give the same bits: each rank rounds its routed sum, rounds again after the shared add, and the ranks are
added in fp32, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from moetail.comm.all_reduce_mhc import all_reduce_mhc
from moetail.comm.finalize_all_reduce_mhc import finalize_all_reduce_mhc
from moetail.contract import MoEOutput
from moetail.layer import MoELayer
from moetail.models.parallel import Collective, TensorParallel
from moetail.ops.finalize_mhc import finalize_mhc
from moetail.ops.mhc import mhc


@dataclass(frozen=True)
class Partial:
    """This rank's part [T, H] of an output that is still to be summed over the ranks."""

    y: torch.Tensor


# What a sublayer hands on. A tensor is the same on every rank: nothing is left to do but the streams.
Output = Partial | MoEOutput | torch.Tensor


@dataclass(frozen=True)
class Arm:
    """fuses        MoE layers obey the plan, and boundaries are fused
    passes_on    the plan may have a call finalized in the next layer; False: in this one, as an arm to compare with
    side_stream  shared experts run beside the routed ones, where a call is small
    collective   how separate kernels sum over ranks"""

    fuses: bool
    passes_on: bool = True
    side_stream: bool = False
    collective: Collective = field(default_factory=Collective)

    def moe(self, layer: MoELayer, x: torch.Tensor) -> Output:
        """`layer` is made for this arm: its plan and its tail are."""
        if not self.fuses:
            return Partial(layer(x, out=self.collective.buffer if layer.shared_experts else None))
        return layer.forward_unfinalized(x) if layer.finalizes_in_next_layer(x.shape[0]) else layer(x)

    def boundary(self, output: Output, tp: TensorParallel, **streams: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(h, residual'): `streams` are the keyword arguments of `moetail.mhc`."""
        if isinstance(output, MoEOutput):
            routed, shared, tail = output.take()
            args = (routed.rows, routed.row_map, routed.weights, shared)
            options = streams | {"numerics": tail.numerics, "routed_scale": tail.routed_scale}
            if tp.workspace is None or tp.size == 1:
                return finalize_mhc(*args, **options)
            return finalize_all_reduce_mhc(*args, workspace=tp.workspace, **options)
        if isinstance(output, Partial) and self.fuses and tp.workspace is not None and tp.size > 1:
            return all_reduce_mhc(output.y, workspace=tp.workspace, **streams)
        return mhc(self.finished(output, tp), **streams)

    def finished(self, output: Output, tp: TensorParallel) -> torch.Tensor:
        """[T, H] on every rank: what leaves a stage, or goes into an Engram."""
        if isinstance(output, MoEOutput):
            return output.complete()
        return self.collective.all_reduce(output.y, tp) if isinstance(output, Partial) else output


# The first two are what a bench compares when it is not told otherwise.
ARMS = {"separate": Arm(False), "fused": Arm(True), "here": Arm(True, passes_on=False)}
