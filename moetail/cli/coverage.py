"""`moetail coverage`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from moetail.cli.app import SLOWER, app
from moetail.cli.arguments import model_facts
from moetail.cli.terminal import fail

if TYPE_CHECKING:
    from moetail.coverage import Covered
    from moetail.tuning import Segment

_STYLES = {"exact": "green", "bucket": "green", "heuristic": "yellow", "stale": "red"}


@app.command()
def coverage(
    model: Annotated[str, typer.Argument(help="deepseek-v4.1-flash, a built-in model, a config.json or its folder")],
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="the largest call")] = 8192,
    gpu: Annotated[
        str | None, typer.Option(help="part of a GPU's name, as in a config file; default: this one")
    ] = None,
    allow: Annotated[str, typer.Option(help="what is no failure: heuristic, stale; a list")] = "",
    shared_slots: Annotated[int, typer.Option(min=0, help="shared experts that are slots of the experts")] = 0,
) -> None:
    """Every kernel of moetail's that the model's MoE layers can launch, and mHC's between them, and whether this GPU's
    tuned configs cover it.

    exact: measured at that number of tokens. bucket: it lies in an interval that was. heuristic: not tuned. stale:
    tuned with another kernel or Triton, and not used. fixed: nothing of it is tuned. No GPU is needed where --gpu
    names one of the config files; Triton is then the one that the file was tuned with.
    Exit code: 0; 1 where anything is heuristic or stale that --allow does not name; 2 for bad input.
    """
    import torch

    errors, out = Console(stderr=True), Console(soft_wrap=True, width=None if Console().is_terminal else 240)
    try:
        from moetail import coverage as covering
        from moetail import tuning

        allowed = {word for word in allow.split(",") if word}
        if not allowed <= {"heuristic", "stale"}:
            raise ValueError(f"allow must be a list of heuristic, stale, got {allow!r}")
        if gpu is None and not torch.cuda.is_available():
            raise ValueError("gpu must name a GPU of the config files where there is none here, got no --gpu")
        here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        if gpu is None or (here and gpu.lower() in here.lower()):
            name, triton = here, tuning.triton_version()
        else:
            name, triton = tuning.gpu_named(gpu)
        launches = covering.launches(model_facts(model).with_shared_slots(shared_slots), tp, max_tokens)
        covered = covering.coverage(launches, name, triton)
    except (ValueError, ModuleNotFoundError) as error:
        fail(errors, str(error))
    out.print(_table(covered))
    counts = {how: sum(one.tokens(how) for one in covered) for how in reversed(tuning.HOW)}
    total = sum(counts.values())
    shares = ", ".join(f"{how} {count / total:.1%}" for how, count in counts.items())
    slots = f" --shared-slots {shared_slots}" if shared_slots else ""
    call = f"{shlex.quote(model)} --tp {tp} --max-tokens {max_tokens}{slots}"
    out.print(f"{call}, on {name}, Triton {triton}. Of every tuned op at every number of tokens: {shares}.",
              highlight=False)  # fmt: skip
    if any(counts[how] for how in ("heuristic", "stale") if how not in allowed):
        errors.print(
            f"not covered: on that GPU, moetail tune --model {call} --out FOLDER/gpu.json measures it; "
            "MOETAIL_CONFIGS names the folder",
            style="bold red", highlight=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(SLOWER)


def _table(covered: tuple[Covered, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("op", "left"), ("tokens", "right"), ("covered", "left"), ("why", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    before = False
    for one in covered:
        if one.launch.later and not before:
            table.add_row("[bold]the drafter's alone:[/]")
        before = one.launch.later
        name = str(one.launch.shape)
        if not one.launch.tunable:
            table.add_row(name, f"{one.launch.min_T}-{one.launch.max_T}", "fixed", "nothing to tune")
        for first, last, how, why in _joined(one.segments):
            table.add_row(name, f"{first}-{last}", f"[{_STYLES[how]}]{how}[/]", why)
            name = ""
    return table


def _joined(segments: tuple[Segment, ...]) -> list[tuple[int, int, str, str]]:
    """(first, last, how, why): exact and bucket side by side are one row, which names where was measured."""
    rows: list[tuple[int, int, str, str]] = []
    for part in segments:
        how, why = part.answer.how, part.answer.why
        tuned = how in ("exact", "bucket")
        if rows and rows[-1][2] in ("exact", "bucket") and tuned:
            first, _, before, said = rows[-1]
            at = why.removeprefix("measured at ")
            said = said if said.endswith(f" {at}") else f"{said}, {at}"
            rows[-1] = (first, part.max_T, how if how == before else "bucket", said)
        else:
            rows.append((part.min_T, part.max_T, how, why))
    return rows
