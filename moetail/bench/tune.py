"""`moetail tune`: measure the configs of a kernel on this GPU and keep those that beat its heuristic.

A candidate that differs in a bit, or does not fit, is reported and left out. All are timed once; the best few are then
timed in the same interleaved rounds as the heuristic's config, and one replaces it only where the whole paired interval
lies 3 % below it, so that tuning never picks what is slower: of 45 shapes on an H200 16 were won by 1 to 2 %, one of
them by a config that then ran at two speeds, 1.1 and 1.8 us. A job is one shape at one T; the file is written after
each, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moetail import tuning
from moetail.bench import record, stats, timing
from moetail.bench.tune_ops import MAKERS, Bench
from moetail.coverage import Launch, key_of
from moetail.tuning import Bucket, Key, Shape

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST = (8, 1, 16, 64, 4096, 8192)  # what a run that is cut off has seen
FINALISTS = 4
_WORTH = 0.97


@dataclass(frozen=True)
class Job:
    """One shape at one T, whose config will be used from min_T to max_T: to the next T that is measured."""

    shape: Shape
    T: int
    min_T: int
    max_T: int
    later: bool = False


@dataclass(frozen=True)
class Found:
    """The config to use at a job's T, and a word on it. `measured` goes to the file."""

    config: dict[str, Any]
    note: str
    measured: dict[str, Any] = field(default_factory=dict)


def jobs(launches: Iterable[Launch]) -> list[Job]:
    """What to measure, the most important first: the grouped GEMMs at FIRST, other ops there, then all that is left; a
    drafter's behind it all."""
    found: list[Job] = []
    for one in dict.fromkeys(launches):
        at = [T for T in TOKENS if one.min_T <= T <= one.max_T] or [one.min_T]
        starts = [one.min_T, *at[1:], one.max_T + 1]
        if one.tunable:
            found += [
                Job(one.shape, T, a, b - 1, one.later) for T, a, b in zip(at, starts[:-1], starts[1:], strict=True)
            ]

    def order(job: Job) -> tuple[int, ...]:
        gemm, early = job.shape.op == "grouped_gemm", job.T in FIRST
        return (job.later, not early, not gemm, FIRST.index(job.T) if early else job.T)

    return sorted(found, key=order)


def stale_launches(path: Path, gpu: str) -> list[Launch]:
    """What a file has for this GPU of another kernel or Triton, and what a run did not reach: to be measured again.

    Raises: ValueError for a file that is none, and for an entry that is not one of this tuner's.
    """
    triton = tuning.triton_version()
    spans: dict[Shape, list[tuple[int, int]]] = {}
    fresh: set[Shape] = set()
    for entry in tuning.read(path):
        if entry["gpu"] != gpu:
            continue
        shape = tuning.shape_of(entry)
        if shape.op not in MAKERS or shape.dtype != _DTYPES.get(shape.op, "bfloat16"):
            raise ValueError(f"config file {path} must be of what tune measures, got {shape} {shape.dtype}")
        spans.setdefault(shape, []).extend((b["min_T"], b["max_T"]) for b in entry["buckets"])
        if Key(shape, gpu, entry["source"], entry["triton"]) == key_of(shape, gpu, triton):
            fresh.add(shape)
    for one in _unreached(path):
        shape = Shape(one["op"], tuple(one["dims"].items()), _DTYPES.get(one["op"], "bfloat16"))
        spans.setdefault(shape, []).append((one.get("min_T", one["T"]), one.get("max_T", one["T"])))
        fresh.discard(shape)
    return [
        Launch(shape, min(first for first, _ in span), max(last for _, last in span))
        for shape, span in spans.items()
        if span and shape not in fresh
    ]


_DTYPES = {"route": "float32"}  # of the inputs that MAKERS make; the others' are bf16


def tune(
    wanted: Sequence[Job],
    device: torch.device,
    path: Path,
    resume: bool,
    go_on: Callable[[], bool],
    on_job: Callable[[int, str], None],
) -> list[Job]:
    """Measure the jobs in order and write the file after each; returns those that are left. `go_on()` is asked before
    each. `on_job(done, note)` follows each. `resume`: what the file says of these jobs is not measured again.

    Raises: ValueError for a file that is there and is none of configs. KeyboardInterrupt, with the file whole.
    """
    gpu, triton = torch.cuda.get_device_name(device), tuning.triton_version()
    keys = {job.shape: key_of(job.shape, gpu, triton) for job in wanted}
    machine = record.machine()
    before = _before(path, wanted, keys, resume)
    found = dict(before.found)
    left = [job for job in wanted if job not in found]
    on_job(len(found), before.note(path))
    if not left:  # the intervals may be others
        record.write(path, content(found, left, keys, machine, before))
    while left and go_on():
        job = left[0]
        found[job] = best(job, device)
        left.pop(0)
        record.write(path, content(found, left, keys, machine, before))
        on_job(len(found), f"{job.shape} T={job.T}: {found[job].note}")
    return left


def best(job: Job, device: torch.device, rounds: int = 8) -> Found:
    """The fastest config of a job; one that does not fit in memory at all is not measured, and the note says so."""
    try:
        return _best(MAKERS[job.shape.op](job.shape, job.T, device), rounds)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return Found({}, "its inputs do not fit in memory: the heuristic")


