"""The deferral contract: what experts hand over when they stop after their second GEMM, and who completes it.

Leaf: imports torch and the numerics only. Completion goes through the registered op, so that a value that nobody
fused can always be finished by whoever holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from moetail.numerics import Numerics


@dataclass(frozen=True, eq=False)
class UnfinalizedMoEOutput:
    """Expert rows that still have to be weighted, un-permuted and reduced.

    Shape:
        rows            [R, H]  bf16 | fp16 | fp32, inner stride 1; one row per (token, expert)
        row_map         [T, K]  int32 | int64; the row of each slot. A slot is absent when its value is negative,
                                >= R or >= num_valid_rows
        weights         [T, K]  fp32 | bf16 | fp16, or None where the rows are already weighted
        num_valid_rows  [1]     int32 | int64 on the same device, or None

    Raises: ValueError naming the field, what it was and what it must be.
    """

    rows: torch.Tensor
    row_map: torch.Tensor
    weights: torch.Tensor | None
    num_valid_rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.rows.dim() != 2:
            raise ValueError(f"rows must have two dimensions [R, H], got shape {tuple(self.rows.shape)}")
        if self.row_map.dim() != 2:
            raise ValueError(f"row_map must have two dimensions [T, K], got shape {tuple(self.row_map.shape)}")
        if self.weights is not None and self.weights.shape != self.row_map.shape:
            raise ValueError(
                f"weights must have row_map's shape {tuple(self.row_map.shape)}, got {tuple(self.weights.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        return self.row_map.shape[0]

    def finalize(self, shared: torch.Tensor | None, tail: TailSpec) -> torch.Tensor:
        """[T, H]: the finalize op with this output's tensors (`moetail.finalize` documents it)."""
        return torch.ops.moetail.finalize(
            self.rows, self.row_map, self.weights, shared, None, self.num_valid_rows, tail.routed_scale,
            tail.numerics.spec,
        )  # fmt: skip


@dataclass(frozen=True)
class TailSpec:
    """How a tail is computed, whoever computes it."""

    numerics: Numerics = Numerics.TRTLLM
    routed_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class MoEOutput:
    """A MoE layer's output whose tail has not run: routed rows, shared experts' output [T, H] or None, and the tail.

    It is not a tensor and refuses to be used as one, so that an unfinalized value cannot be read by mistake.
    `complete()` always works and returns what the layer would have returned.
    """

    routed: UnfinalizedMoEOutput
    shared: torch.Tensor | None
    tail: TailSpec = TailSpec()

    def complete(self) -> torch.Tensor:
        """[T, H] in the rows' dtype."""
        return self.routed.finalize(self.shared, self.tail)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("MoEOutput is not finalized yet: call .complete() for the tensor")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __getitem__ = __array__ = __float__ = __bool__ = __len__ = __iter__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(f"MoEOutput is not finalized yet: call .complete() before {getattr(func, '__name__', func)}")
