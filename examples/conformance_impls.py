"""Finalize implementations of others, in the form that `moetail conformance --impl` takes.

    PYTHONPATH=examples moetail conformance --impl conformance_impls:torch_grouped_mm --device cuda

Each is f(rows [R, H], row_map [T, K], weights [T, K] or None, shared [T, H] or None) -> [T, H].
"""

from __future__ import annotations

import torch

from moetail.bench.contenders import load_vllm_ops


def torch_grouped_mm(
    rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None
) -> torch.Tensor:
    """The end of transformers' grouped_mm experts, and the block's add."""
    routed = (rows[row_map.long()] * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
    return routed if shared is None else routed + shared


def vllm_moe_sum(
    rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's moe_sum, which reads weighted rows in slot order, and an add."""
    if weights is not None:
        raise ValueError("moe_sum takes weighted rows")
    routed = torch.empty(row_map.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    load_vllm_ops()
    torch.ops._moe_C.moe_sum(rows[row_map.long()], routed)
    return routed if shared is None else routed + shared


def vllm_moe_unpermute(
    rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None, shared: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's moe_unpermute and an add. Its caller makes sure of dense rows, fp32 weights and an int32 map."""
    if weights is None or weights.dtype != torch.float32 or row_map.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError("moe_unpermute takes fp32 weights, an int32 map and contiguous rows")
    if rows.shape[1] % 8:
        raise ValueError("moe_unpermute takes H % 8 == 0")
    load_vllm_ops()
    routed = torch.empty(row_map.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    every_row = torch.tensor([0, rows.shape[0]], dtype=torch.int64, device=rows.device)
    torch.ops._moe_C.moe_unpermute(rows, weights, row_map.contiguous(), every_row, row_map.shape[1], routed)
    return routed if shared is None else routed + shared