def _best(bench: Bench, rounds: int) -> Found:
    guess, want, arms = bench.heuristic, bench.want, {}
    lost: list[str] = []
    for config in dict.fromkeys((guess, *bench.candidates)):
        try:
            got = bench.outputs(config)
            if any(not _equal(a, b) for a, b in zip(got, want, strict=True)):
                lost.append(f"{config} DIFFERS IN BITS")
                if config != guess:
                    continue
                want = got  # the promise is broken, which the note says; a config still must not change a bit
            arms[config] = timing.cuda_graph_arm(str(config), bench.program(config))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            lost.append(f"{config} is out of memory")
        except Exception as error:  # Triton's own, where a program does not fit a multiprocessor
            if type(error).__name__ != "OutOfResources" or config == guess:
                raise
            lost.append(f"{config} is out of shared memory or registers")
    if guess not in arms:
        return Found({}, "; ".join(lost))
    for arm in arms.values():  # a first look, behind one run that warms it up
        arm.run()
    looks = {config: min(arm.run() for _ in range(3)) for config, arm in arms.items()}
    finalists = [guess, *sorted((c for c in arms if c != guess), key=lambda c: looks[c])[:FINALISTS]]
    chosen = [arms[config] for config in finalists]
    timing.warm_up(chosen, seconds=0.05)
    _, paired = timing.interleave(chosen, rounds)
    medians = {config: stats.summary(paired[str(config)])["median_us"] for config in finalists}
    winner = min(finalists, key=lambda config: medians[config])
    ratio = stats.paired_ratio(paired[str(guess)], paired[str(winner)])
    why = "".join(f"; {reason}" for reason in lost)
    won = winner != guess and ratio.high < _WORTH
    kept = winner if won else guess
    measured = {"heuristic_us": round(medians[guess], 3), "us": round(medians[kept], 3), "left_out": lost}
    note = f"{winner}, {ratio} of the heuristic" if won else "the heuristic"
    return Found(tuning.as_dict(kept), f"{note}, {medians[kept]:.1f} us{why}", measured)


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return bool(torch.equal(got.view(bits), want.view(bits)))


@dataclass(frozen=True)
class Before:
    """What the file has. entries, missing: not of this run's keys. found: of its jobs. beyond: its keys' buckets above
    the largest of its jobs. Of its own keys nothing where the run does not resume."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)
    found: dict[Job, Found] = field(default_factory=dict)
    beyond: dict[Shape, list[tuple[Bucket, dict[str, Any]]]] = field(default_factory=dict)

    def note(self, path: Path) -> str:
        parts = [(len(self.entries), "of other shapes"), (len(self.found), "of this run's measurements")]
        kept = " and ".join(f"{count} {what}" for count, what in parts if count)
        return f"{path}: kept are {kept}" if kept else ""


def content(
    found: dict[Job, Found], left: Sequence[Job], keys: dict[Shape, Key], machine: dict[str, Any], before: Before
) -> dict[str, Any]:
    """The file: an entry a shape, and what is missing. A job without a config leaves its tokens to the heuristic."""
    entries = list(before.entries)
    for shape, key in keys.items():
        buckets = [
            (Bucket(job.min_T, job.max_T, job.T, tuple(f.config.items())), f.measured)
            for job, f in found.items()
            if job.shape == shape and f.config
        ] + before.beyond.get(shape, [])
        if buckets:
            entries.append(tuning.entry(key, buckets))
    missing = [*before.missing, *(_missing(job) for job in left)]
    return {
        "schema": tuning.SCHEMA, "machine": machine, "complete": not missing, "missing": missing,
        "entries": entries,
    }  # fmt: skip


def _missing(job: Job) -> dict[str, Any]:
    return {"op": job.shape.op, "dims": dict(job.shape.dims), "T": job.T, "min_T": job.min_T, "max_T": job.max_T}


def _unreached(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()).get("missing", [])


_INTERVAL = ("min_T", "max_T", "tuned_T", "config")


def _before(path: Path, wanted: Sequence[Job], keys: dict[Shape, Key], resume: bool) -> Before:
    """Entries of another kernel for the same shape, GPU and Triton are dead: they are measured again."""
    if not path.exists():
        return Before()
    ours = {(key.shape, key.gpu, key.triton): key.source for key in keys.values()}
    entries: list[dict[str, Any]] = []
    known: dict[tuple[Shape, int], Found] = {}
    beyond: dict[Shape, list[tuple[Bucket, dict[str, Any]]]] = {}
    most = {shape: max(job.max_T for job in wanted if job.shape == shape) for shape in keys}
    for entry in tuning.read(path):
        shape = tuning.shape_of(entry)
        source = ours.get((shape, entry["gpu"], entry["triton"]))
        if source is None:
            entries.append(entry)
        elif resume and source == entry["source"]:
            for bucket in entry["buckets"]:
                measured = {name: value for name, value in bucket.items() if name not in _INTERVAL}
                if bucket["min_T"] > most[shape]:
                    config = tuple(bucket["config"].items())
                    interval = Bucket(bucket["min_T"], bucket["max_T"], bucket["tuned_T"], config)
                    beyond.setdefault(shape, []).append((interval, measured))
                else:
                    known[shape, bucket["tuned_T"]] = Found(bucket["config"], "kept", measured)
    found = {job: known[job.shape, job.T] for job in wanted if (job.shape, job.T) in known}
    mine = [(shape.op, dict(shape.dims)) for shape in keys]
    missing = [one for one in _unreached(path) if (one["op"], one["dims"]) not in mine]
    return Before(entries, missing, found, beyond)
