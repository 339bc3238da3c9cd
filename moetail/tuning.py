"""Which config a kernel runs with: tuned on this GPU where a file says so. A heuristic answers everywhere else.

A file holds one GPU's entries; an entry one op's shape and dtype, with explicit intervals of T. An entry is used only
where the kernel's source and Triton are those it was tuned with: otherwise it is stale, a warning says so once, and the
heuristic runs. A config changes time, never bits, so no lookup can change a result. No key knows who finalizes.
Files: `moetail/configs/*.json`, and those in the folder that MOETAIL_CONFIGS names (which win).
`lookup` answers one call. `segments` answers every call from min_T to max_T: that is what `moetail coverage` prints.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

# (GPU, ranks) -> the most tokens that cross the link in one shot: more go in two (`comm/two_shot_triton.py`).
ONE_SHOT_TOKENS: dict[tuple[str, int], int] = {}  # none measured yet

SCHEMA = 2
PACKAGED = Path(__file__).resolve().parent / "configs"
HOW = ("stale", "heuristic", "bucket", "exact")  # from worst to best

Config = tuple[tuple[str, Any], ...]
_C = TypeVar("_C")
_P = ParamSpec("_P")


@dataclass(frozen=True)
class Shape:
    """What an op is tuned for, T left out. `dims` name what the time depends on, in the op's own order."""

    op: str
    dims: tuple[tuple[str, int | str], ...]
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return " ".join((self.op, *(f"{name}={value}" for name, value in self.dims)))

    def __getitem__(self, name: str) -> Any:
        return dict(self.dims)[name]


@dataclass(frozen=True)
class Key:
    """What an entry is for, and what it was tuned with (`source`: a hash of the kernel's text)."""

    shape: Shape
    gpu: str
    source: str
    triton: str


@dataclass(frozen=True)
class Bucket:
    """The tokens min_T to max_T (both included) run `config`; it was measured at `tuned_T`."""

    min_T: int
    max_T: int
    tuned_T: int
    config: Config

    def holds(self, T: int) -> bool:
        return self.min_T <= T <= self.max_T


@dataclass(frozen=True)
class Answer:
    """how: "exact" (T was measured), "bucket" (T lies in an interval that was), "heuristic" (no config), or "stale":
    there is one, of another kernel or Triton, and it is not used. `why` says more."""

    how: str
    config: Config | None
    why: str = ""


@dataclass(frozen=True)
class Segment:
    """Calls of min_T to max_T tokens, both included, get `answer`."""

    min_T: int
    max_T: int
    answer: Answer


@dataclass(frozen=True)
class _Found:
    buckets: tuple[Bucket, ...]
    stale: str = ""  # what the stale entry was tuned with; "": there is none
    path: Path = Path()  # of the stale entry's file


def lookup(key: Key, T: int) -> Answer:
    """The tuned config for T tokens, and how well it is covered. A stale entry warns, once a key."""
    found = _read_entry(key)
    if found.stale:
        _warn_stale(key, found)
    return _answer(found, T)


def segments(key: Key, min_T: int, max_T: int) -> tuple[Segment, ...]:
    """The answer to every T from min_T to max_T, neighbours with equal answers joined. Warns of nothing."""
    found = _read_entry(key)
    cuts = {min_T}
    for bucket in found.buckets:
        cuts |= {bucket.min_T, bucket.max_T + 1, bucket.tuned_T, bucket.tuned_T + 1}
    starts = sorted(cut for cut in cuts if min_T <= cut <= max_T)
    parts: list[Segment] = []
    for first, beyond in zip(starts, [*starts[1:], max_T + 1], strict=True):
        answer = _answer(found, first)
        if parts and parts[-1].answer == answer:
            parts[-1] = Segment(parts[-1].min_T, beyond - 1, answer)
        else:
            parts.append(Segment(first, beyond - 1, answer))
    return tuple(parts)


def _answer(found: _Found, T: int) -> Answer:
    if found.stale:
        return Answer("stale", None, found.stale)
    for bucket in found.buckets:
        if bucket.holds(T):
            return Answer("exact" if bucket.tuned_T == T else "bucket", bucket.config, f"measured at {bucket.tuned_T}")
    if not found.buckets:
        return Answer("heuristic", None, "this shape was never tuned")
    last = max(bucket.max_T for bucket in found.buckets)
    return Answer("heuristic", None, f"above the largest bucket, {last}" if last < T else "not measured here")


