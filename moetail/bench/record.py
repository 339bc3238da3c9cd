"""The JSON record that every bench can write, and the machine it names. Written by the bench, never by hand."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from moetail.bench import files

SCHEMA = 1


def record(
    kind: str,
    rows: list[dict[str, Any]],
    complete: bool,
    world_size: int = 1,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """kind: kernels | forward | serve | selftest | conformance. `complete` is False while rows are missing. `settings`:
    what was asked for; a run that goes on must ask for the same."""
    return {
        "schema": SCHEMA, "kind": kind, "machine": machine(), "world_size": world_size, "complete": complete,
        "settings": settings or {}, "rows": rows,
    }  # fmt: skip


def read(name: str, path: Path, *kinds: str) -> dict[str, Any]:
    """The record that the argument `name` gives. Raises: ValueError where it is none, or of none of these kinds."""
    what = f"a record of kind {' or '.join(kinds)} that a bench wrote" if kinds else "a record that a bench wrote"
    content = files.read_json(name, path, what)
    if not isinstance(content, dict):
        raise files.not_a(name, path, what, f"it is a {type(content).__name__}")
    types = {"schema": int, "kind": str, "complete": bool, "world_size": int, "machine": dict, "rows": list}
    missing = [key for key, type_ in types.items() if not isinstance(content.get(key), type_)]
    if missing:
        raise files.not_a(name, path, what, f"it has no {', '.join(missing)}")
    if content["schema"] != SCHEMA:
        raise files.not_a(name, path, what, f"its schema is {content['schema']}, and {SCHEMA} is read here")
    if kinds and content["kind"] not in kinds:
        raise files.not_a(name, path, what, f"its kind is {content['kind']}")
    if not all(isinstance(row, dict) for row in content["rows"]):
        raise files.not_a(name, path, what, "its rows are no objects")
    return content


def resume(path: Path, kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an unfinished record, to go on behind them; none where there is no file.

    Raises: ValueError where it is complete, or was measured on another machine, commit or with other settings.
    """
    if not path.exists():
        return []
    content = read("json", path, kind)
    if content["complete"]:
        raise ValueError(f"json must be a partial record to go on with, got the complete {path}")
    then, now = ({**m, "date": None} for m in (content["machine"], machine()))
    then["settings"], now["settings"] = content.get("settings"), settings
    changed = [f"{name} was {then.get(name)}, is {now.get(name)}" for name in now if then.get(name) != now.get(name)]
    if changed:
        raise ValueError(f"json must be a record of this same run to go on with it, got {path}: {'; '.join(changed)}")
    return content["rows"]


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the record whole or not at all: a full disk leaves the old file, never half a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def machine() -> dict[str, Any]:
    """What the numbers were measured on. MOETAIL_COMMIT names the commit where the tree has no .git."""
    commit = os.environ.get("MOETAIL_COMMIT") or _git("rev-parse", "--short=12", "HEAD")
    gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": _driver() if gpu else None,
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "commit": commit,
        "dirty": None if (changed := _git("status", "--porcelain", "--untracked-files=no")) is None else bool(changed),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def _git(*args: str) -> str | None:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
