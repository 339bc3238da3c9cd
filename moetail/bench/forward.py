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

import moetail.integrations.transformers  # noqa: F401  registers the "moetail" experts
from moetail.bench import memory, models, stats, step, tail, timing
from moetail.bench.cases import Case

ARMS = {"stock": "grouped_mm", "moetail": "moetail"}
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
    model: Any, name: str, case: Case, tokens: torch.Tensor, arms: tuple[str, str], rounds: int | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:  # fmt: skip
    """Measure one case. `progress(done, total)` is called after each round.

    Raises: ValueError for a case that this model or this version cannot run, before anything is timed.
    """
    step.check_runnable(case)
    device = tokens.device
    with torch.no_grad():
        _use(model, ARMS["stock"])
        work = step.build(model, case, tokens)
        outputs, peaks = {}, {}
        for arm in arms:
            _use(model, ARMS[arm])
            work.restore()
            work.forward()  # compiles, loads and allocates what only a first call does
            work.restore()
            peaks[arm] = memory.peak_bytes(work.forward, device)
            work.restore()
            outputs[arm] = tuple(t.clone() for t in work.forward())
        bits = differing_bits(outputs[arms[0]], outputs[arms[1]])
        work.restore()
        with step.routings(model) as routed:
            work.forward()
        index, weights = routed[0]
        H = work.model.config.get_text_config().hidden_size
        hidden_dtype = outputs[arms[0]][1].dtype

        programs = {**{arm: ARMS[arm] for arm in arms}, CONTROL: ARMS[arms[0]]}
        timed = [_arm(model, label, implementation, work, device) for label, implementation in programs.items()]
        slowest_us = timing.warm_up(timed, seconds=1.0)
        if rounds is None:
            rounds = int(_SECONDS_PER_CASE * 1e6 / (slowest_us * 2 * len(timed)))
            rounds = min(max(rounds, _MIN_ROUNDS), _MAX_ROUNDS)
        done = iter(range(1, rounds + 1))
        samples, paired = timing.interleave(timed, rounds, lambda: progress(next(done), rounds))
        tails = tail.measure(index, weights, H, step.inner_width(model), hidden_dtype, rounds=10)
    ratio, aa = (stats.paired_ratio(paired[arms[0]], paired[other]) for other in (arms[1], CONTROL))
    return Result(
        name, case.name, arms, case.num_tokens, index.shape[1], H, _dtype_name(hidden_dtype),
        _dtype_name(weights.dtype), rounds, samples, {**peaks, CONTROL: peaks[arms[0]]}, ratio, aa, bits,
        stats.judge(ratio, aa, bits), tails, len(routed),
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


def _arm(model: Any, label: str, implementation: str, work: step.Step, device: torch.device) -> timing.Arm:
    if device.type == "cuda":
        _use(model, implementation)
        return timing.cuda_graph_arm(label, work.forward, work.restore)

    def prepare() -> None:
        _use(model, implementation)
        work.restore()

    return timing.cpu_arm(label, work.forward, prepare)


def _use(model: Any, implementation: str) -> None:
    model.set_experts_implementation(implementation)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load(name: str, text: Path, cases: list[Case], device: torch.device) -> tuple[Any, torch.Tensor]:
    """The model, and enough input tokens for the largest case. Raises: ValueError as `models.load` does."""
    for case in cases:
        step.check_runnable(case)
    model = models.load(name, device)
    for case in cases:
        step.check_fits(case, model)
    return model, models.input_tokens(model, name, text, max(step.num_input_tokens(case) for case in cases))
