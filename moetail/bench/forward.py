"""`moetail bench forward`: a model's forward step before and after, in milliseconds, bit by bit.

Two arms of one model on the same weights, and the first one once more as the control (A/A), interleaved in one process
a rank. On CUDA each arm is a captured graph, on a CPU it is eager. What is compared bit by bit is what was timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moetail import guards
from moetail.bench import machine_state, memory, models, profile, profile_diff, stats, timing
from moetail.bench.cases import Case
from moetail.bench.ranks import Ranks
from moetail.bench.step import Step, StepModel, Tails

CONTROL = "control"
# Measured time a case aims at, and the rounds that bound it.
_SECONDS_PER_CASE = 40.0
_MIN_ROUNDS, _MAX_ROUNDS = 8, 200
# A graph may run other kernels than eager mode does (attention without a mask), but must compute the same.
_GRAPH_RMS = 0.02
_REPLAYS = 5  # of a profile
# Of an arm, run in turn: where a capture's tensors lie changes its time in every replay, by up to 1.1 % between two
# captures of one program (H200, torch's grouped_mm, by the addresses of its operands).
CAPTURES = 4
# Runs of the baseline and of the control that must have the same bits: an attention kernel with a race passed one.
_REPEATS = 4


@dataclass(frozen=True)
class Settings:
    """What is asked of every case. `rounds` None: about 40 s of them. `profile_dir`: where profiles go, if wanted."""

    arms: tuple[str, str]
    rounds: int | None = None
    routing: str = "real"
    profile_dir: Path | None = None


@dataclass(frozen=True)
class Result:
    """One case. Times in microseconds, the slowest rank's; bits summed over ranks, bytes the largest rank's (None:
    not measured).

    `kernels`: how many of them a step runs, by arm. `grown`: those that take longer in our arm, for a slower case.
    `repeat_bits`: in how many bits two runs of the baseline differ, at most. `graph_rms`: how far the graph's outputs
    are from those of eager mode, relative; None where there is no graph. `ceiling_us`: what the tails, measured alone,
    allow the step to gain (on the rank where that is most: every rank must come to one verdict). `rest_us`: the pause
    before each replay, of a GPU that is throttled. `captures`: how many graphs an arm has (1 on a CPU, which has none).
    """

    model: str
    case: str
    settings: Settings
    T: int
    world_size: int
    rounds: int
    samples: dict[str, list[float]]
    peak_bytes: dict[str, int | None]
    ratio: stats.Interval
    aa: stats.Interval
    differing_bits: int
    repeat_bits: int
    graph_rms: float | None
    tails: Tails | None
    ceiling_us: float | None
    rest_us: float
    captures: int
    kernels: dict[str, int]
    grown: tuple[profile_diff.KernelDelta, ...]
    machine_state: dict[str, dict[str, Any]]
    verdict: stats.Verdict

    def median_us(self, arm: str) -> float:
        return float(stats.summary(self.samples[arm])["median_us"])

    @property
    def arrives(self) -> float | None:
        """The share of the ceiling that the step gained."""
        baseline, ours = self.settings.arms
        return (self.median_us(baseline) - self.median_us(ours)) / self.ceiling_us if self.ceiling_us else None

    def row(self) -> dict[str, Any]:
        """This case in a record."""
        tails = self.tails
        facts = dict.fromkeys(("K", "H", "dtype", "weights_dtype")) if tails is None else vars(tails)
        return {
            "model": self.model, "case": self.case, "T": self.T,
            **{name: facts[name] for name in ("K", "H", "dtype", "weights_dtype")},
            "world_size": self.world_size, "routing": self.settings.routing, "rounds": self.rounds,
            "l2": "as the replay before left it: arms alternate, and each step reads far more than the cache holds",
            "arms": {
                name: {**stats.summary(values), "samples_us": [round(v, 2) for v in values],
                       "peak_bytes": self.peak_bytes[name], "kernels": self.kernels.get(name)}
                for name, values in self.samples.items()
            },
            "ratio": {"b_over_a": self.ratio.value, "low": self.ratio.low, "high": self.ratio.high},
            "aa": {"b_over_a": self.aa.value, "low": self.aa.low, "high": self.aa.high},
            "differing_bits": self.differing_bits, "repeat_bits": self.repeat_bits, "graph_rms": self.graph_rms,
            "verdict": self.verdict.word, "why": self.verdict.why,
            "tail": None if tails is None else {
                **{name: stats.summary(values) for name, values in tails.samples.items()}, "layers": tails.layers,
            },
            **({"note": tails.note} if tails is not None and tails.note else {}),
            "ceiling_us": self.ceiling_us, "arrives": self.arrives,
            "grown": [{"kernel": d.name, "us": d.delta_us} for d in self.grown],
            "rest_us": self.rest_us, "captures": self.captures, "machine_state": self.machine_state,
        }  # fmt: skip


def check_arms(arms: tuple[str, ...], model: StepModel) -> tuple[str, str]:
    """The two arms, baseline first. Raises: ValueError where they are not two of the model's."""
    if len(arms) != 2 or arms[0] == arms[1] or any(arm not in model.arms for arm in arms):
        raise ValueError(f"arms must be two of {', '.join(model.arms)}, baseline first, got {','.join(arms)!r}")
    return arms[0], arms[1]


