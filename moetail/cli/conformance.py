"""`moetail conformance`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli import records, terminal
from moetail.cli.app import FAILED, SLOWER, app
from moetail.cli.arguments import parse_device
from moetail.cli.terminal import fail


@app.command()
def conformance(
    impl: Annotated[str, typer.Option(help="module:function, f(rows, row_map, weights, shared) -> [T, H]")],
    numerics: Annotated[list[str] | None, typer.Option(help="a preset to try; default: all")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
) -> None:
    """Which numerics a finalize implementation has, bit by bit, and what it cannot take.

    Exit code: 0 where it has one of the presets tried; 1 where it has none; 2 for bad input; 3 where the record could
    not be written.
    """
    from moetail import conformance as suite
    from moetail.bench import record, tables

    errors, out = Console(stderr=True), terminal.out()
    try:
        records.check_writable(json)
        report = suite.run(impl, suite.load(impl), str(parse_device(device)), tuple(numerics or ()))
        records.write(json, record.record("conformance", [report.row()], complete=True))
    except ValueError as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), FAILED)
    out.print(tables.conformance_table(report.row()))
    out.print(f"{impl}: {' and '.join(report.profiles) or 'none of the presets tried'}", highlight=False)
    if not report.profiles:
        raise typer.Exit(SLOWER)
