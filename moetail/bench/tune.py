"""`moetail tune finalize`: measure the configs of a kernel on this GPU and keep those that beat its heuristic.

A config is timed between a producer and a consumer, as a model runs it: tuned on calls chained to themselves, the one
found for T = 16, H = 5120 took 1.9 us there, and the heuristic's 1.2 (H200). Every candidate is timed in the same
interleaved rounds as the heuristic's config, and replaces it only where the whole paired interval lies 3 % below it, so
that tuning never picks what is slower: of 45 shapes on an H200 16 were won by 1 to 2 %, one of them by a config that
then ran at two speeds, 1.1 and 1.8 us. Bits are checked once for each candidate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from moetail import reference, tuning
from moetail.bench import edges, stats, timing
from moetail.bench.contenders import KernelInputs
from moetail.numerics import Numerics
from moetail.ops import finalize_triton
from moetail.ops.finalize_triton import FinalizeConfig
from moetail.testing import assert_same_bits

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAST_T = 32768
CANDIDATES = tuple(
    FinalizeConfig(block, warps, columns_first)
    for columns_first in (False, True)
    for block in (128, 256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 2 <= block // (32 * warps) <= 32
)
_SETS_BYTES = 192 * 2**20
_WORTH = 0.97


def tune_shape(
    K: int, H: int, device: torch.device, on_T: Callable[[int, int, str], None] = lambda done, total, note: None
) -> dict[str, Any]:
    """The entry for one shape (bf16 rows). `on_T(done, total, note)` is called after each T; a T that does not fit in
    memory is left to the heuristic, and the note says so."""
    found: list[tuple[int, dict[str, int]]] = []
    for done, T in enumerate(TOKENS, start=1):
        try:
            config, note = best_config(T, K, H, device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            config, note = finalize_triton.heuristic(T, H, 2), "out of memory: the heuristic"
        found.append((T, asdict(config)))
        on_T(done, len(TOKENS), f"T={T} {note}")
    return tuning.entry(finalize_triton.tuning_key(device, K, H, torch.bfloat16), found, LAST_T)


def best_config(T: int, K: int, H: int, device: torch.device, rounds: int = 8) -> tuple[FinalizeConfig, str]:
    """The fastest config at T, and a word on it."""
    guess = finalize_triton.heuristic(T, H, 2)
    one = KernelInputs.random(T, K, H, device)
    sets = max(2, min(64, _SETS_BYTES // one.num_bytes(Numerics.TRTLLM)))
    inputs = [one, *(KernelInputs.random(T, K, H, device) for _ in range(sets - 1))]
    one.rows.copy_(one.slot_rows)  # what the producer writes
    want = reference.finalize(*one.finalize_args(Numerics.TRTLLM))
    widest = 2 * max(H, 128)
    sink = torch.empty_like(one.out)
    configs = list(dict.fromkeys((guess, *(c for c in CANDIDATES if c.block < widest))))
    arms = []
    for config in configs:
        one.out.fill_(float("nan"))
        _run(one, config)
        assert_same_bits(one.out, want)
        arms.append(timing.cuda_graph_arm(str(config), functools.partial(_run_all, inputs, config, sink)))
    timing.warm_up(arms, seconds=0.05)
    _, paired = timing.interleave(arms, rounds)
    medians = {config: stats.summary(paired[str(config)])["median_us"] for config in configs}
    best = min(configs, key=lambda config: medians[config])
    ratio = stats.paired_ratio(paired[str(guess)], paired[str(best)])
    if best == guess or ratio.high >= _WORTH:
        return guess, "the heuristic"
    order = " columns first" if best.columns_first else ""
    return best, f"{best.block}x{best.warps}{order}, {ratio} of the heuristic"


def _run(x: KernelInputs, config: FinalizeConfig) -> None:
    finalize_triton.launch(
        x.rows, x.row_map, x.weights, x.shared, None, None, 1.0, Numerics.TRTLLM, x.out, config
    )  # fmt: skip


def _run_all(inputs: list[KernelInputs], config: FinalizeConfig, sink: torch.Tensor) -> None:
    for x in inputs:
        edges.produce(x.slot_rows, x.rows)
        _run(x, config)
        edges.consume(x.out, x.shared, sink)
