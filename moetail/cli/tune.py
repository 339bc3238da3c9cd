"""`moetail tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moetail.cli.app import app
from moetail.cli.arguments import numbers
from moetail.cli.terminal import fail, progress_bar


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="the op to tune: finalize")],
    out: Annotated[Path, typer.Option(help="the config file to write")],
    shape: Annotated[list[str] | None, typer.Option(help="K,H; may be given more than once")] = None,
) -> None:
    """Measure a kernel's configs on this GPU and write those that beat its heuristic; Ctrl-C keeps what it has."""
    import torch

    errors = Console(stderr=True)
    if op != "finalize":
        fail(errors, f"op must be finalize, got {op!r}")
    if not torch.cuda.is_available():
        fail(errors, "tune needs a CUDA GPU, got none: the CPU kernel has nothing to tune")
    from moetail import tuning
    from moetail.bench import kernels as bench_kernels
    from moetail.bench import record
    from moetail.bench import tune as bench_tune

    try:
        shapes = [numbers("shape", text, "K,H") for text in shape] if shape else list(bench_kernels.SHAPES)
    except ValueError as error:
        fail(errors, str(error))
    entries: list[dict[str, Any]] = []
    with progress_bar(errors) as progress:
        task = progress.add_task("tune", total=None)
        try:
            for K, H in shapes:

                def show(done: int, total: int, note: str, name: str = f"K={K} H={H}") -> None:
                    progress.update(task, description=name, completed=done, total=total)
                    progress.print(f"{name} {note}", highlight=False)

                entries.append(bench_tune.tune_shape(K, H, torch.device("cuda", 0), show))
        except KeyboardInterrupt:
            errors.print(f"interrupted: {len(entries)} of {len(shapes)} shapes are kept", style="bold red")
    record.write(out, {"schema": tuning.SCHEMA, "machine": record.machine(), "entries": entries})
