"""Profiles read back, shown and compared: which kernels take longer, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from moetail.bench import files
from moetail.bench.profile import Kernel, Profile

_WHAT = "a kernels.json of --profile-dir"


@dataclass(frozen=True)
class KernelDelta:
    """A kernel in two profiles, microseconds and calls a forward; 0 where it does not run."""

    name: str
    a_us: float
    b_us: float
    a_calls: float
    b_calls: float

    @property
    def delta_us(self) -> float:
        return self.b_us - self.a_us


def read(name: str, path: Path) -> Profile:
    """The kernels.json, of ours or of vLLM's, that the argument `name` gives. Raises: ValueError where it is none."""
    content = files.read_json(name, path, _WHAT)
    try:
        kernels = tuple(
            Kernel(_text(k["name"]), _number(k["us"]), _number(k["calls"]), _text(k["example"]))
            for k in content["kernels"]
        )
        if len({kernel.name for kernel in kernels}) < len(kernels):
            raise ValueError("a kernel's name comes twice")
        return Profile(
            _number(content["span_us"]), _number(content["busy_us"]), kernels, int(_number(content["replays"])),
            _number(content["pre_forward_us"]), int(_number(content["activities"])),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise files.not_a(name, path, _WHAT, why) from error


def deltas(a: Profile, b: Profile) -> tuple[KernelDelta, ...]:
    """Every kernel of either, the largest difference first."""
    in_a, in_b = ({kernel.name: kernel for kernel in profile.kernels} for profile in (a, b))
    nothing = Kernel("", 0.0, 0.0, "")
    pairs = ((name, in_a.get(name, nothing), in_b.get(name, nothing)) for name in {**in_a, **in_b})
    rows = [KernelDelta(name, x.us, y.us, x.calls, y.calls) for name, x, y in pairs]
    return tuple(sorted(rows, key=lambda row: -abs(row.delta_us)))


def grown(baseline: Profile, ours: Profile) -> tuple[KernelDelta, ...]:
    """The kernels that take longer in ours, the largest growth first; one that is new counts with all its time."""
    return tuple(row for row in deltas(baseline, ours) if row.delta_us > 0)


def show_header(profile: Profile) -> str:
    share = profile.busy_us / profile.span_us if profile.span_us else 0.0
    return (
        f"span {profile.span_us:.1f} us, busy {profile.busy_us:.1f} us ({share:.1%} of the span), "
        f"{profile.activities} activities; the mean of {profile.replays} replays"
    )


def show_table(profile: Profile, top: int) -> Table:
    """The longest kernels; `%` is the share of the summed kernel time, which overlaps make larger than busy."""
    total = sum(kernel.us for kernel in profile.kernels) or 1.0
    rows = [(f"{k.us:.2f}", f"{100 * k.us / total:.1f}", f"{k.calls:g}", k.name) for k in profile.kernels[:top]]
    return _table(("us", "%", "calls", "kernel"), rows)


def diff_header(a: Profile, b: Profile) -> str:
    span, busy = (f"{x:.1f} -> {y:.1f} us ({y - x:+.1f})" for x, y in ((a.span_us, b.span_us), (a.busy_us, b.busy_us)))
    return f"span {span}, busy {busy}"


def diff_table(a: Profile, b: Profile, top: int) -> Table:
    rows = [
        (f"{d.delta_us:+.2f}", f"{d.a_us:.2f}", f"{d.b_us:.2f}", f"{d.a_calls:g}", f"{d.b_calls:g}", d.name)
        for d in deltas(a, b)[:top]
    ]
    return _table(("delta us", "A us", "B us", "A n", "B n", "kernel"), rows)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """Numbers to the right, the name last and never cut: on a narrow terminal it folds."""
    table = Table()
    for column in columns[:-1]:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*row[:-1], Text(row[-1]))
    return table


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no time and no count")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value
