"""The only place a clock is read.

An arm is a program that can be run once and timed. Arms are interleaved one run at a time: a round is a palindrome
(A B C C B A), so that a drift of the machine falls on all of them alike, and its order is drawn anew each round, so
that no arm always finds the caches as the same neighbour left them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# A kernel that waits for a rank which never comes is an error that names its arm, not a hang.
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Arm:
    """`run` executes the program once and returns its time in microseconds."""

    name: str
    run: Callable[[], float]


def cpu_arm(name: str, program: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Arm:
    """An eager program under a monotonic clock; `prepare` runs before the clock starts."""

    def run() -> float:
        prepare()
        start = time.perf_counter_ns()
        program()
        return (time.perf_counter_ns() - start) / 1e3

    return Arm(name, run)


def cuda_graph_arm(
    name: str, program: Callable[[], object], prepare: Callable[[], object] = lambda: None, repeats: int = 1
) -> Arm:
    """The program captured as a CUDA graph, `repeats` times in a row; `prepare` is captured before the first event.

    Both events are nodes of the graph, so neither the launch of the graph nor the host is in the time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            prepare()
            program()
    torch.cuda.current_stream().wait_stream(side)
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare()
        start.record()
        for _ in range(repeats):
            program()
        end.record()

    done = torch.cuda.Event()

    def run() -> float:
        graph.replay()
        done.record()
        _wait(done, name)
        return start.elapsed_time(end) * 1e3 / repeats

    return Arm(name, run)


def within(seconds: float | None) -> Callable[[], bool]:
    """Whether less than that has passed since this call; None: always."""
    start = time.perf_counter()
    return lambda: seconds is None or time.perf_counter() - start < seconds


def _wait(event: torch.cuda.Event, name: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not event.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} did not end within {_PATIENCE_S:g} s: do its kernels wait for another rank?")


def warm_up(arms: list[Arm], seconds: float, slowest: Callable[[float], float] = float) -> float:
    """Run every arm in turn for at least `seconds`; returns the slowest arm's last time in microseconds.

    `slowest(x)` is the maximum over ranks: all of them stop after the same run.
    """
    start = time.perf_counter()
    while True:
        last = slowest(max(arm.run() for arm in arms))
        if slowest(time.perf_counter() - start) >= seconds:
            return last


def interleave(
    arms: list[Arm],
    rounds: int,
    on_round: Callable[[], object] = lambda: None,
    slowest: Callable[[float], float] = float,
    rest_us: float = 0.0,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Every sample of each arm (the slowest rank's), and one paired value a round (the mean of its two runs), in
    microseconds. The order of a round is the same on every rank. `rest_us`: the pause before each run."""
    samples: dict[str, list[float]] = {arm.name: [] for arm in arms}
    paired: dict[str, list[float]] = {arm.name: [] for arm in arms}
    draw = random.Random(rounds)
    for _ in range(rounds):
        order = draw.sample(arms, len(arms))
        for arm in (*order, *reversed(order)):
            time.sleep(rest_us / 1e6)
            samples[arm.name].append(slowest(arm.run()))
        for arm in arms:
            paired[arm.name].append(sum(samples[arm.name][-2:]) / 2)
        on_round()
    return samples, paired
