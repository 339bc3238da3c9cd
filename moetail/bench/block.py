"""`bench kernels` for what stands before the tail: route, permute, the grouped GEMMs, the experts, the whole block.

Every row has a floor, of what was measured in the same interleaved rounds: the larger of the bytes that must be moved
(the weights of the experts that are hit, the activations once) at a copy's bandwidth, and the FLOPs at the rate of a
large matrix product. Four sets of routing choices rotate, so that few tokens do not find their experts in the L2 cache.
The result is checked before it is timed; what it is compared with is said in `contenders_block.py` and
`contenders_fused_experts.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from moetail.bench import contenders_block, memory, stats, timing
from moetail.bench.contenders_block import SETS, Case, Size
from moetail.bench.contenders_fused_experts import fused_experts
from moetail.routing import MAX_EXPERTS, MAX_TOP_K

FLASH_TP2 = Size(8, 384, 6, 5120, 1152)
E64 = Size(8, 64, 6, 5120, 1152)
DEFAULTS: dict[str, tuple[Size, tuple[int, ...]]] = {
    "route": (FLASH_TP2, (1, 8, 64, 1024, 8192)),
    "permute": (FLASH_TP2, (1, 8, 64, 1024, 8192)),
    "grouped_gemm": (FLASH_TP2, (1, 8, 16, 64, 1024, 4096, 8192)),
    "experts": (FLASH_TP2, (8, 4096, 1, 16, 64, 8192)),
    "fused_experts": (FLASH_TP2, (8, 4096, 1, 16, 64, 8192)),
    "moe_block": (E64, (8, 4096, 1, 2, 4, 16, 64, 256, 1024, 2048, 8192)),
}
CASES = {**contenders_block.CASES, "fused_experts": fused_experts}
ROUTINGS = ("balanced", "random")
_OURS = "moetail"
_GRAPH_US = 300.0  # what one graph takes, at least: its own start is about 3 us
_COPY_BYTES = 2**30  # a larger copy is no faster


def parse(op: str, text: str) -> Size:
    """ "T" alone, at the op's default sizes, or "T,E,K,H,I". Raises: ValueError for another text, and for sizes that
    the op or what it is compared with does not take."""
    parts = text.split(",")
    if len(parts) not in (1, 5) or not all(n.strip().isdecimal() and int(n) > 0 for n in parts):
        raise ValueError(f"shape must be T or T,E,K,H,I, numbers above 0, got {text!r}")
    size = Size(*map(int, parts)) if len(parts) == 5 else replace(DEFAULTS[op][0], T=int(text))
    if not size.K <= size.E <= MAX_EXPERTS or size.K > MAX_TOP_K:
        raise ValueError(f"shape must have K <= E <= {MAX_EXPERTS} and K <= {MAX_TOP_K}, got {text!r}")
    if op not in ("route", "permute") and (size.H % 8 or size.I % 8):
        raise ValueError(f"shape must have H and I that are multiples of 8 (grouped_mm's 16 bytes), got {text!r}")
    return size


def runs(op: str, sizes: Iterable[Size], device: torch.device, rounds: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to measure, by what the progress bar says of it.

    Raises: ValueError where one of them cannot be in memory: on a CPU an allocation that fails later may be the whole
    process, killed.
    """
    base, tokens = DEFAULTS[op]
    chosen = list(sizes) or [replace(base, T=T) for T in tokens]
    for size in chosen:
        memory.check_fits(f"shape {size}", least_bytes(op, size), device, f"the least that {op} holds takes")
    return {
        f"{op} {size} {routing} {part}".strip(): functools.partial(run, op, size, device, routing, part, rounds)
        for size in chosen
        for routing in (ROUTINGS if op in ("experts", "grouped_gemm") else ("random",))
        for part in (("first", "second") if op == "grouped_gemm" else ("",))
    }


def least_bytes(op: str, size: Size) -> int:
    """The weights, and the rows of all choices; before a GEMM the logits or ids of each set."""
    choices, experts = size.T * size.K, size.E * size.I * size.H
    if op in ("route", "permute"):
        return SETS * 4 * (size.T * size.E if op == "route" else choices)
    return 2 * ((2 if op == "grouped_gemm" else 3) * experts + choices * size.H)


