"""The ranks of a bench: under torchrun one process each, in step; otherwise this process alone.

A replay starts together on all ranks and counts with the slowest one's time. Numbers travel through gloo, so that no
measured stream sees them; the rendezvous of a captured step is a collective of its own device.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# How long a rank waits for another before it gives up: a killed rank must not hang the rest.
_PATIENCE = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """This process among its ranks."""

    rank: int = 0
    world_size: int = 1
    token: torch.Tensor | None = None

    def rendezvous(self) -> None:
        """Every rank arrives before any goes on. On CUDA a collective on the current stream, which a graph can hold."""
        if self.token is not None:
            self._all_reduce(self.token, dist.ReduceOp.SUM)

    def slowest(self, value: float) -> float:
        """The maximum over ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def total(self, value: int) -> int:
        """The sum over ranks."""
        return int(self._reduced(value, dist.ReduceOp.SUM))

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        if self.token is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        self._all_reduce(box, how)
        return float(box)

    def _all_reduce(self, box: torch.Tensor, how: dist.ReduceOp.RedOpType) -> None:
        try:
            dist.all_reduce(box, how)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise RuntimeError(f"rank {self.rank} lost another rank of {self.world_size}: {reason}") from error


@contextlib.contextmanager
def join(device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks of torchrun's environment and this rank's device; one rank where there is no such environment.

    A collective that fails because a rank has gone raises RuntimeError.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE, device_id=device if device.type == "cuda" else None)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), torch.ones(1, device=device)), device
    finally:
        dist.destroy_process_group()
