"""What a person reads: the rich table of a run, and a README's markdown tables, made from records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from moetail.bench import record, stats
from moetail.bench.compare import Comparison

# What of an op is its definition in torch on a CPU, and no kernel.
_DEFINED_ON_CPU = {
    "finalize_mhc": "the hyper-connection behind finalize", "finalize_norm_fp8": "the quantizing behind the norm",
    "route": "route", "permute": "permute", "grouped_gemm": "grouped_gemm",
    "experts": "permute and grouped_gemm", "fused_experts": "permute and grouped_gemm",
    "moe_block": "route, permute and grouped_gemm",
}  # fmt: skip
_VLLM = "vllm fused_experts"
_MARKED = re.compile(r"(<!-- (?P<kind>table|kernels): (?P<files>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def forward_table(rows: list[dict[str, Any]], title: str) -> Table:
    """One line a case."""
    a, b = _arms(rows[0]) if rows else ("stock", "moetail")
    table = Table(title=title, title_justify="left")
    for column in ("case", "T", f"{a} ms", f"{b} ms", "ratio [95 %]", "bits", "verdict"):
        table.add_column(column, justify="left" if column in ("case", "verdict") else "right")
    for row in rows:
        times = (f"{row['arms'][arm]['median_us'] / 1e3:.3f}" for arm in _arms(row))
        table.add_row(escape(row["case"]), str(row["T"]), *times, _interval(row["ratio"]), _bits(row), row["verdict"])
    return table


def forward_details(row: dict[str, Any]) -> str:
    """What stands behind a case's line: why the verdict, the control, memory, kernels, and the tails measured alone."""
    a, b = _arms(row)
    peaks = [row["arms"][arm]["peak_bytes"] for arm in (a, b)]
    memory = "" if None in peaks else f"; peak memory {' -> '.join(f'{peak / 2**20:.1f}' for peak in peaks)} MiB"
    counts = [row["arms"][arm].get("kernels") for arm in (a, b)]
    kernels = "" if None in counts else f", kernels a step {counts[0]} -> {counts[1]}"
    throttled = [when for when, state in row.get("machine_state", {}).items() if state.get("throttled")]
    hot = f" The GPU was throttled {' and '.join(throttled)} the case." if throttled else ""
    hot += f" It rested {row['rest_us'] / 1e3:.1f} ms before each replay." if row.get("rest_us") else ""
    return (
        f"{row['case']}: {row['verdict']}; {row['why']}. {row['rounds']} rounds; {row['differing_bits']} bits differ "
        f"in the outputs{memory}{kernels}.{hot}\n  {_tail_details(row, a, b)}"
    )


def _tail_details(row: dict[str, Any], a: str, b: str) -> str:
    if row["tail"] is None:
        return "This model measures no tail alone: what can be gained is not known, and was not checked."
    tail = {name: value["median_us"] for name, value in row["tail"].items() if name != "layers"}
    masks = f", masks {tail['masks']:.0f} -> 0 us" if "masks" in tail else ""
    noise_us = (row["aa"]["high"] - row["aa"]["low"]) * row["arms"][a]["median_us"]
    arrives = (
        f"{row['arrives']:.0%} of it arrived" if row["ceiling_us"] > noise_us else "less than this run can resolve"
    )
    return (
        f"One layer alone: tail {tail[a]:.0f} -> {tail[b]:.0f} us{masks}; "
        f"over {row['tail']['layers']} layers {row['ceiling_us'] / 1e3:.2f} ms can be gained, {arrives}."
    )


def selftest_table(rows: list[dict[str, Any]]) -> Table:
    """One line a plant: what the gate must say of it, and what it said."""
    table = Table(title="the gate on arms whose truth is known", title_justify="left")
    for column in ("plant", "baseline ms", "planted ms", "ratio [95 %]", "wanted", "got"):
        table.add_column(column, justify="right" if column.endswith("ms") else "left")
    for row in rows:
        times = (f"{row['arms'][arm]['median_us'] / 1e3:.3f}" for arm in _arms(row))
        got = row["verdict"] if row["caught"] else f"{row['verdict']} (MISSED)"
        table.add_row(row["case"], *times, _interval(row["ratio"]), row["wanted"], got)
    return table


