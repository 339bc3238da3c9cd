"""The fastest all-reduce between separate kernels that torch has for a step's size, by measurement: the baseline's.

NCCL, and symmetric memory's one-shot and two-shot, whose input is written where they read it. On two ranks each has the
bits of a sum in rank order; on more, only where it adds in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetail.bench import stats, timing
from moetail.bench.ranks import Ranks
from moetail.models.parallel import Collective, TensorParallel

# One-shot sends everything to everyone: far behind two-shot here, and its time grows with T.
_ONE_SHOT_MAX_TOKENS = 1024
_CALLS, _ROUNDS = 20, 10


@dataclass(frozen=True)
class Nccl(Collective):
    """In place."""

    def all_reduce(self, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        dist.all_reduce(x, group=tp.group)
        return x


@dataclass(frozen=True)
class Symmetric(Collective):
    """`buffer` is symmetric memory; two-shot leaves the sum in it."""

    group_name: str = ""
    two_shot: bool = False

    def all_reduce(self, x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        assert self.buffer is not None
        if x.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(x)
        if self.two_shot:
            return torch.ops.symm_mem.two_shot_all_reduce_(self.buffer, "sum", self.group_name)
        return torch.ops.symm_mem.one_shot_all_reduce(self.buffer, "sum", self.group_name)


def choose(T: int, H: int, tp: TensorParallel, device: torch.device, ranks: Ranks) -> tuple[str, Collective]:
    """(name, collective) for calls [T, H], the same on every rank. Alone or on a CPU: moetail's, whose bits are those
    of a sum in rank order."""
    if tp.size == 1 or device.type != "cuda":
        return "moetail", Collective()
    candidates = _candidates(T, H, tp, device)
    programs = {name: _calls(c, T, H, tp, device) for name, c in candidates.items()}
    arms = [timing.cuda_graph_arm(name, program, ranks.rendezvous) for name, program in programs.items()]
    timing.warm_up(arms, seconds=0.1, slowest=ranks.slowest)
    samples, _ = timing.interleave(arms, _ROUNDS, slowest=ranks.slowest)
    best = min(samples, key=lambda name: float(stats.summary(samples[name])["median_us"]))
    return best, candidates[best]


def _candidates(T: int, H: int, tp: TensorParallel, device: torch.device) -> dict[str, Collective]:
    import torch.distributed._symmetric_memory as symm_mem

    assert tp.group is not None
    buffer = symm_mem.empty(T, H, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(buffer, tp.group.group_name)
    candidates: dict[str, Collective] = {
        "nccl": Nccl(), "symm_mem two-shot": Symmetric(buffer, tp.group.group_name, two_shot=True)
    }  # fmt: skip
    if T <= _ONE_SHOT_MAX_TOKENS:
        candidates["symm_mem one-shot"] = Symmetric(buffer, tp.group.group_name)
    return candidates


def _calls(c: Collective, T: int, H: int, tp: TensorParallel, device: torch.device) -> Callable[[], None]:
    """Zeros: a sum in place must not grow."""
    x = torch.zeros(T, H, dtype=torch.bfloat16, device=device) if c.buffer is None else c.buffer.zero_()

    def program() -> None:
        for _ in range(_CALLS):
            c.all_reduce(x, tp)

    return program
