"""`moetail bench kernels`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moetail.cli import records, terminal
from moetail.cli.app import INTERRUPTED, SLOWER, bench
from moetail.cli.arguments import parse_device, parse_shape
from moetail.cli.terminal import fail, progress_bar

if TYPE_CHECKING:
    import torch


@bench.command()
def kernels(
    op: Annotated[
        str,
        typer.Option(
            help="finalize, finalize_norm, finalize_norm_fp8, finalize_mhc, finalize_all_reduce, route, permute, "
            "grouped_gemm, experts, fused_experts, moe_block"
        ),
    ] = "finalize",
    shape: Annotated[
        list[str] | None, typer.Option(help="T,K,H; from route on: T, or T,E,K,H,I; may be given more than once")
    ] = None,
    mode: Annotated[str, typer.Option(help="chained, producer, or both: chained,producer")] = "chained",
    l2: Annotated[str, typer.Option(help="the L2 cache: cold, warm or a number of input sets; a list")] = "cold",
    ranks: Annotated[int | None, typer.Option(help="finalize_all_reduce: so many virtual ranks")] = None,
    rounds: Annotated[int, typer.Option(min=4)] = 20,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the roofline here")] = None,
    resume: Annotated[bool, typer.Option(help="go on with the partial record in --json")] = False,
) -> None:
    """The tail's kernels against the ones people use today: microseconds, bandwidth, bits.

    The record is written after each shape, marked partial until the last.
    Exit code: 0; 1 where our own bits fail (and then nothing is printed); 2 for bad input; 130 where interrupted.
    """

    errors = Console(stderr=True)
    try:
        from moetail.bench import block, collectives, models, picture, record, tables
        from moetail.bench import kernels as bench_kernels
        from moetail.bench import ranks as bench_ranks
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[bench,cpu]'")
    rows: list[dict[str, Any]] = []
    runs: dict[str, Callable[[], dict[str, Any]]] = {}
    interrupted = False
    settings = {"op": op, "shape": shape, "mode": mode, "l2": l2, "ranks": ranks, "rounds": rounds}
    try:
        records.check_writable(json)
        records.check_writable(svg, "svg")
        _check_options(op, mode, l2, ranks, svg)
        shapes = [] if op in block.DEFAULTS else [parse_shape(text) for text in shape or ()]
        with bench_ranks.join(parse_device(device)) as (group, target), progress_bar(errors, group.rank) as progress:
            if op in bench_kernels.OPS:
                runs = _one_rank_runs(op, shapes or list(bench_kernels.DEFAULT), target, mode, l2, rounds)
            elif op in block.DEFAULTS:
                runs = block.runs(op, [block.parse(op, text) for text in shape or ()], target, rounds)
            elif op == "finalize_all_reduce":
                collectives.check_ranks(ranks, group, target)
                runs = {
                    str(one): functools.partial(collectives.run_shape, *one, target, group, ranks, rounds)
                    for one in shapes or collectives.DEFAULT
                }
            else:
                known = ", ".join((*bench_kernels.OPS, "finalize_all_reduce", *block.DEFAULTS))
                raise ValueError(f"op must be one of {known}, got {op!r}")
            if resume:
                rows = records.unfinished(json, "kernels", settings)
            task = progress.add_task("kernels", total=len(runs))
            for done, (name, measure) in list(enumerate(runs.items()))[len(rows) :]:
                progress.update(task, description=name, completed=done)
                with models.fits_in_memory(f"shape {name}"):
                    rows.append(measure())
                content = record.record("kernels", rows, done + 1 == len(runs), group.world_size, settings)
                if group.rank == 0:
                    records.write(json, content)
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), SLOWER)
    except KeyboardInterrupt:
        interrupted = True
        errors.print(f"interrupted: {len(rows)} of {len(runs)} are below{records.resume_hint(json)}", style="bold red")
    if svg is not None and not interrupted and op in bench_kernels.OPS:
        picture.roofline(record.record("kernels", rows, complete=True), svg)
    if not rows:
        raise typer.Exit(INTERRUPTED)
    if group.rank != 0:
        return
    table = tables.block_table if op in block.DEFAULTS else tables.kernels_table
    terminal.out().print(table(rows))
    if rows[0]["not_installed"]:
        errors.print(f"not installed here, so not compared: {', '.join(rows[0]['not_installed'])}", highlight=False)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check_options(op: str, mode: str, l2: str, ranks: int | None, svg: Path | None) -> None:
    """Raises: ValueError for an option that this op would not look at."""
    from moetail.bench import kernels as bench_kernels

    one_rank = op in bench_kernels.OPS
    for name, value, unasked, of_op in (
        ("mode", mode, "chained", one_rank), ("l2", l2, "cold", one_rank), ("svg", svg, None, one_rank),
        ("ranks", ranks, None, op == "finalize_all_reduce"),
    ):  # fmt: skip
        if not of_op and value != unasked:
            raise ValueError(f"{name} must be left out with --op {op}, got {value}")
    if svg is not None and "chained" not in mode.split(","):
        raise ValueError(f"svg must be left out where no mode is chained, got {svg}")


def _one_rank_runs(
    op: str, shapes: list[tuple[int, int, int]], device: torch.device, mode: str, l2: str, rounds: int
) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to measure, by what the progress bar says of it."""
    from moetail.bench import kernels as bench_kernels

    modes, states = mode.split(","), l2.split(",")
    for how, state, one in itertools.product(modes, states, shapes):
        bench_kernels.check(*one, device, how, state)

    def measure(one: tuple[int, int, int], how: str, state: str) -> dict[str, Any]:
        return bench_kernels.run_shape(*one, device, how, state, rounds, op).row()

    return {
        f"T,K,H={one} {how} {state}": functools.partial(measure, one, how, state)
        for how in modes
        for state in states
        for one in shapes
    }
