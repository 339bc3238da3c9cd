"""`moetail bench readme`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetail.cli.app import bench


@bench.command()
def readme(root: Annotated[Path, typer.Argument(help="the checkout")] = Path(".")) -> None:
    """Make the README's tables and picture anew from the committed records."""
    from moetail.bench import picture, tables

    path = root / "README.md"
    path.write_text(tables.with_tables(path.read_text(), root))
    picture.draw([root / "results" / name for name in PICTURED], root / "docs" / "step.svg")


PICTURED = ("forward-h200-deepseek-v3-width.json", "forward-cpu-glm4-moe-mini.json")
