"""The gradient of finalize, in torch.

    d_shared = sigmoid(gate) * dy                    d_rows[row_map[t,k]] += weights[t,k] * scale * dy[t]
    d_gate   = <shared, dy> * s * (1 - s)            d_weights[t,k]        = <rows[row_map[t,k]], scale * dy[t]>

Products and sums are fp32 and rounded once; the forward's own roundings have derivative one. Gradients of absent slots
are exactly zero, whatever their memory holds. The bits repeat where no row is named twice in one slot column, which is
so for every routing; where one is, torch's accumulating index_put decides the order (on a CPU it may vary).
"""

from __future__ import annotations

from typing import Any

import torch


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, row_map, weights, shared, shared_gate, num_valid_rows, ctx.routed_scale, _ = inputs
    ctx.save_for_backward(rows, row_map, weights, shared, shared_gate, num_valid_rows)


def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, row_map, weights, shared, shared_gate, num_valid_rows = ctx.saved_tensors
    need_rows, _, need_weights, need_shared, need_gate, *_ = ctx.needs_input_grad
    dy32 = dy.float()
    d_routed = dy32 * ctx.routed_scale
    d_rows = d_weights = d_shared = d_gate = None
    if need_rows or need_weights:
        d_rows, d_weights = _routed(rows, row_map, weights, num_valid_rows, d_routed)
    if shared is not None:
        gate = None if shared_gate is None else torch.sigmoid(shared_gate.float())
        d_shared = (dy32 if gate is None else gate * dy32).to(shared.dtype) if need_shared else None
        if gate is not None and need_gate:
            d_gate = ((shared.float() * dy32).sum(1, keepdim=True) * gate * (1 - gate)).to(shared_gate.dtype)
    return (d_rows if need_rows else None), None, (d_weights if need_weights else None), d_shared, d_gate, *[None] * 3


def _routed(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    d_routed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    R, H = rows.shape
    K = row_map.shape[1]
    limit = R if num_valid_rows is None else num_valid_rows.reshape(()).clamp(max=R)
    present = (row_map >= 0) & (row_map < limit)
    index = torch.where(present, row_map, R).long()  # absent slots go to a spare last row
    d_rows = torch.zeros(R + 1, H, dtype=torch.float32, device=rows.device)
    d_weights = None if weights is None else torch.zeros_like(weights, dtype=torch.float32)
    for k in range(K):
        live = present[:, k, None]
        d_slot = d_routed if weights is None else torch.where(live, weights[:, k, None].float(), 0.0) * d_routed
        d_rows.index_put_((index[:, k],), d_slot, accumulate=True)
        if d_weights is not None and R > 0:
            x = torch.where(live, rows[index[:, k].clamp(max=R - 1)].float(), 0.0)
            d_weights[:, k] = (x * d_routed).sum(1)
    if weights is None or d_weights is None:
        return d_rows[:R].to(rows.dtype), None
    return d_rows[:R].to(rows.dtype), d_weights.to(weights.dtype)
