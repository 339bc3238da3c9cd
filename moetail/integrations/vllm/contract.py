"""vLLM's own deferral contract (`fused_moe/moe_output.py`, 0.33) to ours and back. Same tensors, nothing copied.

vLLM's rows are unweighted; its map is int32 with -1 for an expert of another rank. Its weights may carry the routed
scale already, in which case its `routed_scaling_factor` is 1. The fused mHC consumer of DeepSeek-V4.1 rounds once and
writes no -0: that is `MHC`.
"""

from __future__ import annotations

from typing import Any

import torch

from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.numerics import Numerics

MHC = Numerics("fma", rounding="one", zero="positive", scale="f32")


def from_vllm(output: Any, numerics: Numerics = Numerics.TRTLLM) -> MoEOutput:
    """Our MoEOutput of vLLM's, whose routed part is unfinalized.

    Raises: ValueError naming the field where it is a finished tensor, or not what vLLM documents.
    """
    routed = output.routed
    if isinstance(routed, torch.Tensor):
        raise ValueError("routed must be unfinalized, got a tensor: vLLM's experts have finalized it")
    return MoEOutput(
        unfinalized_from_vllm(routed), output.shared_output, TailSpec(numerics, float(output.routed_scaling_factor))
    )


def unfinalized_from_vllm(routed: Any) -> UnfinalizedMoEOutput:
    """Raises: ValueError as `from_vllm`."""
    rows, row_map, weights = routed.gemm2_permuted, routed.expanded_idx_to_permuted_idx, routed.expert_weights
    if row_map.dtype != torch.int32:
        raise ValueError(f"expanded_idx_to_permuted_idx must be int32, got {row_map.dtype}")
    if weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"expert_weights must be float32, bfloat16 or float16, got {weights.dtype}")
    if routed.route_major and rows.shape[0] != row_map.numel():
        raise ValueError(
            f"gemm2_permuted must have one row a route, {row_map.numel()}, where it is route-major, got {rows.shape[0]}"
        )
    return UnfinalizedMoEOutput(rows, row_map, weights)


def to_vllm(output: MoEOutput) -> Any:
    """vLLM's MoEOutput of ours, for vLLM's fused consumers. Takes the output: it must then finalize it exactly once.

    Raises: ValueError where vLLM cannot hold it: weighted rows, an int64 map, rows that are not dense, a count of
    valid rows, or a workspace; ImportError for a vLLM without the contract. The output is not taken then.
    """
    from vllm.model_executor.layers.fused_moe.moe_output import MoEOutput as TheirMoEOutput
    from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput as TheirUnfinalized

    routed, tail = output.routed, output.tail
    if routed.weights is None or not tail.numerics.uses_weights:
        raise ValueError("weights must be a tensor: vLLM's contract has unweighted rows, got None")
    if routed.row_map.dtype != torch.int32 or not routed.row_map.is_contiguous():
        raise ValueError(f"row_map must be a contiguous int32 tensor, got {routed.row_map.dtype}")
    if not routed.rows.is_contiguous() or not routed.weights.is_contiguous():
        raise ValueError(f"rows and weights must be contiguous, got strides {routed.rows.stride()}")
    if routed.num_valid_rows is not None:
        raise ValueError("num_valid_rows must be None: vLLM marks absent slots by -1 only, got a tensor")
    if tail.workspace is not None:
        raise ValueError("workspace must be None: vLLM's consumer reduces over its own, got one")
    routed, shared, tail = output.take()
    return TheirMoEOutput(
        TheirUnfinalized(routed.rows, routed.weights, routed.row_map),
        shared,
        float(tail.routed_scale),
    )
