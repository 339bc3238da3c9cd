"""plan_tails: where each layer's call is finalized, and why. Decided from facts known before the first call.

A call of T tokens is finalized in one of three places: inside the next layer's boundary, in the MoE layer by one fused
kernel, or in the experts, which is the path that every ineligible call keeps. Nothing here depends on a value on the
device, so a captured graph holds one path and all ranks choose alike.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

COVERAGE = ("stale", "heuristic", "bucket", "exact")  # `tuning.HOW`, from worst to best


class Place(enum.Enum):
    """Who finalizes a call."""

    NEXT_LAYER = "finalized in the next layer"
    MOE_LAYER = "finalized here"
    EXPERTS = "finalized in the experts"


class RoutedScale(enum.Enum):
    """Who multiplies the routed sum by the model's routed scale."""

    WEIGHTS = "it is in the routing weights, or there is none"
    TAIL = "the tail multiplies, with the model's rounding"
    RUNNER = "the runner changes the routed sum before the add, in a way that the tail cannot represent"


class Reason(enum.Enum):
    """Why a call is finalized where it is. The first that holds, from top to bottom, decides."""

    DRAFTER = "a drafter layer never asks its experts to stop early"
    CANNOT_STOP = "these experts cannot stop after their second GEMM"
    LORA = "a LoRA on W2 is added inside the experts' own reduction"
    INPUT_WEIGHTS = "the router weights multiply the experts' input, so the rows are not the ones the tail expects"
    NO_SHARED_EXPERTS = "there are no shared experts to add"
    ROUTED_SCALE = "the runner scales the routed sum before the add, which the tail cannot represent"
    PADDING = "the hidden size is padded in a way that the op cannot stride over"
    DATA_PARALLEL = "data parallel: the experts' output is combined across ranks before the add"
    EXPERT_PARALLEL = "expert parallel: the experts' output is combined across ranks before the add"
    SEQUENCE_PARALLEL = "sequence parallel: each rank holds other tokens, and nothing is all-reduced"
    CONTEXT_PARALLEL = "context parallel: each rank holds other tokens"
    SEVERAL_LAUNCHES = "the call needs several launches of the experts"
    MEASURED_SLOWER = "deferring was measured slower at this size"
    WORSE_COVERAGE = "the experts' tuning covers the deferred call worse than the finalized one"
    LAST_LAYER = "last layer of the model"
    LAST_OF_STAGE = "last local layer of the pipeline stage"
    BEFORE_ENGRAM = "the next layer's Engram reads the finished state"
    ONE_RANK = "one rank: there is no all-reduce that the next layer could fuse"
    NEXT_TAKES_NONE = "the next layer's boundary takes finished input only"
    ABOVE_LIMIT = "more tokens than the next layer's boundary takes"
    NEXT_TAKES_IT = "the next layer's boundary finalizes"


@dataclass(frozen=True)
class Measured:
    """What the model's step said of deferring calls of min_T to max_T tokens, both included."""

    min_T: int
    max_T: int
    slower: bool


def measured(slower: Mapping[int, bool]) -> tuple[Measured, ...]:
    """What a gate said of deferring calls of some sizes (T: whether the step got slower), as a layer's `measured`. A
    size speaks for those above the next smaller one; of calls larger than all, nothing is known.

    Raises: ValueError for a size below 1.
    """
    sizes = sorted(slower)
    if sizes and sizes[0] < 1:
        raise ValueError(f"slower must be of calls of 1 token or more, got {sizes[0]}")
    return tuple(Measured(before + 1, T, slower[T]) for before, T in zip([0, *sizes], sizes, strict=False))


