"""`moetail bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli import terminal
from moetail.cli.app import SLOWER, bench
from moetail.cli.terminal import fail


@bench.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a record of bench forward or bench kernels")],
    b: Annotated[Path, typer.Argument(help="another one, the newer")],
) -> None:
    """Two records, case by case: each run's own ratios, and times where the machine is the same.

    Exit code: 0; 1 where a case of B is worse; 2 where the records cannot be compared.
    """
    from moetail.bench import compare as bench_compare
    from moetail.bench import record, tables

    errors, out = Console(stderr=True), terminal.out()
    try:
        found = bench_compare.compare(record.read("A", a), record.read("B", b))
    except ValueError as error:
        fail(errors, str(error))
    out.print(tables.comparison_table(found))
    if found.changed:
        out.print(f"not the same machine, so no times: {'; '.join(found.changed)}", highlight=False, soft_wrap=True)
    if found.only:
        out.print(f"not compared: {', '.join(found.only)}", highlight=False, soft_wrap=True)
    out.print(
        "The two runs were not interleaved: a ratio is each run's own, a difference of times may be the machine's."
    )
    if any(line.word == "worse" for line in found.lines):
        raise typer.Exit(SLOWER)
