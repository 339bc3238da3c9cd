"""`moetail bench selftest`: the gate on arms whose truth is known. What it must say of each plant:

    slower      our tail is fused and faster, but the producer before it got slower (what the seed shipped)
    same        both arms are one program
    implausible the step got faster by something that is no part of the tail
    slower      the output has one wrong bit, however fast

The planted model is a stack of MoE-like layers: a GEMM that produces expert rows, and a tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moetail.bench import forward, timing
from moetail.bench.cases import Case, parse_case
from moetail.bench.ranks import Ranks
from moetail.bench.step import Step, Tails
from moetail.ops.finalize import finalize

BASELINE = "separate"
# What the verdict must name: cuBLAS calls its GEMMs by several names.
_GEMM = ("aten::mm", "nvjet", "gemm", "cutlass", "xmma")
# arm -> the verdict it must get, and what its sentence must name (one of them)
PLANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "slower_producer": ("slower", _GEMM),
    "same_program": ("same", ("control",)),
    "gain_from_nothing": ("implausible", _GEMM),
    "wrong_bit": ("slower", ("output bits differ",)),
}
_LAYERS, _K = 4, 4
# T, H: a step of about 15 ms on two CPU cores, and 2 ms on an H200, whose noise is small against the plants.
_SIZES = {"cpu": (256, 640), "cuda": (4096, 4096)}
# The producer gets slower, or what should not have been there goes: so much of it.
_EXTRA_ROWS = 0.5
_ATTEMPTS = 5


@dataclass(frozen=True)
class PlantedStep:
    """One step of the arm in use. `weights` [H, H] of each layer, `row_map` and `topk_weights` [T, K]."""

    model: PlantedModel
    hidden: torch.Tensor
    weights: list[torch.Tensor]
    row_map: torch.Tensor
    topk_weights: torch.Tensor

    def restore(self) -> None:
        """Nothing to do: a step changes no state."""

    def forward(self) -> tuple[torch.Tensor, ...]:
        arm = self.model.arm
        h = self.hidden
        for weight in self.weights:
            rows = self._producer(arm, h, weight)
            h = self._tail(arm, rows, h)
        if arm == "wrong_bit":
            bits = h.view(torch.int16).clone()
            bits[0, 0] ^= 1
            h = bits.view(h.dtype)
        return (h,)

    def _producer(self, arm: str, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Expert rows [T * K, H]. The extra product is work whose result nobody reads."""
        x = h.repeat(_K, 1)
        if arm == "slower_producer" or self.model.idle_work(arm):
            torch.mm(x[: int(len(x) * _EXTRA_ROWS)], weight)
        return torch.mm(x, weight)

    def _tail(self, arm: str, rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        if arm == "slower_producer":
            return finalize(rows, self.row_map, self.topk_weights, shared)
        return finalize(rows, self.row_map, self.topk_weights) + shared


class PlantedModel:
    """A `StepModel` of one plant: the baseline and one arm."""

    def __init__(self, plant: str, device: torch.device) -> None:
        self.name, self.device = f"planted {plant}", device
        self.arms: tuple[str, ...] = (BASELINE, plant)
        self.arm = BASELINE

    def idle_work(self, arm: str) -> bool:
        """Whether the baseline of this plant does work that its other arm leaves out."""
        return arm == BASELINE and self.arms[1] == "gain_from_nothing"

    def use(self, arm: str) -> None:
        self.arm = arm

    def check(self, case: Case) -> None:
        """Every case is one."""

    def build(self, case: Case, routing: str) -> PlantedStep:
        T, H = case.num_tokens, _SIZES[self.device.type][1]
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g).to(self.device, torch.bfloat16)

        weights = [normal(H, H) * H**-0.5 for _ in range(_LAYERS)]
        row_map = torch.randperm(T * _K, generator=g).to(self.device, torch.int32).view(T, _K)
        topk_weights = torch.rand(T, _K, generator=g).softmax(-1).to(self.device)
        return PlantedStep(self, normal(T, H), weights, row_map, topk_weights)

    def tails(self, step: Step) -> Tails:
        """Both arms' tails alone, on the rows of the first layer."""
        assert isinstance(step, PlantedStep)
        rows = step.hidden.repeat(_K, 1)

        def tail(arm: str) -> Callable[[], object]:
            return lambda: step._tail(arm, rows, step.hidden)

        make = timing.cuda_graph_arm if self.device.type == "cuda" else timing.cpu_arm
        arms = [make(arm, tail(arm)) for arm in self.arms]
        timing.warm_up(arms, seconds=0.1)
        samples, _ = timing.interleave(arms, rounds=20)
        T, H = step.hidden.shape
        return Tails(samples, _LAYERS, T, _K, H, "bfloat16", "float32")


@dataclass(frozen=True)
class Outcome:
    """What the gate said of one plant."""

    plant: str
    wanted: str
    named: tuple[str, ...]
    result: forward.Result

    @property
    def caught(self) -> bool:
        verdict = self.result.verdict
        return verdict.word == self.wanted and any(name in verdict.why for name in self.named)


def run(
    device: torch.device, ranks: Ranks, rounds: int = 24,
    progress: Callable[[str, int, int], None] = lambda plant, done, total: None,
) -> list[Outcome]:  # fmt: skip
    """Every plant through the gate. One that did not get its verdict gets twice as many rounds, three times at most: on
    a busy machine few rounds show noise (two ranks on two cores: an A/A pair 4 % apart). The last verdict counts.
    """
    case = parse_case(f"planted={_SIZES[device.type][0]}")
    outcomes = []
    for plant, (wanted, named) in PLANTS.items():
        model = PlantedModel(plant, device)
        on_round = functools.partial(progress, plant)
        for doubled in range(_ATTEMPTS):
            total = rounds << doubled
            settings = forward.Settings((BASELINE, plant), total)
            result = forward.run_case(model, replace(case, name=plant), settings, ranks, on_round)
            outcome = Outcome(plant, wanted, named, result)
            if outcome.caught:
                break
        outcomes.append(outcome)
    return outcomes