def run_case(
    model: StepModel, case: Case, settings: Settings, ranks: Ranks | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Result:  # fmt: skip
    """Measure one case. `progress(done, total)` is called after each round.

    Raises: ValueError for a case that this model cannot run, before anything is timed; RuntimeError where its outputs
    are not finite, or a rank is lost.
    """
    ranks = ranks or Ranks()
    baseline, ours = settings.arms
    model.use(model.arms[0])
    work = model.build(case, settings.routing)
    eager, peaks = {}, {}
    for arm in settings.arms:
        model.use(arm)
        work.restore()
        with models.fits_in_memory(f"case {case.name}"):
            work.forward()  # compiles, loads and allocates what only a first call does
        work.restore()
        peaks[arm] = int(ranks.slowest(memory.peak_bytes(work.forward, model.device)))
        work.restore()
        eager[arm] = _copied(work.forward())
    programs = _programs(settings.arms)
    captures = num_captures(len(programs) * max(peaks.values()), ranks, model.device)
    timed = {label: timed_arm(model, label, arm, work, ranks, captures) for label, arm in programs.items()}
    arms = [one.arm for one in timed.values()]

    slowest_us = timing.warm_up(arms, seconds=1.0, slowest=ranks.slowest)
    state = {"before": machine_state.read(model.device)}
    # A GPU at its power cap changes its clock from replay to replay; rested for as long as it works, it need not.
    rest_us = slowest_us if ranks.slowest(float(state["before"].get("throttled") or 0)) else 0.0
    rounds = settings.rounds or default_rounds(slowest_us + rest_us, len(arms))
    done = iter(range(1, rounds + 1))
    with guards.no_jit():  # a kernel compiled now would be in somebody's time
        samples, paired = timing.interleave(arms, rounds, lambda: progress(next(done), rounds), ranks.slowest, rest_us)
    state["after"] = machine_state.read(model.device)

    outputs = {arm: timed[arm].outputs() for arm in settings.arms}
    bits = ranks.total(differing_bits(outputs[baseline], outputs[ours]))
    again = (timed[label].outputs() for label in (CONTROL, baseline) * _REPEATS)
    repeat = ranks.total(max(differing_bits(outputs[baseline], one) for one in again))
    on_graph = model.device.type == "cuda"
    rms = ranks.slowest(max(relative_rms(outputs[a], eager[a]) for a in settings.arms)) if on_graph else None
    tails = model.tails(work)
    ceiling_us = None if tails is None else ranks.slowest(tails.gain_us(baseline, ours))
    ratio, aa = (stats.paired_ratio(paired[baseline], paired[other]) for other in (ours, CONTROL))
    result = Result(
        model.name, case.name, settings, case.num_tokens, ranks.world_size, rounds, samples,
        {**peaks, CONTROL: peaks[baseline]}, ratio, aa, bits, repeat, rms, tails, ceiling_us, rest_us, captures, {}, (),
        state,
        stats.Verdict("void", "not judged yet"),
    )  # fmt: skip
    verdict = verdict_of(ratio, aa, bits, repeat, baseline, rms, result.median_us(baseline), ceiling_us)
    wanted = settings.profile_dir is not None or on_graph or verdict.word in ("slower", "implausible")
    return _profiled(result, verdict, timed, ranks, case, model.device) if wanted else replace(result, verdict=verdict)


@dataclass(frozen=True)
class TimedArm:
    """An arm, its whole program, what its program does before the step, and where its last outputs are."""

    arm: timing.Arm
    prepare: Callable[[], None]
    held: list[tuple[torch.Tensor, ...]]

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Of one more run."""
        self.arm.run()
        return _copied(self.held[-1])


def _programs(arms: tuple[str, str]) -> dict[str, str]:
    return {**{arm: arm for arm in arms}, CONTROL: arms[0]}


def num_captures(peak_bytes: int, ranks: Ranks, device: torch.device) -> int:
    """CAPTURES, or one where those of all arms, with peak_bytes each time, would take half of the memory. The same on
    every rank: a capture meets the other ranks'."""
    if device.type == "cpu":
        return 1
    least_free = -ranks.slowest(-float(memory.free_bytes(device)))
    return CAPTURES if CAPTURES * peak_bytes <= least_free / 2 else 1


def timed_arm(model: StepModel, label: str, arm: str, work: Step, ranks: Ranks, captures: int = 1) -> TimedArm:
    """An arm of the model on this step; on CUDA so many captures of it, of which each run takes the next."""
    held: list[tuple[torch.Tensor, ...]] = []

    def forward() -> None:
        held[:] = [work.forward()]

    def prepare() -> None:
        if model.device.type == "cpu":  # an eager arm shares the model with the others
            model.use(arm)
        work.restore()
        ranks.rendezvous()

    model.use(arm)
    if model.device.type == "cpu":
        return TimedArm(timing.cpu_arm(label, forward, prepare), prepare, held)
    graphs = [(timing.cuda_graph_arm(label, forward, prepare), held[-1]) for _ in range(captures)]
    turns = itertools.cycle(graphs)

    def run() -> float:
        graph, outputs = next(turns)
        held[:] = [outputs]
        return graph.run()

    return TimedArm(timing.Arm(label, run), prepare, held)


def default_rounds(slowest_us: float, num_arms: int) -> int:
    """As many as take about 40 s."""
    return min(max(int(_SECONDS_PER_CASE * 1e6 / (slowest_us * 2 * num_arms)), _MIN_ROUNDS), _MAX_ROUNDS)


def verdict_of(
    ratio: stats.Interval, aa: stats.Interval, differing_bits: int, repeat_bits: int, baseline: str,
    graph_rms: float | None = None, baseline_us: float = 0.0, ceiling_us: float | None = None,
) -> stats.Verdict:  # fmt: skip
    """void where the baseline does not repeat itself or the graph computes something else; else `stats.judge`'s."""
    if repeat_bits:
        return stats.Verdict("void", f"two runs of {baseline} differ in {repeat_bits} bits: no bits to compare with")
    if graph_rms is not None and graph_rms > _GRAPH_RMS:
        return stats.Verdict("void", f"the graph's outputs are {graph_rms:.2g} (rms) off those of eager mode")
    return stats.judge(ratio, aa, differing_bits, baseline_us, ceiling_us)


def _profiled(
    result: Result, verdict: stats.Verdict, timed: dict[str, TimedArm], ranks: Ranks, case: Case, device: torch.device
) -> Result:
    """With the kernels of both arms, and for a slower or implausible case those that made the difference."""
    profiles, folder = {}, result.settings.profile_dir
    try:
        for arm in result.settings.arms:
            pre = profile.count_activities(timed[arm].prepare, device)
            name = f"{case.name}.{arm}"
            profiles[arm] = profile.capture(timed[arm].arm.run, name, device, _REPLAYS, folder, ranks.rank, pre)
    except RuntimeError as error:  # the times stand without a profile, and say that they do
        return replace(result, verdict=replace(verdict, why=f"{verdict.why}; no profile: {error}"))
    baseline, ours = result.settings.arms
    kernels = {arm: profiles[arm].activities for arm in profiles}
    grown: tuple[profile_diff.KernelDelta, ...] = ()
    if verdict.word == "slower" and not result.differing_bits:
        grown = profile_diff.grown(profiles[baseline], profiles[ours])[:5]
        if grown:
            named = ", ".join(f"{d.name} +{d.delta_us:.1f} us" for d in grown[:3])
            verdict = replace(verdict, why=f"{verdict.why}; grown: {named}")
    if verdict.word == "implausible":
        shrunk = profile_diff.grown(profiles[ours], profiles[baseline])[:3]
        named = ", ".join(f"{d.name} {d.delta_us:.1f} us" for d in shrunk)
        verdict = replace(verdict, why=f"{verdict.why}; what went: {named or 'no kernel'}")
    return replace(result, verdict=verdict, kernels=kernels, grown=grown)


def differing_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> int:
    """Bits in which the outputs differ. Raises: RuntimeError where an output is not finite: NaN hides a difference."""
    total = 0
    for x, y in zip(a, b, strict=True):
        if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
            raise RuntimeError("the model's outputs are not finite: nothing can be compared")
        difference = x.contiguous().view(torch.uint8) ^ y.contiguous().view(torch.uint8)
        total += sum(int(((difference >> bit) & 1).sum()) for bit in range(8))
    return total


def relative_rms(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> float:
    """The largest of the outputs' root mean square differences, relative to b's."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).square().mean().sqrt() / y.square().mean().sqrt().clamp_min(1e-30)) for x, y in pairs)


def _copied(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.clone() for t in outputs)


def load(name: str, text: Path, cases: list[Case], device: torch.device) -> StepModel:
    """The model, every case checked against it. Raises: ValueError as `models.load` does."""
    model = models.load(name, device, text)
    for case in cases:
        model.check(case)
    return model
