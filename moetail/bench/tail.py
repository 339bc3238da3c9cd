"""The tail of one MoE layer, alone: what transformers' `grouped_mm` runs behind its second GEMM, and ours.

Both start from the same expert-sorted rows and the same sort, and end with the shared experts' output added. The stock
one is the sequence of grouped_mm_experts_forward (transformers 5.17) and of the block's `routed + shared`. Two masks
that stock runs before its second GEMM are measured too: `num_valid_rows` makes them unnecessary, so the step gains
them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moetail.bench import timing
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize


@dataclass(frozen=True)
class TailInputs:
    """rows [T*K, H] sorted by expert, order [T*K] (slot of each row), weights [T, K], shared [T, H], the number of rows
    that the experts wrote, and the first GEMM's output [T*K, inner]."""

    rows: torch.Tensor
    order: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor
    num_valid_rows: torch.Tensor
    inner: torch.Tensor

    @staticmethod
    def random(top_k_index: torch.Tensor, weights: torch.Tensor, H: int, inner: int, dtype: torch.dtype) -> TailInputs:
        """Random rows under a real routing; `inner` is the width of the first GEMM's output."""
        (T, K), device = top_k_index.shape, top_k_index.device
        rows = torch.randn(T * K, H, dtype=dtype, device=device)
        shared = torch.randn(T, H, dtype=dtype, device=device)
        count = torch.full((1,), T * K, dtype=torch.int32, device=device)
        order = torch.argsort(top_k_index.reshape(-1))
        between = torch.randn(T * K, inner, dtype=dtype, device=device)
        return TailInputs(rows, order, weights.clone(), shared, count, between)


def stock_tail(x: TailInputs) -> torch.Tensor:
    """[T, H], as transformers computes it."""
    T, K = x.weights.shape
    sentinel = (x.order < 0).unsqueeze(-1)
    rows = x.rows.masked_fill(sentinel, 0.0)
    weighted = rows * x.weights.reshape(-1)[x.order].unsqueeze(-1)
    inverse = torch.empty_like(x.order)
    inverse[x.order] = torch.arange(T * K, device=x.order.device)
    routed = weighted[inverse].view(T, K, -1).sum(dim=1).to(x.rows.dtype)
    return routed + x.shared


def moetail_tail(x: TailInputs) -> torch.Tensor:
    """[T, H], the same bits, as the integration computes it."""
    T, K = x.weights.shape
    row_map = torch.empty_like(x.order)
    row_map[x.order] = torch.arange(T * K, device=x.order.device)
    return finalize(
        x.rows, row_map.view(T, K), x.weights, x.shared, num_valid_rows=x.num_valid_rows,
        numerics=Numerics.TRANSFORMERS,
    )  # fmt: skip


def stock_masks(x: TailInputs) -> torch.Tensor:
    """What stock masks before its second GEMM: the gathered hidden states and the first GEMM's output."""
    sentinel = (x.order < 0).unsqueeze(-1)
    x.rows.masked_fill_(sentinel, 0.0)
    return x.inner.masked_fill(sentinel, 0.0)


def measure(
    top_k_index: torch.Tensor, weights: torch.Tensor, H: int, inner: int, dtype: torch.dtype, rounds: int
) -> dict[str, list[float]]:
    """Samples in microseconds of one layer: "stock" and "moetail" tails, and "masks" (`stock_masks`). Inputs rotate, so
    that they leave the caches.

    Raises: RuntimeError where the two differ in a bit: no time is printed for wrong bits.
    """
    T, K = top_k_index.shape
    set_bytes = T * K * H * dtype.itemsize
    count = 1 + min(15, 256 * 1024 * 1024 // set_bytes)
    sets = [TailInputs.random(top_k_index, weights, H, inner, dtype) for _ in range(count)]
    if not torch.equal(stock_tail(sets[0]), moetail_tail(sets[0])):
        raise RuntimeError("the fused tail and the stock tail differ in their bits")
    programs = {"stock": stock_tail, "moetail": moetail_tail, "masks": stock_masks}
    arms = [_arm(name, program, sets) for name, program in programs.items()]
    timing.warm_up(arms, seconds=0.1)
    samples, _ = timing.interleave(arms, rounds)
    return {name: [us / count for us in values] for name, values in samples.items()}


def _arm(name: str, tail: Callable[[TailInputs], torch.Tensor], sets: list[TailInputs]) -> timing.Arm:
    def program() -> None:
        for x in sets:
            tail(x)

    cuda = sets[0].rows.device.type == "cuda"
    return timing.cuda_graph_arm(name, program) if cuda else timing.cpu_arm(name, program)
