"""The README's picture: a model's step before and after, to scale, and the part of it that is the MoE tail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REST, TAIL = "#8a99ad", "#d1495b"


def draw(records: list[Path], out: Path) -> None:
    """Two bars a case: the step's milliseconds, the tails' share (each tail measured alone, times the layers)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "moetail", "font.size": 9})
    from matplotlib import pyplot

    cases = [(content["machine"], row) for path in records for content in [json.loads(path.read_text())]
             for row in content["rows"]]  # fmt: skip
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(8, 1.05 * len(cases) + 0.5), squeeze=False)
    for axis, (machine, row) in zip(axes[:, 0], cases, strict=True):
        _bars(axis, machine, row)
    axes[0, 0].legend(
        ["the rest of the step", "MoE tail"], loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
    )
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _bars(axis: Any, machine: dict[str, Any], row: dict[str, Any]) -> None:
    for y, arm in enumerate(("moetail", "stock")):
        step = row["arms"][arm]["median_us"] / 1e3
        tail = row["tail"][arm]["median_us"] * row["tail"]["layers"] / 1e3
        axis.barh(y, step - tail, color=REST, height=0.7)
        axis.barh(y, tail, left=step - tail, color=TAIL, height=0.7)
        axis.text(step, y, f" {step:.2f} ms", va="center")
    axis.set_yticks([0, 1], ["moetail", "stock"])
    axis.set_xlim(0, row["arms"]["stock"]["median_us"] / 1e3 * 1.18)
    axis.set_xticks([])
    where = machine["gpu"] or f"{machine['threads']} CPU cores"
    axis.set_title(f"{row['model']}, {row['case']} ({row['T']} tokens), {where}", loc="left", fontsize=9)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