def comparison_table(found: Comparison) -> Table:
    """One line a case: both runs' ratios and verdicts, and which is better."""
    table = Table(title="ours / baseline in A and in B", title_justify="left")
    for column in ("case", "A [95 %]", "B [95 %]", "verdicts", "ours ms", "B is"):
        table.add_column(column)
    for line in found.lines:
        ratios = (f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in line.ratio)
        verdicts = " -> ".join(line.verdicts) if any(line.verdicts) else "-"
        times = "-" if line.ours_ms is None else f"{line.ours_ms[0]:.4g} -> {line.ours_ms[1]:.4g}"
        table.add_row(escape(line.case), *ratios, verdicts, times, line.word)
    return table


def kernels_table(rows: list[dict[str, Any]]) -> Table:
    """One line a shape: ours, and how many times longer each baseline takes than ours of the same numerics."""
    baselines = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    table = Table(title=f"{rows[0]['op']}, us a call; baselines as a multiple of ours", title_justify="left",
                  caption=_on_cpu(rows[0]), caption_justify="left")  # fmt: skip
    parts = any(row.get("over_part_us") is not None for row in rows)
    over = ("over its first part, us",) if parts else ()
    for column in ("T", "K", "H", "mode", "L2", "us", *over, "p90", "bandwidth", "of copy", "A/A", *baselines):
        table.add_column(column, justify="left" if column in ("mode", "L2") else "right")
    for row in rows:
        us = row["arms"]["moetail TRTLLM"]
        table.add_row(
            *(str(row[name]) for name in ("T", "K", "H", "mode", "l2")),
            f"{row['us']:.2f}", *((f"{row['over_part_us']:+.2f}",) if parts else ()), f"{us['p90_us']:.2f}",
            rate(row["tb_per_s"], "B/s"),
            "-" if row["share_of_copy"] is None else f"{row['share_of_copy']:.0%}", f"{row['aa']['b_over_a']:.3f}",
            *(_multiple(row, name) for name in baselines),
        )  # fmt: skip
    return table


def block_table(rows: list[dict[str, Any]]) -> Table:
    """One line a case: ours, its share of the floor, and how many times longer each baseline takes."""
    baselines = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    first = rows[0]
    title = (
        f"{first['op']}, us a call; the floor: bytes at the copy's {rate(first['copy_tb_per_s'], 'B/s')} or FLOPs at "
        f"the matmul's {rate(first['matmul_tflop_per_s'], 'FLOP/s')}; baselines as a multiple of ours"
    )
    table = Table(title=title, title_justify="left", caption=_on_cpu(first), caption_justify="left")
    for column in ("case", "us", "p90", "bandwidth", "of copy", "FLOPs", "of floor", "bound", "A/A", *baselines):
        table.add_column(column, justify="left" if column in ("case", "bound") else "right")
    for row in rows:
        table.add_row(
            row["case"], f"{row['us']:.2f}", f"{row['arms']['moetail']['p90_us']:.2f}", rate(row["tb_per_s"], "B/s"),
            f"{row['share_of_copy']:.0%}", rate(row["tflop_per_s"], "FLOP/s"), f"{row['share_of_floor']:.0%}",
            row["bound_by"],
            f"{row['aa']['b_over_a']:.3f}", *(_multiple(row, name) for name in baselines),
        )  # fmt: skip
    return table


def rate(tera: float | None, unit: str) -> str:
    """ "4.31 TB/s", "950 GB/s", "0.0123 GFLOP/s": tera from 1 on, giga below; "-" where there is none."""
    if not tera:
        return "-"
    value, prefix = (tera, "T") if tera >= 0.9995 else (tera * 1e3, "G")
    return f"{value:.3g} {prefix}{unit}" if value < 999.5 else f"{value:.0f} {prefix}{unit}"


def _on_cpu(row: dict[str, Any]) -> str | None:
    part = _DEFINED_ON_CPU.get(row["op"]) if row.get("device") == "cpu" else None
    if part is None:
        return None
    return f"On a CPU no kernel of ours runs for {part}, but the definition in torch: it says nothing of a GPU's times."


def _multiple(row: dict[str, Any], name: str) -> str:
    ratio = row["ratios"].get(name)
    if ratio is None:
        return "-"
    same = "" if row["arms"][name].get("bits") != "differs" else " !"
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]{same}"


