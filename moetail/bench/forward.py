"""`moetail bench forward`: a model's forward step before and after, in milliseconds, bit by bit.

Two arms on the same weights and the same experts GEMM, and the first one once more as the control (A/A), interleaved
in one process. On CUDA each arm is a captured graph, on a CPU it is eager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetail.bench import memory, models, stats, timing
from moetail.bench.cases import Case
from moetail.bench.step import Step, StepModel

ARMS = ("stock", "moetail")
CONTROL = "control"
# Measured time a case aims at, and the rounds that bound it.
_SECONDS_PER_CASE = 40.0
_MIN_ROUNDS, _MAX_ROUNDS = 8, 200


@dataclass(frozen=True)
class Result:
    """One case. Times in microseconds; `tail` holds what one layer's tails take alone (`bench.tail.measure`)."""

    model: str
    case: str
    arms: tuple[str, str]
    T: int
    K: int
    H: int
    dtype: str
    weights_dtype: str
    rounds: int
    samples: dict[str, list[float]]
    peak_bytes: dict[str, int]
    ratio: stats.Interval
    aa: stats.Interval
    differing_bits: int
    verdict: stats.Verdict
    tail: dict[str, list[float]]
    tail_layers: int

    def median_us(self, arm: str) -> float:
        return float(stats.summary(self.samples[arm])["median_us"])

    def tail_us(self, arm: str) -> float:
        return float(stats.summary(self.tail[arm])["median_us"])

    @property
    def ceiling_us(self) -> float:
        """What the kernels that changed, measured alone, allow the step to gain."""
        return (self.tail_us("stock") - self.tail_us("moetail") + self.tail_us("masks")) * self.tail_layers

    @property
    def arrives(self) -> float:
        """The share of the ceiling that the step gained."""
        gained = self.median_us("stock") - self.median_us("moetail")
        return gained / self.ceiling_us

    def row(self) -> dict[str, Any]:
        """This case in a record."""
        return {
            "model": self.model, "case": self.case, "T": self.T, "K": self.K, "H": self.H, "dtype": self.dtype,
            "weights_dtype": self.weights_dtype, "numerics": "TRANSFORMERS", "experts_gemm": "grouped_mm",
            "rounds": self.rounds,
            "arms": {
                name: {**stats.summary(values), "samples_us": [round(v, 2) for v in values],
                       "peak_bytes": self.peak_bytes[name]}
                for name, values in self.samples.items()
            },
            "ratio": {"b_over_a": self.ratio.value, "low": self.ratio.low, "high": self.ratio.high},
            "aa": {"b_over_a": self.aa.value, "low": self.aa.low, "high": self.aa.high},
            "differing_bits": self.differing_bits, "verdict": self.verdict.word, "why": self.verdict.why,
            "tail": {**{name: stats.summary(values) for name, values in self.tail.items()}, "layers": self.tail_layers},
            "ceiling_us": self.ceiling_us, "arrives": self.arrives,
        }  # fmt: skip


def check_arms(arms: tuple[str, ...]) -> tuple[str, str]:
    """The two arms, baseline first. Raises: ValueError where they are not two of ARMS."""
    if len(arms) != 2 or arms[0] == arms[1] or any(arm not in ARMS for arm in arms):
        raise ValueError(f"arms must be two of {', '.join(ARMS)}, baseline first, got {','.join(arms)!r}")
    return arms[0], arms[1]


def run_case(
    model: StepModel, case: Case, arms: tuple[str, str], rounds: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:  # fmt: skip
    """Measure one case. `progress(done, total)` is called after each round.

    Raises: ValueError for a case that this model cannot run, before anything is timed.
    """
    device = model.device
    with torch.no_grad():
        model.use(model.arms[0])
        work = model.build(case, "real")
        outputs, peaks = {}, {}
        for arm in arms:
            model.use(arm)
            work.restore()
            work.forward()  # compiles, loads and allocates what only a first call does
            work.restore()
            peaks[arm] = memory.peak_bytes(work.forward, device)
            work.restore()
            outputs[arm] = tuple(t.clone() for t in work.forward())
        bits = differing_bits(outputs[arms[0]], outputs[arms[1]])

        programs = {**{arm: arm for arm in arms}, CONTROL: arms[0]}
        timed = [_arm(model, label, arm, work) for label, arm in programs.items()]
        slowest_us = timing.warm_up(timed, seconds=1.0)
        if rounds is None:
            rounds = int(_SECONDS_PER_CASE * 1e6 / (slowest_us * 2 * len(timed)))
            rounds = min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)
        done = iter(range(1, rounds + 1))
        samples, paired = timing.interleave(timed, rounds, lambda: progress(next(done), rounds))
        tails = model.tails(work)
    assert tails is not None
    ratio, aa = (stats.paired_ratio(paired[arms[0]], paired[other]) for other in (arms[1], CONTROL))
    return Result(
        model.name, case.name, arms, case.num_tokens, tails.K, tails.H, tails.dtype, tails.weights_dtype, rounds,
        samples, {**peaks, CONTROL: peaks[arms[0]]}, ratio, aa, bits, stats.judge(ratio, aa, bits), tails.samples,
        tails.layers,
    )  # fmt: skip


def differing_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> int:
    """Bits in which the outputs differ. Raises: RuntimeError where an output is not finite: NaN hides a difference."""
    total = 0
    for x, y in zip(a, b, strict=True):
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            raise RuntimeError("the model's outputs are not finite: nothing can be compared")
        difference = x.contiguous().view(torch.uint8) ^ y.contiguous().view(torch.uint8)
        total += sum(int(((difference >> bit) & 1).sum()) for bit in range(8))
    return total


def _arm(model: StepModel, label: str, arm: str, work: Step) -> timing.Arm:
    if model.device.type == "cuda":
        model.use(arm)
        return timing.cuda_graph_arm(label, work.forward, work.restore)

    def prepare() -> None:
        model.use(arm)
        work.restore()

    return timing.cpu_arm(label, work.forward, prepare)


def load(name: str, text: Path, cases: list[Case], device: torch.device) -> StepModel:
    """The model, every case checked against it. Raises: ValueError as `models.load` does."""
    model = models.load(name, device, text)
    for case in cases:
        model.check(case)
    return model