def tuned(kind: type[_C], device: torch.device, shape: Shape, source: str, T: int) -> _C | None:
    """The config of class `kind` for a call on this device; None: the heuristic's."""
    return _tuned(kind, device, shape, source, T) if device.type == "cuda" else None


def follows_files(config_for: Callable[_P, _C]) -> Callable[_P, _C]:
    """A cache for an op's `config_for`, which `forget` clears. In front of the lookup, whose Shape is made and hashed
    at each call: 0.10 us on the host against 5.6."""
    cached = functools.lru_cache(maxsize=8192)(config_for)
    _FOLLOWING.append(cached)
    return cached  # type: ignore[return-value]


_FOLLOWING: list[Any] = []


@follows_files
def _tuned(kind: type[_C], device: torch.device, shape: Shape, source: str, T: int) -> _C | None:
    config = lookup(key_on(device, shape, source), T).config
    return None if config is None else kind(**dict(config))


def every_tuned(kind: type[_C], device: torch.device, shape: Shape, source: str) -> tuple[_C, ...]:
    """All that `tuned` can answer for some T: what has to be compiled so that no later T compiles."""
    if device.type != "cuda":
        return ()
    buckets = _read_entry(key_on(device, shape, source)).buckets
    return tuple(dict.fromkeys(kind(**dict(bucket.config)) for bucket in buckets))


def key_on(device: torch.device, shape: Shape, source: str) -> Key:
    return Key(shape, torch.cuda.get_device_name(device), source, triton_version())


def forget() -> None:
    """Read the files again at the next lookup: for tests."""
    for cached in (_read_entry, _warn_stale, *_FOLLOWING):
        cached.cache_clear()


@functools.cache
def _read_entry(key: Key) -> _Found:
    """Every interval of the entry for this key, or what is stale about the first that is."""
    stale = _Found(())
    for path in config_files():
        for entry in read(path):
            if (shape_of(entry), entry["gpu"]) != (key.shape, key.gpu):
                continue
            if (entry["source"], entry["triton"]) == (key.source, key.triton):
                return _Found(
                    tuple(
                        Bucket(b["min_T"], b["max_T"], b["tuned_T"], tuple(sorted(b["config"].items())))
                        for b in entry["buckets"]
                    )
                )
            if not stale.stale:
                why = (f"{path.name}: tuned with kernel {entry['source']}, Triton {entry['triton']}; "
                       f"now {key.source}, {key.triton}")  # fmt: skip
                stale = _Found((), why, path)
    return stale


@functools.cache
def _warn_stale(key: Key, found: _Found) -> None:
    warnings.warn(
        f"moetail: the configs of {key.shape} {key.shape.dtype} on {key.gpu} are stale ({found.stale}): the heuristic "
        f"is used; measure them again with: moetail tune --stale --out {shlex.quote(str(found.path))}",
        RuntimeWarning,
        stacklevel=4,
    )


