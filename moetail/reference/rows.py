"""A token's sum over its rows, and fp32 fma on any device."""

from __future__ import annotations

import torch

from moetail.numerics import Numerics, slot_groups, torch_cpu_main_columns


def finalize(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> torch.Tensor:
    """Definition of `moetail.finalize`; shapes, dtypes and errors are documented there."""
    (T, K), (R, H) = row_map.shape, rows.shape
    n = numerics.resolve(T, K, H, rows.device.type, rows.dtype, None if weights is None else weights.dtype)
    limit = R if num_valid_rows is None else num_valid_rows.reshape(()).clamp(max=R)
    present = (row_map >= 0) & (row_map < limit)
    index = torch.where(present, row_map, 0).long()

    main = torch_cpu_main_columns(H) if n.order == "torch_cpu" else H
    routed = _routed_sum(rows[:, :main], index, present, weights, n, "sequential" if main < H else n.order)
    if main < H:
        tail = _routed_sum(rows[:, main:], index, present, weights, n, "torch_cpu")
        routed = torch.cat([routed, tail], dim=1)

    if routed_scale != 1.0:
        if n.scale == "round_row":
            routed = routed.to(rows.dtype).float()
        routed = routed * routed_scale
    if n.rounding == "two":
        routed = routed.to(rows.dtype).float()
    y = routed if shared is None else _add_shared(routed, shared, shared_gate, rows.dtype, n.rounding)
    y = y.to(rows.dtype)
    return torch.where(y == 0, torch.zeros_like(y), y) if n.zero == "positive" else y


def _routed_sum(
    rows: torch.Tensor,
    index: torch.Tensor,
    present: torch.Tensor,
    weights: torch.Tensor | None,
    n: Numerics,
    order: str,
) -> torch.Tensor:
    """fp32 [T, columns of rows]; a slot that is absent leaves its accumulator untouched."""
    T, K = index.shape
    total = None
    for group in slot_groups(order, K):
        acc = torch.zeros(T, rows.shape[1], dtype=torch.float32, device=rows.device)
        for k in group:
            if rows.shape[0] == 0:
                break
            x = rows[index[:, k]].float()
            added = acc + x if weights is None else _multiply_add(x, weights[:, k, None].float(), acc, n, rows.dtype)
            acc = torch.where(present[:, k, None], added, acc)
        total = acc if total is None else total + acc
    assert total is not None, "K >= 1"
    return total


def _multiply_add(x: torch.Tensor, w: torch.Tensor, acc: torch.Tensor, n: Numerics, dtype: torch.dtype) -> torch.Tensor:
    if n.product == "fma":
        return fma(x, w, acc)
    product = x * w
    return acc + (product.to(dtype).float() if n.product == "round_row" else product)


def _add_shared(
    routed: torch.Tensor, shared: torch.Tensor, shared_gate: torch.Tensor | None, dtype: torch.dtype, rounding: str
) -> torch.Tensor:
    if shared_gate is None:
        return routed + shared.float()
    gate = torch.sigmoid(shared_gate.float())
    if rounding == "one":
        return fma(gate.expand_as(shared), shared.float(), routed)
    gated = (gate.to(dtype).float() * shared.float()).to(dtype)
    return routed + gated.float()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 a * b + c, rounded once.

    The product of two fp32 is exact in fp64. Rounding the fp64 sum to fp32 would round twice (a=205,
    b=5237765 * 2**-54, c=1 comes out as 1.0 and must be 1.0000001), so the fp64 sum is rounded to odd first: an inexact
    sum takes whichever neighbour has an odd last bit, which no later rounding can mistake for a tie.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    fix = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    away_from_zero = (error > 0) == (total > 0)
    odd = torch.where(fix, bits + torch.where(away_from_zero, 1, -1), bits)
    return odd.view(torch.float64).float()
