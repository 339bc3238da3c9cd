"""`moetail bench readme`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli.app import bench
from moetail.cli.terminal import fail


@bench.command()
def readme(root: Annotated[Path, typer.Argument(help="the checkout")] = Path(".")) -> None:
    """Make the README's tables and picture anew from the committed records.

    Exit code: 0; 2 where that is no checkout, or one of its records is none.
    """
    errors = Console(stderr=True)
    try:
        from moetail.bench import files, picture, tables
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[bench]'")
    path = root / "README.md"
    try:
        text = files.read_text("root", path, "a checkout with README.md, results and docs")
        made = tables.with_tables(text, root)
        picture.draw([root / "results" / name for name in PICTURED], root / "docs" / "step.svg")
        path.write_text(made)
    except (ValueError, OSError) as error:
        fail(errors, str(error))


PICTURED = ("forward-h200-deepseek-v3-width.json", "forward-cpu-glm4-moe-mini.json")
