"""The record of a long run: checked before, written after every row, gone on with later."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def check_writable(path: Path | None, name: str = "json") -> None:
    """Before anything is measured. Raises: ValueError where no file can be written at the path of the argument."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{name} must be a file to write, got the folder {path}")
    check_folder(path.parent, name, f"a file to write, got {path}")


def check_folder(folder: Path | None, name: str, what: str = "") -> None:
    """Makes the folder. Raises: ValueError where no file can be written into the folder of the argument."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = what or f"a folder to write into, got {folder}"
        raise ValueError(f"{name} must be {what} ({error.strerror or error})") from error


def unfinished(path: Path | None, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to go on behind, for --resume. Raises: ValueError as `record.resume` does, or without a --json."""
    from moetail.bench import record

    if path is None:
        raise ValueError("resume must have the partial record's name in --json, got no --json")
    return record.resume(path, kind, settings)


def resume_hint(path: Path | None) -> str:
    return "" if path is None else f"; the same command with --resume goes on behind the partial {path}"


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Nothing without a path. Raises: RuntimeError where the disk does not take it; the file is then the one before."""
    from moetail.bench import record

    if path is not None:
        try:
            record.write(path, content)
        except OSError as error:
            raise RuntimeError(
                f"the record {path} could not be written, the one before it is whole: {error}"
            ) from error
