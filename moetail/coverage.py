"""Every kernel that a model can launch, and how well the tuned configs of a GPU cover it: asked before serving.

The list follows from the model's facts, the ranks and the plan of its tails, as the launches themselves do: the same
`block_for`, the same `tuned_shape` of each op, the same lookup. Who finalizes adds a kernel behind the experts and
changes none of theirs, so that a deferred call is covered as the finalized one is.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moetail import tuning
from moetail.models import ExpertsFacts, ModelFacts
from moetail.ops.grouped_gemm import block_ranges
from moetail.plan import Place, Plan, WorldFacts, plan_tails
from moetail.tuning import Key, Segment, Shape

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Launch:
    """An op's shape, in calls of min_T to max_T tokens, both included. Not `tunable`: the op has one config. `later`:
    a drafter's, which matters less."""

    shape: Shape
    min_T: int
    max_T: int
    tunable: bool = True
    later: bool = False


def launches(facts: ModelFacts, tp: int, max_tokens: int) -> tuple[Launch, ...]:
    """What the MoE layers of a rank launch, from router to tail; experts run the `triton` backend.

    Raises: ValueError for facts without experts, and for ranks that cannot split them.
    """
    if not facts.experts:
        raise ValueError(f"model must have experts whose sizes are known, got {facts.name}")
    plan = plan_tails(facts.layers, WorldFacts(max_tokens, tp))
    found: list[Launch] = []
    for kind in facts.experts:
        if kind.I % tp:
            raise ValueError(f"tp must divide the experts' {kind.I} columns, got {tp}")
        found += [*_experts(kind, kind.I // tp, max_tokens), *_tails(kind, plan, tp)]
    return tuple(dict.fromkeys(found))


def _experts(kind: ExpertsFacts, inner: int, max_tokens: int) -> Iterable[Launch]:
    from moetail.ops import grouped_gemm_triton, permute_triton, route_triton

    if kind.router is not None:
        shape = route_triton.tuned_shape(kind.E, kind.router, torch.float32)
        yield Launch(shape, 1, max_tokens, later=kind.is_drafter)
    for block, first, last in block_ranges(kind.K, kind.E, max_tokens):
        yield Launch(permute_triton.tuned_shape(kind.E, kind.K, block), first, last, later=kind.is_drafter)
        for N, Kd, is_first in ((2 * inner, kind.H, True), (kind.H, inner, False)):
            shape = grouped_gemm_triton.tuned_shape(
                kind.E, kind.K, N, Kd, block, is_first, is_first, kind.transposed
            )  # fmt: skip
            yield Launch(shape, first, last, later=kind.is_drafter)


def _tails(kind: ExpertsFacts, plan: Plan, tp: int) -> Iterable[Launch]:
    from moetail.ops import finalize_triton

    shape = finalize_triton.tuned_shape(kind.K, kind.H, BF16)
    for layer, ranges in zip(plan.layers, plan.ranges, strict=True):
        if layer.is_drafter != kind.is_drafter:
            continue
        for part in ranges:
            first, last = max(part.min_T, 1), part.max_T
            if part.place is Place.EXPERTS or (part.place is Place.MOE_LAYER and tp == 1):
                yield Launch(shape, first, last, later=kind.is_drafter)
            else:
                op = "finalize_all_reduce" if part.place is Place.MOE_LAYER else "finalize_all_reduce_mhc"
                yield Launch(Shape(op, shape.dims), first, last, tunable=False)


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
    """A launch and the answers to all its calls."""

    launch: Launch
    segments: tuple[Segment, ...]

    def tokens(self, how: str) -> int:
        """How many numbers of tokens are answered so."""
        return sum(part.max_T - part.min_T + 1 for part in self.segments if part.answer.how == how)


def coverage(found: Iterable[Launch], gpu: str, triton: str) -> tuple[Covered, ...]:
    """The answers to every tunable launch."""
    found = [one for one in found if one.tunable]
    keys = [key_of(one.shape, gpu, triton) for one in found]
    return tuple(Covered(one, tuning.segments(key, one.min_T, one.max_T)) for one, key in zip(found, keys, strict=True))
