"""`moetail bench serve`: vLLM's step with the plugin off and on, and whether the tokens are the same.

The time of a step is its kernels' busy time on the GPU, the union of their intervals: the host's share is the same in
both arms and too noisy for 2 %. The span from its first kernel to its last is reported beside it. One profile holds all
rounds of a case; a pause between runs, longer than any inside one, separates them.
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from moetail.bench import engines, profile, profile_diff, record, stats
from moetail.bench.engines import ARMS, Engine
from moetail.bench.kernel_names import short_name
from moetail.bench.profile import Activity, Kernel, Profile
from moetail.bench.ranks import Ranks

CONTROL, REPEAT = "control", "repeat"
# Each engine runs twice a turn, so that both grow their KV caches alike; the first's second run is the control.
_LABELS = {"stock": 0, CONTROL: 0, "moetail": 1, REPEAT: 1}
_PAUSE_S, _GAP_NS = 0.04, 25_000_000
_STEPS = 4  # of a decode run
CONTEXT = 512  # tokens of KV cache that a decode begins with


@dataclass(frozen=True)
class Case:
    """`decode`: a batch of `size` requests, one token each a step; else one prefill of `size` tokens."""

    name: str
    size: int
    decode: bool

    @property
    def steps(self) -> int:
        return _STEPS if self.decode else 1


def parse_case(text: str) -> Case:
    """decode=BATCH or prefill=TOKENS. Raises: ValueError."""
    kind, _, size = text.partition("=")
    if kind not in ("decode", "prefill") or not size.isdigit() or int(size) < 1:
        raise ValueError(f"case must be decode=BATCH or prefill=TOKENS, got {text!r}")
    return Case(f"{kind}{size}", int(size), kind == "decode")


def parse_extra(text: str) -> dict[str, Any]:
    """Further arguments of vllm.LLM. Raises: ValueError."""
    try:
        extra = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"extra must be a JSON object of arguments of vllm.LLM, got {text!r}: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError(f"extra must be a JSON object of arguments of vllm.LLM, got {text!r}")
    return extra


def check_layers(said: list[str], model: str) -> None:
    """`said`: what `Engine.layers` says with the plugin on. Raises: ValueError where the plugin has none of them."""
    if not said:
        raise ValueError(f"model must have MoE layers that vLLM runs with its MoERunner, got {model!r} without any")
    if all("its runner is" in line for line in said):
        raise ValueError(f"vLLM must have loaded the plugin (its entry point, VLLM_PLUGINS), got {said[:1]}")


def segments(activities: list[Activity], count: int, gap_ns: int = _GAP_NS) -> list[list[Activity]]:
    """`count` runs, told apart by the pauses between them. Raises: RuntimeError where there are not so many."""
    runs: list[list[Activity]] = []
    reached = None
    for activity in sorted(activities, key=lambda a: a.start_ns):
        if reached is None or activity.start_ns - reached > gap_ns:
            runs.append([])
        runs[-1].append(activity)
        reached = max(reached or 0, activity.end_ns)
    if len(runs) != count:
        raise RuntimeError(
            f"the profile must show {count} runs, got {len(runs)}: the host stalled inside a run, or a run was empty"
        )
    return runs


def run_case(
    pair: tuple[Engine, Engine], case: Case, rounds: int, ranks: Ranks, folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """The row of one case. Raises: RuntimeError where the profile does not show the runs that were made."""
    _begin(pair, case, rounds)
    order: list[str] = []
    walls: dict[str, list[float]] = {label: [] for label in _LABELS}
    labels = list(_LABELS)
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        with profile.kineto(activities=[ProfilerActivity.CUDA]) as prof:
            for done in range(rounds):
                turn = labels[done % 4 :] + labels[: done % 4]
                for label in (*turn, *reversed(turn)):
                    order.append(label)
                    walls[label].append(_run(pair[_LABELS[label]], case, len(order)))
                progress(done + 1, rounds)
    finally:
        gc.enable()
    device = torch.cuda.current_device()
    runs = segments(profile._device_activities(profile.kineto_events(prof), device), len(order))
    for engine in pair:
        engine.use()
        engine.finish()
    return _row(pair, case, rounds, ranks, folder, list(zip(order, runs, strict=True)), walls)


def _begin(pair: tuple[Engine, Engine], case: Case, rounds: int) -> None:
    """Both engines warm, and in the middle of the same decode."""
    for engine in pair:
        engine.use()
        engine.tokens.clear()
        if case.decode:
            tokens = most_tokens(case, rounds)
            engine.add(engines.prompts(case.size, CONTEXT, case.size), tokens, "d")
            while len(engine.tokens) < case.size or any(len(said) < 4 for said in engine.tokens.values()):
                engine.step()
        else:
            for turn in range(3):
                _prefill(engine, case, -turn)


def most_tokens(case: Case, rounds: int) -> int:
    """What a request must be able to say: the rounds' tokens, and those while the others of its batch are prefilled."""
    return 64 + rounds * 4 * case.steps


