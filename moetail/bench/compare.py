"""`moetail bench compare A B`: two records of the same bench, case by case.

The two runs were not interleaved, so a time difference may be the machine's: what is compared first are the ratios,
each of which was measured inside its own run. Times are compared only where machine and versions are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What must be alike for two times to be compared; commit and date are what one compares.
_SAME_MACHINE = ("gpu", "driver", "cpu", "threads", "torch", "triton", "transformers", "numba", "python")


@dataclass(frozen=True)
class Line:
    """One case in both records. `ratio`: (value, low, high) of ours/baseline; `ours_ms` is None across machines."""

    case: str
    ratio: tuple[tuple[float, float, float], tuple[float, float, float]]
    verdicts: tuple[str, str]
    ours_ms: tuple[float, float] | None

    @property
    def word(self) -> str:
        """worse | better | same: whether B's whole interval lies above or below A's; a worse verdict is worse."""
        (_, a_low, a_high), (_, b_low, b_high) = self.ratio
        bad = ("slower", "implausible", "void")
        if self.verdicts[1] in bad and self.verdicts[0] not in bad:
            return "worse"
        if b_low > a_high:
            return "worse"
        return "better" if b_high < a_low else "same"


@dataclass(frozen=True)
class Comparison:
    """`changed`: what differs between the machines. `only`: cases that one record alone has."""

    lines: tuple[Line, ...]
    changed: tuple[str, ...]
    only: tuple[str, ...]


def compare(a: dict[str, Any], b: dict[str, Any]) -> Comparison:
    """Raises: ValueError where the records are not whole, not of one kind, or have no case in common."""
    for name, content in (("A", a), ("B", b)):
        if not content["complete"]:
            raise ValueError(f"{name} must be a complete record, got a partial one")
        if content["kind"] not in ("forward", "kernels"):
            raise ValueError(f"{name} must be a record of bench forward or bench kernels, got kind {content['kind']}")
    if a["kind"] != b["kind"]:
        raise ValueError(f"A and B must be of one kind, got {a['kind']} and {b['kind']}")
    rows_a, rows_b = _rows("A", a), _rows("B", b)
    shared = [key for key in rows_a if key in rows_b]
    if not shared:
        raise ValueError(f"A and B must have a case in common, got {', '.join(rows_a)} and {', '.join(rows_b)}")
    changed = tuple(
        f"{field}: {a['machine'].get(field)} -> {b['machine'].get(field)}"
        for field in (*_SAME_MACHINE, "world_size")
        if _fact(a, field) != _fact(b, field)
    )
    try:
        lines = tuple(_line(key, rows_a[key], rows_b[key], not changed) for key in shared)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"A and B must have rows as a bench writes them, got some without {error}") from error
    only = tuple(f"{key} (A only)" for key in rows_a if key not in rows_b)
    return Comparison(lines, changed, only + tuple(f"{key} (B only)" for key in rows_b if key not in rows_a))


def _fact(content: dict[str, Any], field: str) -> Any:
    return content["world_size"] if field == "world_size" else content["machine"].get(field)


def _rows(name: str, content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each row by its keys. Raises: ValueError where a row is none of a bench."""
    try:
        return {key: row for row in content["rows"] for key in _keys(row)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name} must have rows as a bench writes them, got one without {error}") from error


def _keys(row: dict[str, Any]) -> list[str]:
    """What is compared of a row: a forward case, or each baseline of an op's shape. What stands before the tail has no
    `l2` of its own."""
    if "ratio" in row:
        return [f"{row['model']} {row['case']}"]
    where = " ".join(row[part] for part in ("op", "case", "l2") if part in row)
    return [f"{where}: {name}" for name in row["ratios"]]


def _line(key: str, a: dict[str, Any], b: dict[str, Any], times: bool) -> Line:
    if "ratio" in a:
        ratios = [(r["b_over_a"], r["low"], r["high"]) for r in (a["ratio"], b["ratio"])]
        ours = [_ours_us(row) / 1e3 for row in (a, b)]
        verdicts = (a["verdict"], b["verdict"])
    else:  # a kernels record has baseline over ours: turned round, so that less is better here too
        name = key.rpartition(": ")[2]
        ratios = [(1 / r["value"], 1 / r["high"], 1 / r["low"]) for r in (a["ratios"][name], b["ratios"][name])]
        ours = [row["us"] / 1e3 for row in (a, b)]
        verdicts = ("", "")
    return Line(key, (ratios[0], ratios[1]), verdicts, (ours[0], ours[1]) if times else None)


def _ours_us(row: dict[str, Any]) -> float:
    _, ours = (name for name in row["arms"] if name != "control")
    return float(row["arms"][ours]["median_us"])
