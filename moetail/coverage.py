"""Every kernel that a model can launch, and how well the tuned configs of a GPU cover it: asked before serving.

The list follows from the model's facts, the ranks and the plan of its tails, as the launches themselves do: the same
`block_for`, the same `tuned_shape` of each op, the same lookup. Who finalizes adds a kernel behind the experts and
changes none of theirs, so that a deferred call is covered as the finalized one is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from moetail import tuning
from moetail.models import ExpertsFacts, ModelFacts
from moetail.ops.grouped_gemm import block_ranges
from moetail.plan import Place, Range, WorldFacts, plan_tails
from moetail.tuning import Key, Segment, Shape

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """An op's shape, in calls of min_T to max_T tokens, both included. Not `tunable`: its config follows from the call,
    and no file changes it. `later`: a drafter's, which matters less."""

    shape: Shape
    min_T: int
    max_T: int
    tunable: bool = True
    later: bool = False


def launches(facts: ModelFacts, tp: int, max_tokens: int) -> tuple[Launch, ...]:
    """What the MoE layers of a rank launch, from router to tail, and the streams of a decoder with mHC; experts run the
    `triton` backend. What is torch's own is not listed: dense products, shared experts that are no slots, an Engram.

    Raises: ValueError for facts without experts, and for ranks that cannot split them.
    """
    from moetail.ops import route_triton

    if not facts.experts:
        raise ValueError(f"model must have experts whose sizes are known, got {facts.name}")
    plan = plan_tails(facts.layers, WorldFacts(max_tokens, tp))
    found: list[Launch] = []
    for kind in facts.experts:
        if kind.I % tp:
            raise ValueError(f"tp must divide the experts' {kind.I} columns, got {tp}")
        if kind.router is not None:
            shape = route_triton.tuned_shape(kind.E, kind.router, torch.float32)
            found.append(Launch(shape, 1, max_tokens, later=kind.is_drafter))
        for layer in facts.layers:
            if layer.is_moe and layer.is_drafter == kind.is_drafter:
                sized = replace(kind, E=kind.E + layer.shared_slots, K=kind.K + layer.shared_slots)
                found += _experts(sized, kind.I // tp, max_tokens)
                found += _tail(sized, plan.ranges[layer.index], tp, facts.hc)
    if facts.hc:
        found += _streams(facts.H, facts.hc, tp, max_tokens)
    return _joined(found)


def _experts(kind: ExpertsFacts, inner: int, max_tokens: int) -> Iterable[Launch]:
    from moetail.ops import grouped_gemm_triton, permute_triton

    for block, first, last in block_ranges(kind.K, kind.E, max_tokens):
        yield Launch(permute_triton.tuned_shape(kind.E, kind.K, block), first, last, later=kind.is_drafter)
        for N, Kd, is_first in ((2 * inner, kind.H, True), (kind.H, inner, False)):
            shape = grouped_gemm_triton.tuned_shape(
                kind.E, kind.K, N, Kd, block, is_first, is_first, kind.transposed
            )  # fmt: skip
            yield Launch(shape, first, last, later=kind.is_drafter)


def _tail(kind: ExpertsFacts, ranges: Iterable[Range], tp: int, hc: int) -> Iterable[Launch]:
    """What finishes one layer's calls, by place, as `MoELayer` and `models.tails.Arm.boundary` do."""
    across = "_all_reduce" if tp > 1 else ""
    ops = {
        Place.NEXT_LAYER: (f"finalize{across}_{'mhc' if hc else 'norm'}",),
        Place.MOE_LAYER: (f"finalize{across}",),
        Place.EXPERTS: ("finalize", "all_reduce") if tp > 1 else ("finalize",),
    }
    for part in ranges:
        for op in ops[part.place]:
            shape, tunable = _tail_shape(op, kind.K, kind.H, hc)
            yield Launch(shape, max(part.min_T, 1), part.max_T, tunable, kind.is_drafter)


def _tail_shape(op: str, K: int, H: int, hc: int) -> tuple[Shape, bool]:
    """(its shape, whether it is tunable)"""
    from moetail.ops import finalize_mhc_triton, finalize_norm_triton, finalize_triton

    if op == "finalize":
        return finalize_triton.tuned_shape(K, H, BF16), True
    if op == "finalize_norm":
        return finalize_norm_triton.tuned_shape(K, H, BF16), True
    if op == "finalize_mhc":
        return finalize_mhc_triton.tuned_shape(K, H, BF16, hc), True
    dims = (("H", H),) if op == "all_reduce" else (("K", K), ("H", H))
    return Shape(op, (*dims, ("hc", hc)) if op.endswith("mhc") else dims), False


def _streams(H: int, hc: int, tp: int, max_tokens: int) -> Iterable[Launch]:
    """What a decoder with mHC launches beside its tails, as `models.deepseek_v41.Decoder` does at every number of
    tokens: its first layer collapses the streams alone, each sublayer makes mixes, the attention's output is summed
    over the ranks and mixed in, and nobody but mhc mixes in the last layer's, which is finished before."""
    for op in ("mhc_collapse", "mhc_mixes", "mhc", *(("all_reduce_mhc",) if tp > 1 else ())):
        yield Launch(Shape(op, (("H", H), ("hc", hc))), 1, max_tokens, tunable=False)


def _joined(found: Iterable[Launch]) -> tuple[Launch, ...]:
    """One launch a shape and interval of tokens: layers whose calls differ may launch the same."""
    by_shape: dict[tuple[Shape, bool], list[Launch]] = {}
    for one in found:
        by_shape.setdefault((one.shape, one.tunable), []).append(one)
    joined: list[Launch] = []
    for (shape, tunable), same in by_shape.items():
        later = all(one.later for one in same)
        intervals: list[tuple[int, int]] = []
        for first, last in sorted((one.min_T, one.max_T) for one in same):
            if intervals and first <= intervals[-1][1] + 1:
                intervals[-1] = (intervals[-1][0], max(intervals[-1][1], last))
            else:
                intervals.append((first, last))
        joined += [Launch(shape, first, last, tunable, later) for first, last in intervals]
    return tuple(joined)


# What `moetail tune OP --shape` takes.
FORMS = {
    "finalize": "K,H",
    "finalize_norm": "K,H",
    "finalize_mhc": "K,H,hc",
    "permute": "E,K",
    "grouped_gemm": "E,K,H,I",
}


def launches_of(op: str, sizes: tuple[int, ...], max_tokens: int) -> tuple[Launch, ...]:
    """The launches of one op of these sizes, in the order of FORMS, in calls of up to max_tokens tokens."""
    from moetail.ops import finalize_mhc_triton, finalize_norm_triton, finalize_triton

    if op in ("permute", "grouped_gemm"):
        E, K, H, inner = (*sizes, 16, 16)[:4]
        experts = _experts(ExpertsFacts(E, K, H, inner), inner, max_tokens)
        return tuple(one for one in experts if one.shape.op == op)
    if op == "finalize_mhc":
        K, H, hc = sizes
        return (Launch(finalize_mhc_triton.tuned_shape(K, H, BF16, hc), 1, max_tokens),)
    K, H = sizes
    shape = (finalize_triton if op == "finalize" else finalize_norm_triton).tuned_shape(K, H, BF16)
    return (Launch(shape, 1, max_tokens),)


def key_of(shape: Shape, gpu: str, triton: str) -> Key:
    """What a launch of this shape looks up on that GPU under that Triton."""
    kernel = importlib.import_module(f"moetail.ops.{shape.op}_triton")
    return Key(shape, gpu, kernel.kernel_hash(), triton)


@dataclass(frozen=True)
class Covered:
    """A launch and the answers to all its calls; no answers where it is not tunable."""

    launch: Launch
    segments: tuple[Segment, ...]

    def tokens(self, how: str) -> int:
        """How many numbers of tokens are answered so."""
        return sum(part.max_T - part.min_T + 1 for part in self.segments if part.answer.how == how)


def coverage(found: Iterable[Launch], gpu: str, triton: str) -> tuple[Covered, ...]:
    """The answers to every launch, those of the drafter alone last."""

    def segments(one: Launch) -> tuple[Segment, ...]:
        return tuning.segments(key_of(one.shape, gpu, triton), one.min_T, one.max_T) if one.tunable else ()

    return tuple(Covered(one, segments(one)) for one in sorted(found, key=lambda one: one.later))
