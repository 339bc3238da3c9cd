"""Tensor parallelism of a decoder: which rank this is, and what ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetail.comm.all_reduce import all_reduce
from moetail.comm.workspace import Workspace


@dataclass(frozen=True)
class TensorParallel:
    """One rank alone, or with `group` and the `workspace` of that group."""

    group: dist.ProcessGroup | None = None
    workspace: Workspace | None = None

    @property
    def rank(self) -> int:
        return 0 if self.workspace is None else self.workspace.rank

    @property
    def size(self) -> int:
        return 1 if self.workspace is None else self.workspace.world_size

    @staticmethod
    def of(group: dist.ProcessGroup | None, max_tokens: int, hidden: int, device: torch.device) -> TensorParallel:
        """The ranks of `group`; None or one rank: alone. All ranks call it together."""
        if group is None or group.size() == 1:
            return TensorParallel()
        return TensorParallel(group, Workspace(group, max_tokens, hidden, device=device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]: the sum over ranks, in fp32 and in rank order, rounded once."""
        return x if self.workspace is None or self.size == 1 else all_reduce(x, workspace=self.workspace)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[n, c] -> [n, c * size], in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class Collective:
    """How separate kernels sum over ranks: here by `moetail.all_reduce`, which has its bits at any number of ranks.

    buffer  [T, H], where a partial should be written so that no copy is needed; None: anywhere
    """

    buffer: torch.Tensor | None = None

    def all_reduce(self, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        """[T, H] on every rank. May be `buffer`, which the next partial overwrites."""
        return tp.all_reduce(x)
