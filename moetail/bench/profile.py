"""A forward's kernels: what runs, how long, how often, from torch.profiler; brackets for Nsight Systems.

`kernels.json` has the keys of vLLM's `benchmarks/forward/profile.py`, so either tool can diff the files of the other.
Times are microseconds of one forward, the median of the replays: one disturbed replay must not name a kernel. On CUDA
a kernel's time is its duration on the device. On a CPU it is an operator's self time, so that a parent does not count
its children again.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from moetail.bench import record
from moetail.bench.kernel_names import short_name


@dataclass(frozen=True)
class Kernel:
    """One kernel (CUDA) or operator (CPU), summed over a forward. `name` is short, `example` is a full name of it."""

    name: str
    us: float
    calls: float
    example: str


@dataclass(frozen=True)
class Profile:
    """One forward, the median of `replays`.

    span_us: first start to last end. busy_us: the union of the busy intervals, not their sum: streams and PDL overlap.
    kernels: longest first. pre_forward_us: what ran before the forward in each replay, and is not in anything else.
    activities: how many kernels, copies and fills (CPU: operators) a forward has.
    """

    span_us: float
    busy_us: float
    kernels: tuple[Kernel, ...]
    replays: int
    pre_forward_us: float = 0.0
    activities: int = 0

    def content(self, trace: str) -> dict[str, Any]:
        """The kernels.json; `pct` is the share of the summed kernel time, `trace` the trace's file name."""
        total = sum(kernel.us for kernel in self.kernels) or 1.0
        return {
            "trace": trace, "replays": self.replays, "span_us": self.span_us, "busy_us": self.busy_us,
            "pre_forward_us": self.pre_forward_us, "activities": self.activities,
            "kernels": [
                {"name": k.name, "us": k.us, "pct": 100 * k.us / total, "calls": k.calls, "example": k.example}
                for k in self.kernels
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class Activity:
    """One kernel, copy, fill or operator. `own_ns` is its time without its children."""

    name: str
    start_ns: int
    end_ns: int
    own_ns: int


def capture(
    run: Callable[[], object], name: str, device: torch.device, replays: int = 3, folder: Path | None = None,
    rank: int = 0, pre_activities: int = 0,
) -> Profile:  # fmt: skip
    """Profile `replays` calls of `run`, which must do the same work each time (a graph's replay, a warm program).

    The first `pre_activities` activities of each replay are not the forward (they restore its state).
    With a folder, <name>.rank<rank>.trace.json.gz and <name>.rank<rank>.kernels.json are written there.
    Raises: ValueError for a bad count; RuntimeError where nothing was recorded or the replays differ.
    """
    if replays < 1:
        raise ValueError(f"replays must be at least 1, got {replays}")
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with kineto(activities=kinds) as prof:
        replay(run, name, device, replays)
    events = kineto_events(prof)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        profile = summarize(_device_activities(events, index), replays, pre_activities)
    else:
        profile = summarize(_operators(events), replays, pre_activities)
    if folder is not None:
        stem = f"{file_stem(name)}.rank{rank}"
        trace = f"{stem}.trace.json.gz"
        _write_trace(prof, folder / trace)
        record.write(folder / f"{stem}.kernels.json", profile.content(trace))
    return profile


def count_activities(program: Callable[[], object], device: torch.device) -> int:
    """How many activities one call of a program has: the `pre_activities` of a program that it precedes."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with kineto(activities=kinds) as prof:
        program()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = kineto_events(prof)
    if device.type == "cuda":
        return len(_device_activities(events, torch.cuda.current_device() if device.index is None else device.index))
    return len(_operators(events))


def replay(run: Callable[[], object], name: str, device: torch.device, replays: int = 3) -> None:
    """Call `run`. On CUDA inside cudaProfilerStart/Stop and an NVTX range "forward/<name>", for
    `nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat`.

    Under Nsight Systems use this and not `capture`: two profilers cannot hold CUPTI at once.
    """
    with ExitStack() as brackets:
        if device.type == "cuda":
            brackets.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize()
            brackets.enter_context(torch.cuda.profiler.profile())
            brackets.enter_context(torch.cuda.nvtx.range("forward/{}", name))
        for _ in range(replays):
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()


@contextmanager
def kineto(**options: Any) -> Iterator[torch.profiler.profile]:
    """torch.profiler, without the "USDT:... profiler_start" that torch 2.13 prints on stderr.

    Kineto reads KINETO_LOG_LEVEL once, at the process's first profile. USDT is the highest level (5) and errors are
    below it, so this hides kineto's errors too: a caller must check what it got. A level that is set is kept.
    """
    ours = "KINETO_LOG_LEVEL" not in os.environ
    if ours:
        os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        with torch.profiler.profile(**options) as prof:
            yield prof
    finally:
        if ours:
            del os.environ["KINETO_LOG_LEVEL"]


def kineto_events(prof: Any) -> list[Any]:
    """Every raw event of a finished profile, with nanoseconds: torch types none of it."""
    return list(prof.profiler.kineto_results.events())


def summarize(activities: Iterable[Activity], replays: int, pre_activities: int = 0) -> Profile:
    """The median forward of `replays` equal, successive runs. Raises as `capture` does."""
    ordered = sorted(activities, key=lambda a: (a.start_ns, -a.end_ns))
    if not ordered:
        raise RuntimeError("the profiler recorded nothing: another one (Nsight Systems) may hold CUPTI; "
                           "KINETO_LOG_LEVEL=0 says why")  # fmt: skip
    size = len(ordered) // replays
    runs = [ordered[at : at + size] for at in range(0, size * replays, size)] if size else []
    counts = [Counter(_work(a.name) for a in run) for run in runs]
    if size * replays != len(ordered) or any(count != counts[0] for count in counts):
        odd = sorted({name for count in counts for name in (count - counts[0]) + (counts[0] - count)})
        raise RuntimeError(
            f"{replays} replays must do the same work, got {len(ordered)} activities that do not repeat: "
            f"{', '.join(odd[:3]) or 'their number'}"
        )
    if not 0 <= pre_activities < size:
        raise ValueError(f"pre_activities must be 0 or more and below a replay's {size}, got {pre_activities}")
    before = [a for run in runs for a in run[:pre_activities]]
    forwards = [run[pre_activities:] for run in runs]
    spans = [max(a.end_ns for a in run) - run[0].start_ns for run in forwards]
    totals = [_totals(run) for run in forwards]
    examples = {short_name(a.name): a.name for a in reversed(forwards[0])}
    calls = Counter(short_name(a.name) for a in forwards[0])
    kernels = [
        Kernel(name, median(total[name] for total in totals) / 1e3, calls[name], examples[name]) for name in calls
    ]
    return Profile(
        median(spans) / 1e3, median(busy_ns(run) for run in forwards) / 1e3,
        tuple(sorted(kernels, key=lambda k: -k.us)), replays, sum(a.own_ns for a in before) / 1e3 / replays,
        size - pre_activities,
    )  # fmt: skip


def _totals(run: Iterable[Activity]) -> Counter[str]:
    """Nanoseconds of each kernel in one replay."""
    totals: Counter[str] = Counter()
    for a in run:
        totals[short_name(a.name)] += a.own_ns
    return totals


def _work(name: str) -> str:
    """A copy or fill without the kinds of memory behind its name: one graph node was seen as (Device) and (Unknown)."""
    return name.partition(" (")[0] if name.startswith(("Memset", "Memcpy")) else name


def busy_ns(activities: Iterable[Activity]) -> int:
    """The length of the union of their intervals."""
    total = last = 0
    for a in sorted(activities, key=lambda a: a.start_ns):
        total += max(a.end_ns, last) - max(a.start_ns, last)
        last = max(a.end_ns, last)
    return total


def own_ns(intervals: list[tuple[int, int, int]]) -> list[int]:
    """(thread, start, end) of nested intervals -> the time of each without those directly inside it."""
    own = [end - start for _, start, end in intervals]
    open_: list[int] = []
    for i in sorted(range(len(intervals)), key=lambda i: (intervals[i][0], intervals[i][1], -intervals[i][2])):
        thread, start, end = intervals[i]
        while open_ and (intervals[open_[-1]][0] != thread or intervals[open_[-1]][2] <= start):
            open_.pop()
        if open_:
            own[open_[-1]] -= end - start
        open_.append(i)
    return own


def file_stem(name: str) -> str:
    """A file name for a case; distinct names never collide, for "%" itself is quoted: 8*1@2048 -> 8%2A1@2048."""
    return quote(name, safe="@,=+")


def _device_activities(events: list[Any], index: int) -> list[Activity]:
    """Kernels, copies and fills of one GPU; the GPU's copies of user annotations are no work."""
    return [
        Activity(e.name(), e.start_ns(), e.end_ns(), e.end_ns() - e.start_ns())
        for e in events
        if e.device_type() == DeviceType.CUDA and e.device_index() == index and not e.is_user_annotation()
    ]


def _operators(events: list[Any]) -> list[Activity]:
    """CPU operators with their self times."""
    ops = [e for e in events if e.device_type() == DeviceType.CPU and not e.is_user_annotation()]
    own = own_ns([(e.start_thread_id(), e.start_ns(), e.end_ns()) for e in ops])
    return [Activity(e.name(), e.start_ns(), e.end_ns(), t) for e, t in zip(ops, own, strict=True)]


def _write_trace(prof: torch.profiler.profile, path: Path) -> None:
    """The Perfetto trace, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        whole = Path(temporary) / path.name
        prof.export_chrome_trace(str(whole))
        os.replace(whole, path)
