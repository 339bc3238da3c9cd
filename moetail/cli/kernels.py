"""`moetail bench kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moetail.cli import records
from moetail.cli.app import INTERRUPTED, SLOWER, bench
from moetail.cli.arguments import parse_device, parse_shape
from moetail.cli.terminal import fail, progress_bar


@bench.command()
def kernels(
    shape: Annotated[list[str] | None, typer.Option(help="T,K,H; may be given more than once")] = None,
    mode: Annotated[str, typer.Option(help="chained, producer, or both: chained,producer")] = "chained",
    l2: Annotated[str, typer.Option(help="the L2 cache: cold, warm or a number of input sets; a list")] = "cold",
    rounds: Annotated[int, typer.Option(min=4)] = 20,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the roofline here")] = None,
    resume: Annotated[bool, typer.Option(help="go on with the partial record in --json")] = False,
) -> None:
    """The finalize kernel against the ones people use today: microseconds, bandwidth, bits.

    The record is written after each shape, marked partial until the last.
    Exit code: 0; 1 where our own bits fail (and then nothing is printed); 2 for bad input; 130 where interrupted.
    """

    errors = Console(stderr=True)
    try:
        from moetail.bench import kernels as bench_kernels
        from moetail.bench import picture, record, tables
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[bench,cpu]'")
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        target = parse_device(device)
        records.check_writable(json)
        records.check_writable(svg)
        shapes = [parse_shape(text) for text in shape] if shape else list(bench_kernels.DEFAULT)
        settings = {
            "shapes": [list(s) for s in shapes],
            "mode": mode,
            "l2": l2,
            "rounds": rounds,
            "device": str(target),
        }
        if resume:
            rows = records.unfinished(json, "kernels", settings)
        runs = [(one, how, state) for how in mode.split(",") for state in l2.split(",") for one in shapes]
        with progress_bar(errors) as progress:
            task = progress.add_task("kernels", total=len(runs))
            for done in range(len(rows), len(runs)):
                one, how, state = runs[done]
                progress.update(task, description=f"T,K,H={one} {how} {state}", completed=done)
                rows.append(bench_kernels.run_shape(*one, target, how, state, rounds).row())
                records.write(json, record.record("kernels", rows, done + 1 == len(runs), settings=settings))
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), SLOWER)
    except KeyboardInterrupt:
        interrupted = True
        errors.print(f"interrupted: {len(rows)} of {len(runs)} are below{records.resume_hint(json)}", style="bold red")
    if svg is not None and not interrupted:
        picture.roofline(record.record("kernels", rows, complete=True), svg)
    if not rows:
        raise typer.Exit(INTERRUPTED)
    Console(soft_wrap=True, width=None if Console().is_terminal else 240).print(tables.kernels_table(rows))
    if rows[0]["not_installed"]:
        errors.print(f"not installed here, so not compared: {', '.join(rows[0]['not_installed'])}", highlight=False)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