def one_shot_tokens(gpu: str, world_size: int) -> int:
    """The table's answer, the same on every rank of a group.

    Where nothing was measured a guess: two shots send 2/W of the bytes of one, for one more trip over the link, about
    3 us. 1024 / W tokens of 5120 elements are about 5 MB a rank in one shot, 13 us of an H200's link. And 256 at least:
    so many tokens have gone in one shot ten thousand times, at every W up to 8.
    """
    return ONE_SHOT_TOKENS.get((gpu, world_size), max(256, 1024 // world_size))


def config_files() -> list[Path]:
    """The files that are read, the user's first. Raises: ValueError where MOETAIL_CONFIGS is no folder."""
    extra = os.environ.get("MOETAIL_CONFIGS")
    if extra and not Path(extra).is_dir():
        raise ValueError(f"MOETAIL_CONFIGS must be a folder, got {extra!r}")
    folders = [Path(extra)] if extra else []
    return [path for folder in (*folders, PACKAGED) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> list[dict[str, Any]]:
    """A file's entries. Raises: ValueError where it is not a config file of this schema, or names the entry of it that
    is not whole, and what of it."""
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}")
        entries = content["entries"]
        if not isinstance(entries, list):
            raise ValueError(f"its entries are {type(entries).__name__}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"config file {path} must be JSON of schema {SCHEMA} with entries: {error}") from error
    for index, one in enumerate(entries):
        where = f"config file {path}: entry {index}"
        _check_fields(where, one, _ENTRY_FIELDS)
        for bucket_index, bucket in enumerate(one["buckets"]):
            _check_fields(f"{where} ({shape_of(one)} on {one['gpu']}): bucket {bucket_index}", bucket, _BUCKET_FIELDS)
    return entries


_ENTRY_FIELDS: dict[str, type] = {
    "op": str, "gpu": str, "dims": dict, "dtype": str, "source": str, "triton": str, "buckets": list
}  # fmt: skip
_BUCKET_FIELDS: dict[str, type] = {"min_T": int, "max_T": int, "tuned_T": int, "config": dict}


def _check_fields(where: str, mapping: Any, kinds: dict[str, type]) -> None:
    if not isinstance(mapping, dict):
        raise ValueError(f"{where} must be an object with {', '.join(kinds)}, got {mapping!r}")
    for name, kind in kinds.items():
        if not isinstance(mapping.get(name), kind):
            got = repr(mapping[name]) if name in mapping else "no such field"
            raise ValueError(f"{where} must have {name} of type {kind.__name__}, got {got}")


def shape_of(entry: dict[str, Any]) -> Shape:
    return Shape(entry["op"], tuple(entry["dims"].items()), entry["dtype"])


def entry(key: Key, buckets: Sequence[tuple[Bucket, dict[str, Any]]]) -> dict[str, Any]:
    """An entry from buckets that do not overlap, each with what was measured."""
    return {
        "op": key.shape.op, "gpu": key.gpu, "dims": dict(key.shape.dims), "dtype": key.shape.dtype,
        "source": key.source, "triton": key.triton,
        "buckets": [
            {"min_T": b.min_T, "max_T": b.max_T, "tuned_T": b.tuned_T, "config": dict(b.config), **measured}
            for b, measured in sorted(buckets, key=lambda pair: pair[0].min_T)
        ],
    }  # fmt: skip


def gpu_named(text: str) -> tuple[str, str]:
    """(the GPU, Triton) of the one pair in the files that contains `text`, in any case: "h200", "h200, triton 3.6".

    Raises: ValueError where no file, or more than one GPU or Triton, is meant.
    """
    known = {(entry["gpu"], entry["triton"]) for path in config_files() for entry in read(path)}
    names = {pair: f"{pair[0]}, Triton {pair[1]}" for pair in known}
    meant = sorted(pair for pair in known if text.lower() in names[pair].lower())
    if len(meant) != 1:
        choice = "; ".join(names[pair] for pair in meant or sorted(known))
        raise ValueError(f"gpu must name one GPU of the config files ({choice or 'there are none'}), got {text!r}")
    return meant[0]


def digest(device: torch.device) -> str:
    """A short name for all that lookups on this device can answer; "" on a CPU, which has nothing tuned."""
    if device.type != "cuda":
        return ""
    gpu = torch.cuda.get_device_name(device)
    entries = [entry for path in config_files() for entry in read(path) if entry["gpu"] == gpu]
    return hashlib.sha256(json.dumps([triton_version(), entries], sort_keys=True).encode()).hexdigest()[:12]


def check_ranks(digests: Sequence[str]) -> None:
    """Ranks with other configs would wait for each other at every layer. `digests`: of all ranks, in rank order.

    Raises: ValueError, the same on every rank, where they differ.
    """
    for rank, theirs in enumerate(digests):
        if theirs != digests[0]:
            raise ValueError(
                f"configs must be the same on every rank (the package's, those of MOETAIL_CONFIGS, Triton's version), "
                f"got {digests[0]!r} on rank 0 and {theirs!r} on rank {rank}"
            )


def source_hash(*kernels: Any) -> str:
    """A short name for the text of these functions, Triton's or plain."""
    texts = [inspect.getsource(getattr(kernel, "fn", kernel)) for kernel in kernels]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


@functools.cache
def triton_version() -> str:
    import triton

    return triton.__version__


def as_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as what a file holds."""
    return {field.name: getattr(config, field.name) for field in fields(config)}