def conformance_table(row: dict[str, Any]) -> Table:
    """One line a case, one column a preset."""
    presets = list(next(iter(row["outcome"].values())))
    table = Table(title=f"{row['implementation']} on {row['device']}", title_justify="left")
    table.add_column("case")
    for preset in presets:
        table.add_column(preset)
    for case, outcome in row["outcome"].items():
        table.add_row(case, *(outcome[preset].partition(":")[0] for preset in presets))
    return table


def markdown_table(records: list[dict[str, Any]]) -> str:
    """A README's table: every row of the records, losses included. Of `bench forward`, `bench serve` (vLLM) and
    `bench kernels --op fused_experts` (before: vLLM's)."""
    lines = [
        "| model | machine | case | tokens | before ms | after ms | ratio [95 %] | differing bits | verdict |",
        "|---|---|---|---:|---:|---:|---|---:|---|",
    ]
    lines += ["| " + " | ".join(line) + " |" for content in records for line in _steps(content)]
    return "\n".join(lines) + f"\n\nMeasured {_stamps(records)}.\n"


def _steps(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    machine, asked = content["machine"], content.get("settings", {})
    where = machine["gpu"] or f"{machine['threads']} CPU cores"
    for row in content["rows"]:
        if content["kind"] == "kernels":
            if _VLLM not in row["ratios"]:
                continue
            model, case, arms, differing = f"experts of E={row['E']} K={row['K']}", row["op"], (_VLLM, "moetail"), "-"
            ratio = _inverse(row["ratios"][_VLLM])
            aa = stats.Interval(row["aa"]["b_over_a"], row["aa"]["low"], row["aa"]["high"])
            verdict = stats.judge(stats.Interval(*ratio.values()), aa, 0).word
        elif "ratio" not in row:  # the tokens of `bench serve`
            continue
        else:
            model = row.get("model") or f"vLLM, {asked['model']}, {asked['layers']} layers"
            case, ratio, differing, verdict = row["case"], row["ratio"], str(row["differing_bits"]), row["verdict"]
            arms = _arms(row)
        a, b = (f"{row['arms'][arm]['median_us'] / 1e3:.3f}" for arm in arms)
        yield model, where, case, str(row["T"]), a, b, _interval(ratio), differing, verdict


def _inverse(ratio: dict[str, float]) -> dict[str, float]:
    """Ours over the baseline, of the baseline over ours."""
    return {"b_over_a": 1 / ratio["value"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}


def kernels_markdown(records: list[dict[str, Any]]) -> str:
    """A README's table of baselines: the smallest ratio of every one first, with where it was."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for row in (row for content in records for row in content["rows"]):
        where = f"T={row['T']} K={row['K']} H={row['H']} {row['mode']}, {row['l2']} L2"
        for name, ratio in row["ratios"].items():
            ratios.setdefault(name, []).append((ratio["value"], where))
    lines = ["| baseline | times ours, at least | there | at most | there |", "|---|---:|---|---:|---|"]
    for name, found in sorted(ratios.items(), key=lambda item: min(item[1])):
        (low, low_at), (high, high_at) = min(found), max(found)
        lines.append(f"| {name} | {low:.2f} | {low_at} | {high:.2f} | {high_at} |")
    gpus = sorted({content["machine"]["gpu"] for content in records})
    return "\n".join(lines) + f"\n\nOn {', '.join(gpus)}, {_stamps(records)}.\n"


def _stamps(records: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({f"{r['machine']['date']} at {r['machine']['commit']}" for r in records}))


def with_tables(readme: str, root: Path) -> str:
    """The text with every block `<!-- table: FILE ... -->` (steps) or `<!-- kernels: FILE ... -->`, to
    `<!-- end -->`, made anew from its records. Raises: ValueError where one of them is none."""

    def fill(match: re.Match[str]) -> str:
        steps = match["kind"] == "table"
        kinds = ("forward", "serve", "kernels") if steps else ("kernels",)
        records = [record.read(f"{match['kind']} of README.md", root / n, *kinds) for n in match["files"].split()]
        table = markdown_table(records) if steps else kernels_markdown(records)
        return f"{match[1]}{table}{match[4]}"

    return _MARKED.sub(fill, readme)


def _arms(row: dict[str, Any]) -> tuple[str, str]:
    a, b = (name for name in row["arms"] if name not in ("control", "repeat"))
    return a, b


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['b_over_a']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _bits(row: dict[str, Any]) -> str:
    return "0 differ" if row["differing_bits"] == 0 else f"{row['differing_bits']} DIFFER"
