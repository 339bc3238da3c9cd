"""`moetail profile show` and `moetail profile diff`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moetail.cli.app import app
from moetail.cli.terminal import fail

if TYPE_CHECKING:
    from rich.table import Table

profile = typer.Typer(no_args_is_help=True, help="Read what `bench forward --profile-dir` wrote: a forward's kernels.")
app.add_typer(profile, name="profile")

_Top = Annotated[int, typer.Option(min=1, help="how many kernels")]


@profile.command()
def show(file: Annotated[Path, typer.Argument(help="a .kernels.json")], top: _Top = 20) -> None:
    """A forward's longest kernels."""
    from moetail.bench import profile_diff

    try:
        one = profile_diff.read("file", file)
    except ValueError as error:
        fail(Console(stderr=True), str(error))
    _print(profile_diff.show_header(one), profile_diff.show_table(one, top))


@profile.command()
def diff(
    a: Annotated[Path, typer.Argument(help="a .kernels.json, ours or vLLM's")],
    b: Annotated[Path, typer.Argument(help="another one")],
    top: _Top = 20,
) -> None:
    """Which kernels take longer or shorter in B than in A, the largest difference first."""
    from moetail.bench import profile_diff

    try:
        one, other = profile_diff.read("A", a), profile_diff.read("B", b)
    except ValueError as error:
        fail(Console(stderr=True), str(error))
    _print(profile_diff.diff_header(one, other), profile_diff.diff_table(one, other, top))


def _print(header: str, table: Table) -> None:
    out = Console()
    if not out.is_terminal:  # a pipe has no width, and gets whole names and no frame
        table.box = None
        out = Console(width=10_000)
    out.print(header, highlight=False, soft_wrap=True)
    out.print(table)
