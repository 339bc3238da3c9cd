"""`moetail bench kernels`: one op on one rank, against the kernels people use today, in one process and interleaved.

Bits first: a contender of ours whose bits fail stops the run, and no time is printed. Inputs rotate: over three times
the L2 cache (cold), within a fourth of it (warm), or as many sets as one asks for. The copy that the bandwidth is
compared with moves as many bytes as the op, in the same run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetail.bench import (
    contenders_finalize,
    contenders_finalize_mhc,
    contenders_finalize_norm,
    contenders_finalize_norm_fp8,
    memory,
    stats,
    timing,
)
from moetail.bench.contenders import Contender, KernelInputs, Op
from moetail.numerics import Numerics
from moetail.ops.finalize import MAX_K
from moetail.testing import assert_same_bits

# The models' shapes (K, H) that the numbers to beat were measured at.
SHAPES = ((6, 5120), (8, 7168), (10, 2048))
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384)
DEFAULT = tuple((T, K, H) for K, H in SHAPES for T in TOKENS)
MODES = ("chained", "producer")
OPS: dict[str, Op] = {
    op.name: op
    for op in (contenders_finalize.OP, contenders_finalize_norm.OP, contenders_finalize_norm_fp8.OP,
               contenders_finalize_mhc.OP)
}  # fmt: skip
# An arm that does a part of the op only.
PARTS = ("finalize alone", "finalize_norm alone")
L2 = ("cold", "warm")
_MAX_SETS = 2048
# What one graph takes, at least: its own start is about 3 us, and must not show.
_GRAPH_US = 300.0


@dataclass(frozen=True)
class KernelResult:
    """One shape in one mode; samples in microseconds a call, by contender (between edges: with them)."""

    op: str
    device: str
    T: int
    K: int
    H: int
    mode: str
    l2: str
    sets: int
    num_bytes: int
    samples: dict[str, list[float]]
    ratios: dict[str, stats.Interval]
    aa: stats.Interval
    bits: dict[str, str]
    missing: tuple[str, ...]

    def median_us(self, name: str) -> float:
        return float(stats.summary(self.samples[name])["median_us"])

    def cost_us(self, name: str) -> float:
        """What the op takes; between edges, what it adds to them."""
        return self.median_us(name) - (self.median_us("edges alone") if self.mode == "producer" else 0.0)

    def over_part_us(self) -> float | None:
        """What the op takes beyond its first part alone; None where that is no arm."""
        part = next((name for name in PARTS if name in self.samples), None)
        return None if part is None else self.median_us("moetail TRTLLM") - self.median_us(part)

    def share_of_copy(self, name: str) -> float | None:
        """None between edges: there the rows come from the cache that the producer left them in."""
        return None if self.mode == "producer" else self.median_us("copy") / self.cost_us(name)

    def row(self) -> dict[str, Any]:
        """This shape in a record. `ratio` is baseline over ours: above 1 is a win."""
        name = "moetail TRTLLM"
        return {
            "op": self.op, "case": f"T={self.T} K={self.K} H={self.H} {self.mode}", "T": self.T, "K": self.K,
            "H": self.H, "device": self.device, "dtype": "bfloat16", "mode": self.mode, "l2": self.l2,
            "sets": self.sets, "bytes": self.num_bytes, "us": self.cost_us(name),
            "tb_per_s": None if self.mode == "producer" else self.num_bytes / self.cost_us(name) / 1e6,
            "share_of_copy": self.share_of_copy(name), "over_part_us": self.over_part_us(),
            "arms": {
                arm: {**stats.summary(values), "samples_us": [round(v, 3) for v in values], "bits": self.bits.get(arm)}
                for arm, values in self.samples.items()
            },
            "ratios": {arm: {"value": r.value, "low": r.low, "high": r.high} for arm, r in self.ratios.items()},
            "aa": {"b_over_a": self.aa.value, "low": self.aa.low, "high": self.aa.high},
            "not_installed": list(self.missing),
        }  # fmt: skip


def check(T: int, K: int, H: int, device: torch.device, mode: str, l2: str) -> None:
    """Raises: ValueError for more slots than an op takes, rows that cannot be in memory, an unknown mode or l2, or
    "producer" on a CPU."""
    memory.check_fits(f"shape {T},{K},{H}", 2 * T * K * H * 2, device, "one set of its expert rows takes")
    if K > MAX_K:
        raise ValueError(f"shape must have K <= {MAX_K} slots, got K={K}")
    if l2 not in L2 and not (l2.isdecimal() and 0 < int(l2) <= _MAX_SETS):
        raise ValueError(f"l2 must be one of {', '.join(L2)} or a number of sets from 1 to {_MAX_SETS}, got {l2!r}")
    if mode not in MODES or (mode == "producer" and device.type != "cuda"):
        raise ValueError(
            f"mode must be one of {', '.join(MODES)} (producer on cuda only), got {mode!r} on {device.type}"
        )


def run_shape(
    T: int, K: int, H: int, device: torch.device, mode: str = "chained", l2: str = "cold", rounds: int = 20,
    op: str = "finalize",
) -> KernelResult:  # fmt: skip
    """Measure one shape of one of OPS. `l2`: cold, warm, or a number of sets of inputs. One set that does not fit in
    a fourth of the L2 cache is cold whatever `l2` says, and the result says so.

    Raises: ValueError as `check` does; RuntimeError where our own bits fail.
    """
    check(T, K, H, device, mode, l2)
    case = OPS[op]
    torch._dynamo.reset()  # past its recompile limit torch.compile runs eagerly, and would be no baseline
    baselines, missing = case.contenders()
    wanted = dict.fromkeys([Numerics.TRTLLM, *(b.against for b in baselines)])
    mine = [case.ours(numerics) for numerics in wanted if _defined(numerics, T, K, H, device)]
    baselines = [b for b in baselines if b.against in {m.numerics for m in mine}]
    one = case.inputs(T, K, H, device)
    num_bytes = one.num_bytes(Numerics.TRTLLM)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 64 * 2**20
    sets = _num_sets(num_bytes, l2_bytes, l2)
    inputs = [one, *(case.inputs(T, K, H, device) for _ in range(sets - 1))]
    bits = {c.name: _bits(case, c, one) for c in (*mine, *baselines)}

    named = {c.name: c for c in (*mine, *baselines)} | {"control": mine[0]}
    programs = {name: [_in_mode(mode, c, x) for x in inputs] for name, c in named.items()}
    programs["copy"] = _copies(num_bytes, sets, device)
    if mode == "producer":
        programs["edges alone"] = [_in_mode(mode, None, x) for x in inputs]
    arms = [_arm(name, calls, num_bytes, device) for name, calls in programs.items()]
    timing.warm_up(arms, seconds=0.2)
    samples, paired = timing.interleave(arms, rounds)
    by_numerics = {m.numerics: m.name for m in mine}
    # Between edges, an op's cost is what it adds to them.
    edges_alone = paired.get("edges alone", [0.0] * rounds)
    cost = {name: [us - e for us, e in zip(values, edges_alone, strict=True)] for name, values in paired.items()}
    ratios = {b.name: stats.paired_ratio(cost[by_numerics[b.against]], cost[b.name]) for b in baselines}
    aa = stats.paired_ratio(cost[mine[0].name], cost["control"])
    cold = sets * num_bytes >= l2_bytes
    per_call = {name: [us / sets for us in values] for name, values in samples.items()}
    return KernelResult(
        op, device.type, T, K, H, mode, "cold" if cold else "warm", sets, num_bytes, per_call, ratios, aa, bits,
        tuple(missing),
    )  # fmt: skip


def _num_sets(num_bytes: int, l2_bytes: int, l2: str) -> int:
    """How many sets of inputs rotate: three L2 caches full, at most a fourth of one, or the number asked for."""
    if l2 not in L2:
        return int(l2)
    if l2 == "warm" and num_bytes <= l2_bytes // 4:
        return min(8, l2_bytes // 4 // num_bytes)
    return min(_MAX_SETS, max(2, -(-3 * l2_bytes // num_bytes)))


def _defined(numerics: Numerics, T: int, K: int, H: int, device: torch.device) -> bool:
    try:
        numerics.resolve(T, K, H, device.type, torch.bfloat16, torch.float32)
    except ValueError:
        return False
    return True


def _bits(case: Op, contender: Contender, x: KernelInputs) -> str:
    """The numerics that the contender's output has, or "differs". Raises: RuntimeError for ours."""
    numerics = contender.numerics or contender.against
    x.out.fill_(float("nan"))
    got = contender.bind(x)()
    want = case.reference(x, numerics)
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        if contender.name.startswith("moetail"):
            raise RuntimeError(f"{contender.name} has wrong bits and is not timed: {error}") from None
        return "differs"
    return numerics.name


