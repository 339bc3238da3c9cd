"""Ratios, intervals and verdicts from samples whose truth is known."""

import numpy as np
import pytest

from moetail.bench.stats import Interval, judge, paired_ratio, summary


def noisy(scale, n, seed):
    return list(1000.0 * scale * np.random.default_rng(seed).lognormal(0, 0.01, n))


def test_the_interval_covers_the_truth():
    covered = sum(
        interval.low <= 0.9 <= interval.high
        for interval in (paired_ratio(noisy(1, 40, s), noisy(0.9, 40, 1000 + s)) for s in range(200))
    )
    assert covered >= 180  # 95 % of 200, less three standard deviations


def test_pairing_cancels_a_drift():
    drift = np.linspace(1, 2, 30)
    interval = paired_ratio(list(100 * drift), list(90 * drift))
    assert interval.value == pytest.approx(0.9) and interval.high - interval.low < 1e-9


@pytest.mark.parametrize("samples", [([1.0] * 3, [1.0] * 3), ([1.0] * 5, [1.0] * 4)])
def test_needs_paired_rounds(samples):
    with pytest.raises(ValueError, match="^ours must"):
        paired_ratio(*samples)


CLEAN = Interval(1.0, 0.997, 1.003)


@pytest.mark.parametrize(
    ("ratio", "aa", "bits", "word"),
    [
        (Interval(0.8, 0.79, 0.81), CLEAN, 0, "faster"),
        (Interval(0.8, 0.79, 0.81), CLEAN, 3, "slower"),  # wrong bits have no speed
        (Interval(0.998, 0.995, 1.001), CLEAN, 0, "same"),
        (Interval(1.004, 1.001, 1.007), CLEAN, 0, "same"),  # within the control + 0.5 %
        (Interval(1.02, 1.01, 1.03), CLEAN, 0, "slower"),
        (Interval(1.0, 0.95, 1.05), CLEAN, 0, "void"),  # too wide to tell
        (Interval(0.8, 0.79, 0.81), Interval(1.05, 1.04, 1.06), 0, "void"),  # the control is not 1
        (Interval(0.8, 0.79, 0.81), Interval(0.96, 0.95, 0.97), 0, "void"),
        (Interval(0.998, 0.9975, 0.999), CLEAN, 0, "same"),  # below 1, within the control
        (Interval(1.003, 1.002, 1.0035), Interval(1.005, 1.004, 1.006), 0, "void"),
        (Interval(1.015, 1.002, 1.03), CLEAN, 0, "void"),
        (Interval(1.5, 1.2, 1.9), Interval(1.0, 0.5, 2.0), 0, "void"),  # a control that calls anything the same
        (Interval(0.8, 0.79, 0.81), Interval(1.0011, 1.001, 1.0012), 0, "faster"),  # off 1 by less than we resolve
    ],
)
def test_verdicts(ratio, aa, bits, word):
    verdict = judge(ratio, aa, bits)
    assert verdict.word == word
    assert verdict.why


@pytest.mark.parametrize(
    ("ratio", "aa", "ceiling_us", "word"),
    [
        (Interval(0.95, 0.945, 0.955), CLEAN, 50.0, "faster"),  # gained 45 of 50
        (Interval(0.95, 0.945, 0.955), CLEAN, 40.0, "faster"),  # within a quarter more
        (Interval(0.95, 0.945, 0.955), CLEAN, 33.0, "implausible"),  # 45 > 33 * 1.25 + 3 of noise
        (Interval(0.95, 0.945, 0.955), CLEAN, 0.0, "implausible"),  # a gain from nothing
        (Interval(0.95, 0.945, 0.955), CLEAN, -10.0, "implausible"),  # the changed kernels are slower
        (Interval(0.95, 0.945, 0.955), CLEAN, None, "faster"),  # nothing to check it against
        (Interval(0.998, 0.995, 1.001), CLEAN, 0.0, "same"),
        (Interval(1.05, 1.04, 1.06), CLEAN, 10.0, "slower"),
    ],
)
def test_a_gain_must_be_one_that_the_changed_kernels_allow(ratio, aa, ceiling_us, word):
    assert judge(ratio, aa, 0, 1000.0, ceiling_us).word == word


def test_summary():
    assert summary([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median_us": 3.0, "p10_us": 1.4, "p90_us": 4.6, "n": 5}
