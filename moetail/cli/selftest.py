"""`moetail bench selftest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli import records, terminal
from moetail.cli.app import FAILED, INTERRUPTED, OK, SLOWER, bench
from moetail.cli.arguments import parse_device
from moetail.cli.terminal import fail, progress_bar


@bench.command()
def selftest(
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    rounds: Annotated[int, typer.Option(min=4, help="rounds a plant; one that is missed gets more")] = 24,
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
) -> None:
    """The gate tested: a slower producer, an A/A pair, a gain from nothing and one wrong bit must get their verdicts.

    Exit code: 0 where all are caught; 1 where one is not; 3 where a rank was lost. Under torchrun every rank runs it.
    """
    errors = Console(stderr=True)
    try:
        from moetail.bench import ranks as bench_ranks
        from moetail.bench import record, tables
        from moetail.bench import selftest as bench_selftest
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[transformers,bench,cpu]'")
    try:
        records.check_writable(json)
        with bench_ranks.join(parse_device(device)) as (ranks, target), progress_bar(errors, ranks.rank) as progress:
            task = progress.add_task("selftest", total=None)

            def show(plant: str, done: int, total: int) -> None:
                progress.update(task, description=plant, completed=done, total=total)

            outcomes = bench_selftest.run(target, ranks, rounds, show)
        caught = sum(outcome.caught for outcome in outcomes)
        if ranks.rank == 0:
            rows = [{**o.result.row(), "wanted": o.wanted, "caught": o.caught} for o in outcomes]
            records.write(json, record.record("selftest", rows, True, ranks.world_size))
            out = terminal.out()
            out.print(tables.selftest_table(rows))
            for row in rows:
                out.print(f"{row['case']}: {row['why']}", highlight=False, markup=False, soft_wrap=True)
            out.print(f"{caught} of {len(outcomes)} plants got their verdict", highlight=False)
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), FAILED)
    except KeyboardInterrupt:
        errors.print("interrupted", style="bold red")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(OK if caught == len(outcomes) else SLOWER)
