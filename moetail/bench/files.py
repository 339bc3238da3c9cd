"""The files that arguments name: read whole, or refused in one sentence that names the argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_bytes(name: str, path: Path, what: str) -> bytes:
    """The file that the argument `name` gives, which must be `what`. Raises: ValueError saying why it is not."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise not_a(name, path, what, error.strerror or str(error)) from error


def read_text(name: str, path: Path, what: str) -> str:
    """UTF-8. Raises: ValueError as `read_bytes` does, and where it is no text."""
    try:
        return read_bytes(name, path, what).decode()
    except UnicodeDecodeError as error:
        raise not_a(name, path, what, f"it is no UTF-8 text: byte {error.start} is {error.reason}") from error


def read_json(name: str, path: Path, what: str) -> Any:
    """Raises: ValueError as `read_text` does, and where it is no JSON."""
    try:
        return json.loads(read_text(name, path, what))
    except json.JSONDecodeError as error:
        raise not_a(name, path, what, f"it is no JSON: {error}") from error


def not_a(name: str, path: Path, what: str, why: str) -> ValueError:
    """The error to raise."""
    return ValueError(f"{name} must be {what}, got {path} ({why})")