def _run(engine: Engine, case: Case, turn: int) -> float:
    """Milliseconds on the host's clock."""
    time.sleep(_PAUSE_S)
    engine.use()
    start = time.perf_counter()
    if case.decode:
        for _ in range(case.steps):
            engine.step()
    else:
        _prefill(engine, case, turn)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _prefill(engine: Engine, case: Case, turn: int) -> None:
    engine.add(engines.prompts(1, case.size, case.size), 1, f"p{turn}")
    engine.finish()
    engine.tokens = {"p": list(engine.tokens.values())[-1]}


def _row(
    pair: tuple[Engine, Engine], case: Case, rounds: int, ranks: Ranks, folder: Path | None,
    runs: list[tuple[str, list[Activity]]], walls: dict[str, list[float]],
) -> dict[str, Any]:  # fmt: skip
    busy: dict[str, list[float]] = {label: [] for label in _LABELS}
    for label, run in runs:
        busy[label].append(ranks.slowest(profile.busy_ns(run) / 1e3 / case.steps))
    paired = {label: [sum(two) / 2 for two in zip(us[::2], us[1::2], strict=True)] for label, us in busy.items()}
    ratio, aa = (stats.paired_ratio(paired["stock"], paired[other]) for other in ("moetail", CONTROL))
    # In a greedy decode of one batch, every step's tokens follow from all before them.
    tokens = ranks.total(engines.differing(*pair))
    verdict = stats.judge(ratio, aa, tokens)
    why = f"{tokens} tokens or log-probabilities differ: no speed counts" if tokens else verdict.why
    profiles = {arm: _profile([run for label, run in runs if label == arm], case.steps) for arm in ARMS}
    if folder is not None:
        for arm, one in profiles.items():
            record.write(folder / f"{case.name}.{arm}.rank{ranks.rank}.kernels.json", one.content(""))
    deltas = profile_diff.deltas(profiles["stock"], profiles["moetail"])[:8]
    return {
        "case": case.name, "T": case.size, "world_size": ranks.world_size, "rounds": rounds, "steps": case.steps,
        "time": "kernel busy time of a step on the GPU, the slowest rank's",
        "arms": {
            label: {**stats.summary(us), "samples_us": [round(v, 2) for v in us], "peak_bytes": None,
                    "wall_ms": stats.summary([ms / case.steps for ms in walls[label]])["median_us"]}
            for label, us in busy.items()
        },
        "span_us": {arm: one.span_us for arm, one in profiles.items()},
        "activities": {arm: one.activities for arm, one in profiles.items()},
        "ratio": {"b_over_a": ratio.value, "low": ratio.low, "high": ratio.high},
        "aa": {"b_over_a": aa.value, "low": aa.low, "high": aa.high},
        "differing_bits": tokens, "verdict": verdict.word, "why": why,
        "kernels": [
            {"name": d.name, "stock_us": d.a_us, "moetail_us": d.b_us, "stock_calls": d.a_calls,
             "moetail_calls": d.b_calls} for d in deltas
        ],
    }  # fmt: skip


def _profile(runs: list[list[Activity]], steps: int) -> Profile:
    """A mean step of these runs."""
    totals: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for run in runs:
        for activity in run:
            name = short_name(activity.name)
            totals[name] += activity.own_ns
            calls[name] += 1
            examples.setdefault(name, activity.name)
    count = len(runs) * steps
    kernels = [Kernel(name, totals[name] / 1e3 / count, calls[name] / count, examples[name]) for name in totals]
    span = sum(max(a.end_ns for a in run) - min(a.start_ns for a in run) for run in runs)
    return Profile(
        span / 1e3 / count, sum(profile.busy_ns(run) for run in runs) / 1e3 / count,
        tuple(sorted(kernels, key=lambda k: -k.us)), count, activities=sum(calls.values()) // count,
    )  # fmt: skip


def tokens_row(pair: tuple[Engine, Engine], count: int, length: int, tokens: int, ranks: Ranks) -> dict[str, Any]:
    """Greedy tokens of both engines from the same prompts, their throughput and time to the first token.

    Twice each, in the order A B B A: the first of an engine warms it up and does not count for speed.
    """
    arms: dict[str, dict[str, float]] = {}
    for engine in (pair[0], pair[1], pair[1], pair[0]):
        arms[engine.arm] = engines.generate(engine, count, length, tokens)
    wrong = ranks.total(engines.differing(*pair))
    distinct = len({token for said in pair[0].tokens.values() for token, _ in said})
    return {
        "case": f"tokens{count}x{tokens}", "T": count, "world_size": ranks.world_size, "arms": arms,
        "differing_bits": wrong, "distinct_tokens": distinct, "verdict": "slower" if wrong else "same",
        "why": f"{wrong} of {count * tokens} tokens or log-probabilities differ",
    }  # fmt: skip
