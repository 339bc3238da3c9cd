"""What a command says while it runs, and how it gives up: on stderr."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from moetail.cli.app import USAGE


def fail(errors: Console, sentence: str, code: int = USAGE) -> NoReturn:
    errors.print(f"moetail: {sentence}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)


def out() -> Console:
    """Stdout; a pipe has no width, and gets names and tables whole."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=240)


def show(progress: Progress, task: TaskID, name: str, done: int, total: int) -> None:
    progress.update(task, description=name, completed=done, total=total)


def progress_bar(console: Console, rank: int = 0) -> Progress:
    """Shown on stderr while it lasts, and gone afterwards; on rank 0 only."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=rank != 0,
    )  # fmt: skip
