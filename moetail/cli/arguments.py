"""From the text of an argument to its value. Raises: ValueError or OSError naming the argument."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def parse_shape(text: str) -> tuple[int, int, int]:
    T, K, H = numbers("shape", text, "T,K,H")
    return T, K, H


def numbers(name: str, text: str, form: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != len(form.split(",")) or not all(n.strip().isdigit() and int(n) > 0 for n in parts):
        raise ValueError(f"{name} must be {form}, numbers above 0, got {text!r}")
    return tuple(map(int, parts))


def parse_device(text: str | None) -> torch.device:
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if text.partition(":")[0] not in kinds:
        raise ValueError(f"device must be {' or '.join(kinds)} here, got {text!r}")
    return torch.device(text)


def check_writable(path: Path | None) -> None:
    """Before anything is measured. Raises: OSError."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def unfinished(path: Path | None, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to go on behind, for --resume. Raises: ValueError as `record.resume` does, or without a --json."""
    from moetail.bench import record

    if path is None:
        raise ValueError("resume must have the partial record's name in --json, got no --json")
    return record.resume(path, kind, settings)


def resume_hint(path: Path | None) -> str:
    return "" if path is None else f"; the same command with --resume goes on behind the partial {path}"


def readme_text() -> Path:
    """The default input text: this project's README, from a checkout or from the installed package's metadata."""
    checkout = Path(__file__).resolve().parent.parent.parent / "README.md"
    if checkout.exists():
        return checkout
    from importlib import metadata

    return Path(
        str(metadata.distribution("moetail").locate_file(f"moetail-{metadata.version('moetail')}.dist-info/METADATA"))
    )