def run(op: str, size: Size, device: torch.device, routing: str, part: str, rounds: int) -> dict[str, Any]:
    """A row of the record. Raises: RuntimeError where ours is wrong."""
    torch._dynamo.reset()  # past its recompile limit torch.compile runs eagerly, and would be no baseline
    with torch.no_grad():
        case = CASES[op](size, device, routing, part)
        case.check()
        return _measured(op, size, device, routing, part, rounds, case)


def _measured(
    op: str, size: Size, device: torch.device, routing: str, part: str, rounds: int, case: Case
) -> dict[str, Any]:
    sets = len(case.arms[_OURS])
    programs: dict[str, list[Callable[[], object]]] = {**case.arms, "control": case.arms[_OURS]}
    copied = min(case.num_bytes, _COPY_BYTES)
    programs["copy"] = _copies(copied, 2 if copied > 2**27 else 16, device)
    n = 8192 if device.type == "cuda" else 128
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16)
    programs["matmul"] = [functools.partial(torch.mm, a, b)]
    arms = [_arm(name, calls, device) for name, calls in programs.items()]
    timing.warm_up(arms, seconds=0.2)
    samples, paired = timing.interleave(arms, rounds)
    us = {name: stats.summary(values)["median_us"] / len(programs[name]) for name, values in samples.items()}
    bytes_per_us, flops_per_us = copied / us["copy"], 2 * n**3 / us["matmul"]
    by_bytes, by_flops = case.num_bytes / bytes_per_us, case.flops / flops_per_us
    floor = max(by_bytes, by_flops)
    others = [name for name in case.arms if name != _OURS]
    ratios = {name: stats.paired_ratio(paired[_OURS], paired[name]) for name in others}
    aa = stats.paired_ratio(paired[_OURS], paired["control"])
    return {
        "op": op, "case": " ".join(word for word in (str(size), part, routing) if word), **asdict(size),
        "device": device.type, "dtype": "bfloat16", "part": part, "routing": routing, "sets": sets,
        "experts_hit": case.experts_hit,
        "bytes": case.num_bytes, "flops": case.flops, "us": us[_OURS], "tb_per_s": case.num_bytes / us[_OURS] / 1e6,
        "copy_tb_per_s": bytes_per_us / 1e6, "matmul_tflop_per_s": flops_per_us / 1e6,
        "tflop_per_s": case.flops / us[_OURS] / 1e6, "share_of_copy": by_bytes / us[_OURS], "floor_us": floor,
        "bound_by": "bytes" if by_bytes >= by_flops else "flops", "share_of_floor": floor / us[_OURS],
        "error": case.error(),
        "arms": {
            name: {**stats.summary(per_call), "samples_us": [round(v, 3) for v in per_call]}
            for name, per_call in ((m, [v / len(programs[m]) for v in values]) for m, values in samples.items())
        },
        "ratios": {name: {"value": r.value, "low": r.low, "high": r.high} for name, r in ratios.items()},
        "aa": {"b_over_a": aa.value, "low": aa.low, "high": aa.high}, "not_installed": list(case.missing),
    }  # fmt: skip


def _arm(name: str, calls: list[Callable[[], object]], device: torch.device) -> timing.Arm:
    def program() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        return timing.cpu_arm(name, program)
    once = timing.cuda_graph_arm(name, program)
    once.run()
    repeats = math.ceil(_GRAPH_US / once.run())
    return once if repeats == 1 else timing.cuda_graph_arm(name, program, repeats=repeats)


def _copies(num_bytes: int, sets: int, device: torch.device) -> list[Callable[[], object]]:
    """Elementwise copies that move num_bytes each: half of them read, half written."""
    count = max(1, num_bytes // 4)
    pairs = [torch.randn(2, count, device=device, dtype=torch.bfloat16).unbind() for _ in range(sets)]
    return [functools.partial(torch.mul, source, 1.0, out=out) for source, out in pairs]
