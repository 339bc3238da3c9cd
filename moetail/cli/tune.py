"""`moetail tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moetail.cli import records
from moetail.cli.app import INTERRUPTED, app
from moetail.cli.arguments import model_facts, numbers
from moetail.cli.terminal import fail, progress_bar

if TYPE_CHECKING:
    from moetail.coverage import Launch


@app.command()
def tune(
    out: Annotated[Path, typer.Option(help="the config file of this GPU; its entries of other shapes stay")],
    op: Annotated[str | None, typer.Argument(help="one op; default: all that --model launches")] = None,
    model: Annotated[str | None, typer.Option(help="as `moetail coverage`: tune what it launches")] = None,
    tp: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks, with --model")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="the largest call")] = 8192,
    shared_slots: Annotated[
        int, typer.Option(min=0, help="shared experts that are slots of the experts, with --model")
    ] = 0,
    shape: Annotated[
        list[str] | None, typer.Option(help="finalize: K,H; grouped_gemm: E,K,H,I of this rank; may be repeated")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(min=1, help="seconds after which nothing new is begun")] = None,
    stale: Annotated[
        bool, typer.Option(help="what --out has of another kernel or Triton, or was not reached, and nothing else")
    ] = False,
    resume: Annotated[bool, typer.Option(help="do not measure again what --out has of these shapes")] = False,
) -> None:
    """Measure the configs of kernels on this GPU and write, for each shape and number of tokens, the heuristic's or one
    that beats it by 3 %.

    The most important come first: the grouped GEMMs at 8, 1, 16, 64, 4096 and 8192 tokens. The file is written after
    each measurement and says what is missing; Ctrl-C and the time limit keep it, --resume goes on behind it. One file
    holds a GPU: entries of shapes that this run does not measure stay in it.
    --stale measures again what a new kernel or Triton made useless.
    Used are the files in the package's `configs` folder and in MOETAIL_CONFIGS.
    Exit code: 0, also at the time limit; 2 for bad input; 130 where interrupted.
    """
    import torch

    errors = Console(stderr=True)
    try:
        from moetail import coverage

        if op is not None and op not in (*coverage.FORMS, "route"):
            raise ValueError(f"op must be one of {', '.join(coverage.FORMS)}, route, got {op!r}")
        if stale and (op or model or shape):
            raise ValueError(f"stale must be without an op, --model and --shape, got {op or model or shape}")
        launches = () if stale else _launches(op, model, tp, max_tokens, shared_slots, shape)
        if not torch.cuda.is_available():
            raise ValueError("tune needs a CUDA GPU, got none: the CPU kernel has nothing to tune")
        from moetail.bench import timing
        from moetail.bench import tune as bench_tune

        if stale:
            resume = True  # an entry that a run was interrupted in
            launches = tuple(bench_tune.stale_launches(out, torch.cuda.get_device_name(0)))
            if not launches:
                errors.print(f"{out}: nothing of this GPU is stale", highlight=False, soft_wrap=True)
        records.check_writable(out, "out")
        jobs = bench_tune.jobs(launches)
        with progress_bar(errors) as progress:
            task = progress.add_task("tune", total=len(jobs))

            def show(done: int, note: str) -> None:
                progress.update(task, completed=done)
                if note:
                    progress.print(note, highlight=False, markup=False)

            left = bench_tune.tune(jobs, torch.device("cuda", 0), out, resume, timing.within(time_limit), show)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail(errors, str(error))
    except KeyboardInterrupt:
        errors.print(f"interrupted: {out} has what was measured; {_again(stale)} goes on behind it", style="bold red")
        raise typer.Exit(INTERRUPTED) from None
    if left:
        errors.print(f"{len(left)} of {len(jobs)} were not reached in {time_limit:g} s; {_again(stale)} goes on",
                     style="bold")  # fmt: skip


def _again(stale: bool) -> str:
    return "the same command" if stale else "--resume"


def _launches(
    op: str | None, model: str | None, tp: int, max_tokens: int, shared_slots: int, shape: list[str] | None
) -> tuple[Launch, ...]:
    """Raises: ValueError where it is not clear what to tune."""
    from moetail import coverage

    if model is not None:
        if shape:
            raise ValueError(f"shape must be left out with --model, got {shape[0]!r}")
        found = coverage.launches(model_facts(model).with_shared_slots(shared_slots), tp, max_tokens)
        return tuple(one for one in found if op in (None, one.shape.op))
    if op is None:
        raise ValueError("op must be named where there is no --model, got neither")
    if op not in coverage.FORMS:
        raise ValueError(f"model must be given to tune {op}, which no --shape describes, got no --model")
    if not shape:
        raise ValueError(f"shape must be {coverage.FORMS[op]} where there is no --model, got none")
    sizes = [numbers("shape", text, coverage.FORMS[op]) for text in shape]
    return tuple(one for each in sizes for one in coverage.launches_of(op, each, max_tokens))
