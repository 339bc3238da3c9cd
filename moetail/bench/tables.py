"""What a person reads: the rich table of a run, and a README's markdown tables, made from records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich.table import Table

_MARKED = re.compile(r"(<!-- table: (?P<files>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def forward_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line a case."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in ("case", "T", "stock ms", "moetail ms", "ratio [95 %]", "A/A", "bits", "peak MiB", "tail us x layers",
                   "arrives", "verdict"):  # fmt: skip
        table.add_column(column, justify="left" if column in ("case", "verdict") else "right", no_wrap=True)
    for row in rows:
        a, b = _arms(row)
        tail = row["tail"]
        table.add_row(
            row["case"], str(row["T"]), *(f"{row['arms'][arm]['median_us'] / 1e3:.3f}" for arm in (a, b)),
            _interval(row["ratio"]), _interval(row["aa"]), _bits(row),
            " -> ".join(f"{row['arms'][arm]['peak_bytes'] / 2**20:.1f}" for arm in (a, b)),
            f"{tail['stock']['median_us']:.0f} -> {tail['moetail']['median_us']:.0f} x {tail['layers']}",
            _arrives(row), row["verdict"],
        )  # fmt: skip
    return table


def markdown_table(records: list[dict[str, Any]]) -> str:
    """A README's table: every row of the records, losses included."""
    lines = [
        "| model | machine | case | tokens | stock ms | moetail ms | ratio [95 %] | differing bits | verdict |",
        "|---|---|---|---:|---:|---:|---|---:|---|",
    ]
    for content in records:
        machine = content["machine"]
        where = machine["gpu"] or f"{machine['threads']} CPU cores"
        for row in content["rows"]:
            a, b = (row["arms"][arm]["median_us"] / 1e3 for arm in _arms(row))
            lines.append(
                f"| {row['model']} | {where} | {row['case']} | {row['T']} | {a:.3f} | {b:.3f} "
                f"| {_interval(row['ratio'])} | {row['differing_bits']} | {row['verdict']} |"
            )
    stamps = sorted({f"{r['machine']['date']} at {r['machine']['commit']}" for r in records})
    return "\n".join(lines) + f"\n\nMeasured {', '.join(stamps)}.\n"


def with_tables(readme: str, root: Path) -> str:
    """The text with every block `<!-- table: FILE ... -->` to `<!-- end -->` made anew from its records."""

    def fill(match: re.Match[str]) -> str:
        records = [json.loads((root / name).read_text()) for name in match["files"].split()]
        return f"{match[1]}{markdown_table(records)}{match[3]}"

    return _MARKED.sub(fill, readme)


def _arms(row: dict[str, Any]) -> tuple[str, str]:
    a, b = (name for name in row["arms"] if name != "control")
    return a, b


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['b_over_a']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _bits(row: dict[str, Any]) -> str:
    return "0 differ" if row["differing_bits"] == 0 else f"{row['differing_bits']} DIFFER"


def _arrives(row: dict[str, Any]) -> str:
    """Blank where the ceiling is below what the control could tell from nothing."""
    tail, baseline = row["tail"], row["arms"][_arms(row)[0]]["median_us"]
    ceiling = (tail["stock"]["median_us"] - tail["moetail"]["median_us"]) * tail["layers"]
    noise = (row["aa"]["high"] - row["aa"]["low"]) * baseline
    return f"{row['arrives']:.0%}" if ceiling > noise else "-"
