"""From paired samples to a ratio, its interval and a verdict. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
# A/A may be off 1 by this much and still be called clean: two captures of one program differ by their addresses.
AA_RESOLUTION = 0.002
NEVER_SLOWER_MARGIN = 0.005
SAME_WIDTH = 0.04
# What a tail measured alone does not show of what it gives the step: cache state, launch gaps.
CEILING_SLACK = 0.25
VERDICTS = ("faster", "same", "slower", "void", "implausible")


@dataclass(frozen=True)
class Interval:
    """A ratio and its 95 % paired bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Verdict:
    """word: one of VERDICTS; and the sentence that says why."""

    word: str
    why: str


def paired_ratio(baseline: list[float], ours: list[float], seed: int = 0) -> Interval:
    """Median over rounds of ours/baseline; sample i of both belongs to round i. Rounds are resampled whole."""
    if len(baseline) != len(ours) or len(baseline) < 4:
        raise ValueError(f"ours must have one sample for each of >= 4 rounds, got {len(ours)} and {len(baseline)}")
    ratios = np.asarray(ours) / np.asarray(baseline)
    picks = np.random.default_rng(seed).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    return Interval(float(np.median(ratios)), float(low), float(high))


def judge(
    ratio: Interval,
    aa: Interval,
    differing_bits: int,
    baseline_us: float = 0.0,
    ceiling_us: float | None = None,
) -> Verdict:
    """The verdict of one case, from ours/baseline and the control baseline/baseline of the same rounds.

    void         the control is not 1 within its interval (and AA_RESOLUTION), or the interval is too wide to tell
    implausible  the whole interval gains more than `ceiling_us`, what the kernels that changed allow a step of
                 `baseline_us` to gain (+ CEILING_SLACK, + what the control shows as noise); None: not checked
    faster       the whole interval lies below the control's
    same         never slower: the interval's upper end is at most the control's + NEVER_SLOWER_MARGIN, and the control
                 is no wider than SAME_WIDTH, or it would call anything the same
    slower       the whole interval lies above the control's, or a bit differs
    """
    if differing_bits:
        return Verdict("slower", f"{differing_bits} output bits differ: no speed counts")
    if aa.low > 1 + AA_RESOLUTION or aa.high < 1 - AA_RESOLUTION:
        return Verdict("void", f"the control is {aa} and not 1: the machine was not quiet")
    if ratio.high < min(aa.low, 1.0):
        gained_us, noise_us = (1 - ratio.high) * baseline_us, max(aa.high - 1, 1 - aa.low) * baseline_us
        if ceiling_us is not None and gained_us > max(ceiling_us, 0.0) * (1 + CEILING_SLACK) + noise_us:
            return Verdict(
                "implausible",
                f"the step gained at least {gained_us:.0f} us, and the kernels that changed allow {ceiling_us:.0f} us",
            )
        return Verdict("faster", f"{ratio} lies below the control {aa}")
    if ratio.high <= aa.high + NEVER_SLOWER_MARGIN and aa.high - aa.low <= SAME_WIDTH:
        return Verdict("same", f"{ratio} is within the control {aa} + {NEVER_SLOWER_MARGIN:.1%}")
    if ratio.low > aa.high:
        return Verdict("slower", f"{ratio} lies above the control {aa}")
    return Verdict("void", f"{ratio} is too wide to tell from the control {aa}: more rounds")


def summary(samples_us: list[float]) -> dict[str, float | int]:
    """Median and spread of one arm, in microseconds."""
    p10, median, p90 = (float(q) for q in np.quantile(samples_us, (0.1, 0.5, 0.9)))
    return {"median_us": median, "p10_us": p10, "p90_us": p90, "n": len(samples_us)}
