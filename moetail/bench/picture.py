"""Pictures from records, as SVG: the README's step before and after, and the roofline of a kernels record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moetail.bench import record

REST, TAIL = "#8a99ad", "#d1495b"


def draw(records: list[Path], out: Path) -> None:
    """Two bars a case: the step's milliseconds, the tails' share (each tail measured alone, times the layers)."""
    pyplot = _pyplot()
    cases = [(content["machine"], row) for path in records for content in [record.read("record", path, "forward")]
             for row in content["rows"]]  # fmt: skip
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(8, 1.05 * len(cases) + 0.5), squeeze=False)
    for axis, (machine, row) in zip(axes[:, 0], cases, strict=True):
        _bars(axis, machine, row)
    axes[0, 0].legend(
        ["the rest of the step", "MoE tail"], loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
    )
    _save(pyplot, figure, out)


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


def roofline(content: dict[str, Any], out: Path) -> None:
    """Time against bytes for every shape of a `kernels` record, over what a copy of as many bytes takes."""
    pyplot = _pyplot()
    rows = [row for row in content["rows"] if row["mode"] == "chained"]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    names = [name for name in rows[0]["arms"] if name not in ("copy", "control")]
    for name in names:
        points = sorted((row["bytes"], row["arms"][name]["median_us"]) for row in rows if name in row["arms"])
        axis.plot(*zip(*points, strict=True), marker="o" if name.startswith("moetail") else ".", lw=0.8, label=name)
    copies = sorted((row["bytes"], row["arms"]["copy"]["median_us"]) for row in rows)
    axis.plot(*zip(*copies, strict=True), color="black", lw=2, ls="--", label="a copy of as many bytes")
    axis.set(xscale="log", yscale="log", xlabel="bytes moved at least", ylabel="us a call")
    axis.set_title(f"finalize on {content['machine']['gpu'] or content['machine']['cpu']}", loc="left")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    _save(pyplot, figure, out)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "moetail", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