def _in_mode(mode: str, contender: Contender | None, x: KernelInputs) -> Callable[[], object]:
    """The contender's program on these inputs, in that mode between a producer and a consumer; None: those alone."""
    if mode == "chained":
        assert contender is not None
        return contender.bind(x)
    from moetail.bench import edges

    numerics = Numerics.TRTLLM if contender is None else contender.against
    read = x.finalize_args(numerics)[0]
    source = x.rows if read is x.slot_rows else x.slot_rows
    program = (lambda: x.shared) if contender is None else contender.bind(x)
    sink = torch.empty_like(x.shared)

    def between_edges() -> None:
        edges.produce(source, read)
        edges.consume(program(), x.shared, sink)

    return between_edges


def _arm(name: str, calls: list[Callable[[], object]], num_bytes: int, device: torch.device) -> timing.Arm:
    def program() -> None:
        for call in calls:
            call()

    if device.type == "cpu":
        return timing.cpu_arm(name, program)
    least_us = max(1.0, num_bytes / 4e6)  # a call at 4 TB/s, and a launch
    return timing.cuda_graph_arm(name, program, repeats=math.ceil(_GRAPH_US / least_us / len(calls)))


def _copies(num_bytes: int, sets: int, device: torch.device) -> list[Callable[[], object]]:
    """Elementwise copies of num_bytes in all. A kernel, not cudaMemcpy: inside a graph that ran at 2.8 TB/s on an H200
    where this ran at 4.3."""
    count = max(1, num_bytes // 4)
    pairs = [torch.randn(2, count, device=device, dtype=torch.bfloat16).unbind() for _ in range(sets)]
    copy = torch.Tensor.copy_ if device.type == "cpu" else _copy_kernel
    return [functools.partial(copy, b, a) for a, b in pairs]


def _copy_kernel(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.mul(source, 1.0, out=out)