@dataclass(frozen=True)
class Covered:
    """How the experts' tuning covers calls of min_T to max_T tokens, both included: words of COVERAGE."""

    min_T: int
    max_T: int
    deferred: str
    finalized: str


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer. The defaults are those of a layer that defers nothing.

    index                the layer's number; a drafter's follow the model's
    has_shared_experts   some are added to the routed sum
    shared_slots         as many are slots of the experts instead (`MoELayer`): nothing is left to add
    experts_max_tokens   the most tokens of one launch of the experts; None: any number
    routed_scale         who applies it
    hidden_padding       columns that a row of the experts' output has beyond H
    padding_is_stride    the padding lies behind each row's H columns, so that a row stride skips it
    boundary_max_tokens  the most tokens that this layer's boundary takes unfinalized from the layer before; 0: none
    alone_max_tokens     the same at one rank, where the boundary has no all-reduce: 0, unless it has more to fuse, as
                         residual streams do
    has_engram           the boundary hands the finished state to an Engram
    tp_group             the name of the group that its output is summed over
    measured             overrides `coverage` where it says something: coverage only predicts
    """

    index: int
    is_moe: bool = True
    can_stop: bool = False
    has_shared_experts: bool = False
    shared_slots: int = 0
    experts_max_tokens: int | None = None
    routed_scale: RoutedScale = RoutedScale.WEIGHTS
    hidden_padding: int = 0
    padding_is_stride: bool = True
    lora_on_w2: bool = False
    weights_on_input: bool = False
    boundary_max_tokens: int = 0
    alone_max_tokens: int = 0
    has_engram: bool = False
    is_drafter: bool = False
    tp_group: str = "tp"
    measured: tuple[Measured, ...] = ()
    coverage: tuple[Covered, ...] = ()


_MOE_FACTS = (
    "can_stop", "has_shared_experts", "shared_slots", "experts_max_tokens", "routed_scale", "hidden_padding",
    "lora_on_w2", "weights_on_input", "measured", "coverage",
)  # fmt: skip


@dataclass(frozen=True)
class WorldFacts:
    """How the model is cut: sizes of the parallel groups, the first layer of each pipeline stage, the largest call."""

    max_tokens: int
    tp: int = 1
    stage_starts: tuple[int, ...] = (0,)
    data_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: int = 1
    context_parallel: int = 1


@dataclass(frozen=True)
class Range:
    """Calls of min_T to max_T tokens, both included."""

    min_T: int
    max_T: int
    place: Place
    reason: Reason

    def __str__(self) -> str:
        return f"{self.min_T}-{self.max_T} tokens: {self.place.value} ({self.reason.value})"


@dataclass(frozen=True)
class Plan:
    """Every MoE layer's ranges, which leave no T from 0 to `world.max_tokens` out. An empty call goes where a call of
    one token goes. A layer without experts has no ranges."""

    layers: tuple[LayerFacts, ...]
    world: WorldFacts
    ranges: tuple[tuple[Range, ...], ...]

    def place(self, layer: int, num_tokens: int) -> Place:
        """Raises: ValueError for a layer without experts and for more tokens than the plan was made for."""
        return self.range_of(layer, num_tokens).place

    def range_of(self, layer: int, num_tokens: int) -> Range:
        """The range that holds such a call. Raises: as `place`."""
        if not _is_count(layer) or layer >= len(self.ranges) or not self.ranges[layer]:
            raise ValueError(f"layer must be a MoE layer of the plan, got {layer!r}")
        if not _is_count(num_tokens) or num_tokens > self.world.max_tokens:
            raise ValueError(f"num_tokens must be from 0 to the plan's {self.world.max_tokens}, got {num_tokens!r}")
        return next(part for part in self.ranges[layer] if num_tokens <= part.max_T)

    def lowered(self, layer: int, next_layer_max_tokens: int) -> Plan:
        """The plan where the layer after `layer` takes at most so many tokens unfinalized. A limit only goes down: one
        above what the boundary takes changes nothing.

        Raises: ValueError for a layer without experts and for a limit below 0.
        """
        self.range_of(layer, 0)
        if not _is_count(next_layer_max_tokens):
            raise ValueError(f"next_layer_max_tokens must be 0 or more, got {next_layer_max_tokens!r}")
        if layer + 1 == len(self.layers):
            return self
        after = self.layers[layer + 1]
        after = replace(
            after,
            boundary_max_tokens=min(after.boundary_max_tokens, next_layer_max_tokens),
            alone_max_tokens=min(after.alone_max_tokens, next_layer_max_tokens),
        )
        return plan_tails((*self.layers[: layer + 1], after, *self.layers[layer + 2 :]), self.world)

    def folded(self) -> list[tuple[int, int, tuple[Range, ...]]]:
        """(first layer, last layer, their ranges): neighbours with equal ranges and shared slots are one entry."""
        entries: list[tuple[int, int, tuple[Range, ...]]] = []
        for index, ranges in enumerate(self.ranges):
            slots = self.layers[index].shared_slots
            if entries and entries[-1][2] == ranges and self.layers[index - 1].shared_slots == slots:
                entries[-1] = (entries[-1][0], index, ranges)
            else:
                entries.append((index, index, ranges))
        return entries


def plan_tails(layers: Iterable[LayerFacts], world: WorldFacts) -> Plan:
    """The place and the reason of every call that every MoE layer can get.

    layers  all layers of the model in order, those without experts too, and then the drafter's; of every pipeline
            stage, so that each rank makes the same plan

    Raises: ValueError naming the fact that is out of range or contradicts another, and the layer.
    """
    layers = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    wrong = [layer for layer in layers if not isinstance(layer, LayerFacts)]
    if wrong:
        raise ValueError(f"layers must be all the model's moetail.plan.LayerFacts, got {wrong[0]!r}")
    if not isinstance(world, WorldFacts):
        raise ValueError(f"world must be a moetail.plan.WorldFacts, got {world!r}")
    _check_world(world)
    _check_layers(layers, world)
    return Plan(layers, world, tuple(_ranges(layer, _next_model_layer(layer, layers), world) for layer in layers))


def _next_model_layer(layer: LayerFacts, layers: tuple[LayerFacts, ...]) -> LayerFacts | None:
    after = layers[layer.index + 1] if layer.index + 1 < len(layers) else None
    return None if after is None or after.is_drafter else after


def _ranges(layer: LayerFacts, after: LayerFacts | None, world: WorldFacts) -> tuple[Range, ...]:
    if not layer.is_moe:
        return ()
    starts = {0}
    for last in (layer.experts_max_tokens, _taken(after, world) if after else None):
        if last is not None:
            starts.add(last + 1)
    intervals: list[Measured | Covered] = [*layer.measured, *layer.coverage]
    for interval in intervals:
        starts |= {interval.min_T, interval.max_T + 1}
    cuts = sorted(T for T in starts if world.max_tokens >= T)
    ranges: list[Range] = []
    for first, beyond in zip(cuts, [*cuts[1:], world.max_tokens + 1], strict=True):
        place, reason = _decide(layer, after, world, max(first, 1))  # an empty call goes where one token goes
        if ranges and (ranges[-1].place, ranges[-1].reason) == (place, reason):
            ranges[-1] = replace(ranges[-1], max_T=beyond - 1)
        else:
            ranges.append(Range(first, beyond - 1, place, reason))
    return tuple(ranges)


def _decide(layer: LayerFacts, after: LayerFacts | None, world: WorldFacts, T: int) -> tuple[Place, Reason]:
    kept = _kept_in_experts(layer, world, T)
    if kept is not None:
        return Place.EXPERTS, kept
    here = _not_passed_on(after, world, T)
    if here is not None:
        return Place.MOE_LAYER, here
    return Place.NEXT_LAYER, Reason.NEXT_TAKES_IT


def _kept_in_experts(layer: LayerFacts, world: WorldFacts, T: int) -> Reason | None:
    never = (
        (layer.is_drafter, Reason.DRAFTER),
        (not layer.can_stop, Reason.CANNOT_STOP),
        (layer.lora_on_w2, Reason.LORA),
        (layer.weights_on_input, Reason.INPUT_WEIGHTS),
        (not layer.has_shared_experts and not layer.shared_slots, Reason.NO_SHARED_EXPERTS),
        (layer.routed_scale is RoutedScale.RUNNER, Reason.ROUTED_SCALE),
        (layer.hidden_padding > 0 and not layer.padding_is_stride, Reason.PADDING),
        (world.data_parallel > 1, Reason.DATA_PARALLEL),
        (world.expert_parallel > 1, Reason.EXPERT_PARALLEL),
        (world.sequence_parallel > 1, Reason.SEQUENCE_PARALLEL),
        (world.context_parallel > 1, Reason.CONTEXT_PARALLEL),
        (layer.experts_max_tokens is not None and layer.experts_max_tokens < T, Reason.SEVERAL_LAUNCHES),
    )
    for holds, reason in never:
        if holds:
            return reason
    for measured in layer.measured:
        if measured.min_T <= T <= measured.max_T:
            return Reason.MEASURED_SLOWER if measured.slower else None
    for covered in layer.coverage:
        if covered.min_T <= T <= covered.max_T:
            worse = COVERAGE.index(covered.deferred) < COVERAGE.index(covered.finalized)
            return Reason.WORSE_COVERAGE if worse else None
    return None


def _not_passed_on(after: LayerFacts | None, world: WorldFacts, T: int) -> Reason | None:
    if after is None:
        return Reason.LAST_LAYER
    if after.index in world.stage_starts:
        return Reason.LAST_OF_STAGE
    if after.has_engram:
        return Reason.BEFORE_ENGRAM
    most = _taken(after, world)
    if most == 0:
        return Reason.ONE_RANK if world.tp == 1 else Reason.NEXT_TAKES_NONE
    return Reason.ABOVE_LIMIT if most < T else None


def _taken(after: LayerFacts, world: WorldFacts) -> int:
    """The most tokens that the boundary of `after` takes unfinalized."""
    return after.alone_max_tokens if world.tp == 1 else after.boundary_max_tokens


def _check_world(world: WorldFacts) -> None:
    for name in ("max_tokens", "tp", "data_parallel", "expert_parallel", "sequence_parallel", "context_parallel"):
        if not _is_count(getattr(world, name)) or getattr(world, name) < 1:
            raise ValueError(f"{name} must be 1 or more, got {getattr(world, name)!r}")
    if world.sequence_parallel not in (1, world.tp):
        raise ValueError(
            f"sequence_parallel must be 1 or tp, whose ranks it uses, got {world.sequence_parallel} at tp {world.tp}"
        )


def _check_layers(layers: tuple[LayerFacts, ...], world: WorldFacts) -> None:
    for layer in layers:
        _check_kinds(layer)
    if not any(layer.is_moe and not layer.is_drafter for layer in layers):
        raise ValueError(f"layers must have a MoE layer, got {len(layers)} without any")
    if [layer.index for layer in layers] != list(range(len(layers))):
        raise ValueError(f"index must count from 0 in the order of layers, got {[layer.index for layer in layers]}")
    model = [layer for layer in layers if not layer.is_drafter]
    if any(layer.is_drafter for layer in layers[: len(model)]):
        raise ValueError("is_drafter must hold for the last layers only, got a drafter layer before the model's last")
    starts = world.stage_starts
    if not isinstance(starts, tuple) or not all(map(_is_count, starts)):
        raise ValueError(f"stage_starts must be a tuple of layer numbers, got {starts!r}")
    if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)) or starts[-1] >= len(model):
        raise ValueError(f"stage_starts must begin with 0 and rise below the {len(model)} layers, got {starts}")
    for layer in layers:
        _check_layer(layer)
    # A drafter may have a group of its own: it takes nothing unfinalized and passes nothing on.
    groups = {layer.tp_group: layer.index for layer in reversed(model)}
    if len(groups) > 1:
        named = ", ".join(f"{name!r} from layer {first}" for name, first in sorted(groups.items(), key=lambda g: g[1]))
        raise ValueError(f"tp_group must be the same in every layer, got {named}")


def _check_kinds(layer: LayerFacts) -> None:
    where = f"in layer {layer.index}"
    if not _is_count(layer.index):
        raise ValueError(f"index must be 0 or more, got {layer.index!r}")
    for field in fields(LayerFacts):
        value, kind = getattr(layer, field.name), type(field.default)
        if kind in (bool, str, RoutedScale) and not isinstance(value, kind):
            raise ValueError(f"{field.name} must be a {kind.__name__} {where}, got {value!r}")
    for name, part in (("measured", Measured), ("coverage", Covered)):
        value = getattr(layer, name)
        if not isinstance(value, tuple) or not all(isinstance(one, part) for one in value):
            raise ValueError(f"{name} must be a tuple of moetail.plan.{part.__name__} {where}, got {value!r}")


def _check_layer(layer: LayerFacts) -> None:
    where = f"in layer {layer.index}"
    if not layer.is_moe:
        for field in fields(LayerFacts):
            if field.name in _MOE_FACTS and getattr(layer, field.name) != field.default:
                raise ValueError(
                    f"{field.name} must be {field.default} {where}, which has no experts, "
                    f"got {getattr(layer, field.name)}"
                )
    for name in ("shared_slots", "hidden_padding", "boundary_max_tokens", "alone_max_tokens"):
        if not _is_count(getattr(layer, name)):
            raise ValueError(f"{name} must be 0 or more {where}, got {getattr(layer, name)!r}")
    if layer.shared_slots and layer.has_shared_experts:
        raise ValueError(f"shared_slots must be 0 {where}, which adds its shared experts, got {layer.shared_slots}")
    most = layer.experts_max_tokens
    if most is not None and not (_is_count(most) and most > 0):
        raise ValueError(f"experts_max_tokens must be 1 or more, or None, {where}, got {most!r}")
    for reader, name in itertools.product(("has_engram", "is_drafter"), ("boundary_max_tokens", "alone_max_tokens")):
        if getattr(layer, reader) and getattr(layer, name):
            raise ValueError(
                f"{name} must be 0 {where}, which reads the finished state ({reader}), got {getattr(layer, name)}"
            )
    _check_intervals("measured", layer.measured, where)
    _check_intervals("coverage", layer.coverage, where)
    for covered in layer.coverage:
        for how in (covered.deferred, covered.finalized):
            if how not in COVERAGE:
                raise ValueError(f"coverage must be one of {', '.join(COVERAGE)} {where}, got {how!r}")


def _check_intervals(name: str, intervals: Sequence[Measured | Covered], where: str) -> None:
    for interval in intervals:
        if not (_is_count(interval.min_T) and _is_count(interval.max_T) and interval.min_T <= interval.max_T):
            raise ValueError(f"{name} must have 0 <= min_T <= max_T {where}, got {interval.min_T} to {interval.max_T}")
    ordered = sorted(intervals, key=lambda interval: interval.min_T)
    for a, b in itertools.pairwise(ordered):
        if b.min_T <= a.max_T:
            raise ValueError(
                f"{name} must not say two things of one T {where}, "
                f"got {a.min_T} to {a.max_T} and {b.min_T} to {b.max_T}"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
