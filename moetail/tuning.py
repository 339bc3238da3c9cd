"""Which config a kernel runs with: tuned on this GPU where a file says so. A heuristic answers everywhere else.

A file holds one GPU's entries; an entry one op, shape and dtype, with explicit intervals of T. An entry is used only
where the kernel's source and Triton are those it was tuned with: otherwise it is stale, a warning says so once, and the
heuristic runs. A config changes time, never bits, so no lookup can change a result.
Files: `moetail/configs/*.json`, and those in the folder that MOETAIL_CONFIGS names (which win).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# (GPU, ranks) -> the most tokens that cross the link in one shot: more go in two (`comm/two_shot_triton.py`).
ONE_SHOT_TOKENS: dict[tuple[str, int], int] = {}  # none measured yet

SCHEMA = 1
PACKAGED = Path(__file__).resolve().parent / "configs"


@dataclass(frozen=True)
class Bucket:
    """The tokens min_T to max_T (both included) run `config`; it was measured at `tuned_T`."""

    min_T: int
    max_T: int
    tuned_T: int
    config: tuple[tuple[str, int], ...]

    def holds(self, T: int) -> bool:
        return self.min_T <= T <= self.max_T


@dataclass(frozen=True)
class Key:
    """What an entry is for, and what it was tuned with (`source`: a hash of the kernel's text)."""

    op: str
    gpu: str
    K: int
    H: int
    dtype: str
    source: str
    triton: str


@dataclass(frozen=True)
class Answer:
    """how: "exact" (T was measured), "bucket" (T lies in an interval that was), or "heuristic" (no config)."""

    how: str
    config: tuple[tuple[str, int], ...] | None


def lookup(key: Key, T: int) -> Answer:
    """The tuned config for T tokens, and how well it is covered."""
    for bucket in buckets(key):
        if bucket.holds(T):
            return Answer("exact" if bucket.tuned_T == T else "bucket", bucket.config)
    return Answer("heuristic", None)


@functools.cache
def buckets(key: Key) -> tuple[Bucket, ...]:
    """Every interval of the entry for this key; empty where there is none. A stale entry warns, once."""
    stale = None
    for path in config_files():
        for entry in read(path):
            if (entry["op"], entry["gpu"], entry["K"], entry["H"], entry["dtype"]) != (
                key.op, key.gpu, key.K, key.H, key.dtype
            ):  # fmt: skip
                continue
            if (entry["source"], entry["triton"]) == (key.source, key.triton):
                return tuple(
                    Bucket(b["min_T"], b["max_T"], b["tuned_T"], tuple(sorted(b["config"].items())))
                    for b in entry["buckets"]
                )
            stale = (path, entry)
    if stale is not None:
        path, entry = stale
        warnings.warn(
            f"moetail: the configs tuned for {key.op} K={key.K} H={key.H} on {key.gpu} in {path} are stale (kernel "
            f"{entry['source']}, Triton {entry['triton']}; now {key.source}, {key.triton}): the heuristic is used; "
            f"run moetail tune {key.op}",
            RuntimeWarning,
            stacklevel=2,
        )
    return ()


def one_shot_tokens(gpu: str, world_size: int) -> int:
    """The table's answer, the same on every rank of a group.

    Where nothing was measured a guess: two shots send 2/W of the bytes of one, for one more trip over the link, about
    3 us. 1024 / W tokens of 5120 elements are about 5 MB a rank in one shot, 13 us of an H200's link.
    """
    return ONE_SHOT_TOKENS.get((gpu, world_size), 1024 // world_size)


def config_files() -> list[Path]:
    """The files that are read, the user's first."""
    extra = os.environ.get("MOETAIL_CONFIGS")
    folders = [Path(extra)] if extra else []
    return [path for folder in (*folders, PACKAGED) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> list[dict[str, Any]]:
    """A file's entries. Raises: ValueError where it is not a config file of this schema."""
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}")
        return content["entries"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config file {path} must be JSON of schema {SCHEMA} with entries: {error}") from error


def entry(key: Key, found: list[tuple[int, dict[str, int]]], last_T: int) -> dict[str, Any]:
    """An entry from (T, config) pairs in rising T: each config holds from its T to just below the next, the last one to
    `last_T`."""
    ends = [T - 1 for T, _ in found[1:]] + [last_T]
    return {
        "op": key.op, "gpu": key.gpu, "K": key.K, "H": key.H, "dtype": key.dtype, "source": key.source,
        "triton": key.triton,
        "buckets": [
            {"min_T": T, "max_T": end, "tuned_T": T, "config": config}
            for (T, config), end in zip(found, ends, strict=True)
        ],
    }  # fmt: skip


def source_hash(*texts: str) -> str:
    """A short name for the kernel's text."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
