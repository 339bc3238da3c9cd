"""The exchange of one call between ranks on CPUs, through a workspace's gloo group.

What the GPU kernel does, without its memory: every rank sends its header to every peer, compares theirs, and only where
all agree sends its partial. Point to point, so that an error names the rank it is about.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from moetail import reference
from moetail.comm.workspace import CALL, OWNER, STATUS, TIMEOUT_NS, Fault, FaultKind, Kind, gloo_groups, header


def launch(
    partial: torch.Tensor,
    kind: Kind,
    control: torch.Tensor,
    group: str,
    rank: int,
    world_size: int,
    out: torch.Tensor,
) -> None:
    """Write the sum over ranks of `partial` [T, H]. The arguments are checked; T == 0 exchanges headers only.

    Raises: RuntimeError with the fault's sentence, in this call and in every later one.
    """
    call, busy, status, timeout_ns = (int(control[word]) for word in (CALL, OWNER, STATUS, TIMEOUT_NS))
    if status:
        raise RuntimeError(Fault.decode(status).sentence(rank, timeout_ns / 1e9))
    exchange = _Exchange(control, group, rank, world_size, call, timeout_ns / 1e9)
    if busy:
        exchange.fail(FaultKind.CONCURRENT, rank)
    control[OWNER] = 1
    try:
        mine = torch.tensor([header(call, kind, partial.shape[0])])
        for peer, theirs in enumerate(exchange.swap(mine)):
            if int(theirs) != int(mine):
                exchange.fail(FaultKind.DISAGREED, peer)
        partials = exchange.swap(partial.contiguous()) if partial.shape[0] > 0 else [partial]
    finally:
        control[OWNER] = 0
    out.copy_(reference.all_reduce(partials))
    control[CALL] = call + 1


class _Exchange:
    """One call's connections, and the moment at which it gives up."""

    def __init__(
        self, control: torch.Tensor, group: str, rank: int, world_size: int, call: int, timeout_s: float
    ) -> None:
        self.control, self.rank, self.call, self.timeout_s = control, rank, call, timeout_s
        self.ranks = range(world_size)
        self.others = [peer for peer in self.ranks if peer != rank]
        self.group = gloo_groups.get(group)  # None for one rank
        self.deadline = time.monotonic() + timeout_s

    def swap(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in rank order."""
        everyone = [mine if peer == self.rank else torch.empty_like(mine) for peer in self.ranks]
        sent = [(peer, self._try(peer, "send", mine)) for peer in self.others]
        for peer in self.others:
            self._wait(peer, self._try(peer, "recv", everyone[peer]))
        for peer, work in sent:
            self._wait(peer, work)
        return everyone

    def _try(self, peer: int, what: str, tensor: torch.Tensor) -> dist.Work:
        try:
            return getattr(self.group, what)([tensor], peer, 0)
        except RuntimeError as error:
            self._gone(peer, error)

    def _wait(self, peer: int, work: dist.Work) -> None:
        left_s = max(self.deadline - time.monotonic(), 1e-3)
        try:
            work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            self._gone(peer, error)

    def _gone(self, peer: int, error: RuntimeError) -> NoReturn:
        late = time.monotonic() >= self.deadline - 0.01  # gloo waits whole milliseconds, rounded down
        self.fail(FaultKind.TIMED_OUT if late else FaultKind.LOST, peer, error)

    def fail(self, kind: FaultKind, peer: int, cause: RuntimeError | None = None) -> NoReturn:
        fault = Fault(kind, peer, self.call)
        self.control[STATUS] = fault.encode()
        raise RuntimeError(fault.sentence(self.rank, self.timeout_s)) from cause
