"""What `bench forward` needs of a model: a `StepModel` builds a `Step` for a case, and switches between its arms.

A transformers model is one (`transformers_step.py`). Any other object with these members is as good: `models.load`
takes a factory of it by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moetail.bench import stats
from moetail.bench.cases import Case


class Step(Protocol):
    """One forward step of one case, on inputs that are already there. Runs under the arm in use when it is called."""

    def restore(self) -> None:
        """Back to the state before the step. Captured in a CUDA graph: device work only."""

    def forward(self) -> tuple[torch.Tensor, ...]:
        """One step; its outputs, which are compared bit for bit. Captured in a CUDA graph: no host sync."""
        ...


class StepModel(Protocol):
    """`arms`: what `use` takes, the baseline first."""

    name: str
    arms: tuple[str, ...]
    device: torch.device

    def use(self, arm: str) -> None: ...

    def check(self, case: Case) -> None:
        """Raises: ValueError with the reason why this model cannot run the case."""

    def build(self, case: Case, routing: str) -> Step:
        """`routing`: "real" (the router's own) or "balanced". Fills the KV context with the arm now in use."""
        ...

    def tails(self, step: Step) -> Tails | None:
        """One layer's tails alone; None where the model has no measure of them."""
        ...


@dataclass(frozen=True)
class Tails:
    """What one MoE layer's tail takes alone, in microseconds.

    `samples`: by arm, the model's baseline first. It may also hold "masks", which that first arm runs besides its tail
    and no other arm does. `layers`: how many MoE layers there are. `note`: what the baseline's are made of.
    """

    samples: dict[str, list[float]]
    layers: int
    T: int
    K: int
    H: int
    dtype: str
    weights_dtype: str
    note: str = ""

    def gain_us(self, baseline: str, ours: str) -> float:
        """What a step gains from `baseline` to `ours` if all of it arrives: medians, over all layers."""
        return (self._median_us(baseline) - self._median_us(ours)) * self.layers

    def _median_us(self, arm: str) -> float:
        names = [arm]
        if arm == next(iter(self.samples)) and "masks" in self.samples:
            names.append("masks")
        return sum(float(stats.summary(self.samples[name])["median_us"]) for name in names)
