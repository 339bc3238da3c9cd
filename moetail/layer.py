"""MoELayer: router, experts, shared experts and tail; where a call is finalized is its plan's decision.

The experts always stop after their second GEMM and never learn who finalizes: no tuning of theirs can depend on it.
A call then ends in one of the plan's three places, with the same bits in each:

    NEXT_LAYER  `forward_unfinalized` hands a MoEOutput on, and the next layer's boundary finalizes it
    MOE_LAYER   finalize, shared add and the sum over ranks in one op, here
    EXPERTS     finalize, then the add, then the sum over ranks; in pieces where one launch of the experts is too small

The place follows from the number of tokens alone, so a CUDA graph holds one path and a replay cannot take another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.plan import Place, Plan
from moetail.shared_slots import SharedSlots


class Router(Protocol):
    """Chooses each token's experts."""

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, H] -> (topk_weights [T, K], topk_ids [T, K])."""
        ...


class Experts(Protocol):
    """The routed experts, which stop after their second GEMM."""

    def __call__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> UnfinalizedMoEOutput:
        """hidden [T, H], topk_ids and topk_weights [T, K] -> expert rows that are not weighted, and where they are."""
        ...


class MoELayer(torch.nn.Module):
    """One MoE layer of a decoder, on hidden states [T, H].

    router, experts  see their protocols; modules or functions
    shared_experts   hidden [T, H] -> [T, H] each, added in order; this rank's part of them, as the experts' rows are
    shared_gate      hidden [T, H] -> logits [T, 1]: the shared experts' output is multiplied by their sigmoid
    tail             numerics, routed scale, and the workspace of the ranks that the output is summed over
    plan, index      the model's plan, and this layer's number in it
    shared_stream    a CUDA stream for the shared experts, beside the routed ones; None: one after the other
    shared_slots     the shared experts are among `experts`, as slots of weight 1 behind the router's; the experts'
                     `with_shared` makes both. There is nothing to add then, and the bits are others: docs/numerics.md

    Raises: ValueError where a part is of another kind, and where the plan has no such MoE layer, or sends calls to
    EXPERTS under numerics that round once: an add of its own rounds twice. For shared slots that the plan does not
    know, that the experts do not have, beside shared experts or a gate of their own, or under a routed scale, which
    must be in the router's weights instead: here it would multiply the shared slots too, and 1 / scale as their weight
    is exact for a power of two only.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared_experts: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (),
        *,
        plan: Plan,
        index: int,
        tail: TailSpec | None = None,
        shared_gate: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_stream: torch.cuda.Stream | None = None,
        shared_slots: SharedSlots | None = None,
    ) -> None:
        super().__init__()
        _check_parts(router, experts, shared_experts, plan, tail, shared_gate, shared_slots)
        if shared_stream is not None and not isinstance(shared_stream, torch.cuda.Stream):
            raise ValueError(f"shared_stream must be a torch.cuda.Stream or None, got {shared_stream!r}")
        if not isinstance(index, int) or not 0 <= index < len(plan.ranges) or not plan.ranges[index]:
            raise ValueError(f"index must be that of a MoE layer of the plan, got {index!r}")
        self.tail = TailSpec() if tail is None else tail
        self._check_slots(shared_slots, plan.layers[index].shared_slots, experts, shared_experts, shared_gate)
        self.shared_slots = shared_slots
        numerics = self.tail.numerics
        unfused = [part for part in plan.ranges[index] if part.place is Place.EXPERTS]
        if unfused and (numerics.rounding, numerics.zero) != ("two", "keep"):
            raise ValueError(
                f"tail must have numerics that round twice and keep -0 where the plan finalizes in the experts "
                f"({unfused[0]}), got {numerics.name}"
            )
        self.router, self.experts, self.shared_gate = router, experts, shared_gate
        self.shared_experts = shared_experts
        for name, part in (("router", router), ("experts", experts), ("shared_gate", shared_gate)):
            if isinstance(part, torch.nn.Module):
                self.add_module(name, part)
        for i, part in enumerate(shared_experts):
            if isinstance(part, torch.nn.Module):
                self.add_module(f"shared_expert_{i}", part)
        self.plan, self.index, self.shared_stream = plan, index, shared_stream

    def _check_slots(
        self, slots: SharedSlots | None, planned: int, experts: Experts, shared_experts: tuple[object, ...],
        shared_gate: object,
    ) -> None:  # fmt: skip
        count = 0 if slots is None else slots.count
        if count != planned:
            raise ValueError(f"shared_slots must be as many as the plan has for the layer, {planned}, got {count}")
        if slots is None:
            return
        end = slots.first + count
        held = getattr(experts, "num_experts", end)
        if held != end:
            raise ValueError(f"experts must be {slots.first} and {count} shared ones, got {held}: see `with_shared`")
        if shared_experts:
            raise ValueError(f"shared_experts must be empty beside shared slots, got {len(shared_experts)}")
        if shared_gate is not None:
            raise ValueError(f"shared_gate must be None beside shared slots, got {type(shared_gate).__name__}")
        if self.tail.routed_scale != 1.0:
            raise ValueError(
                f"tail must have routed_scale 1 beside shared slots, with the scale in the router's weights, "
                f"got {self.tail.routed_scale}"
            )

    def defer_finalize(self, next_layer_max_tokens: int) -> None:
        """The next layer's boundary takes at most so many tokens unfinalized: called when the model is built, before
        any capture. The limit only goes down."""
        self.plan = self.plan.lowered(self.index, next_layer_max_tokens)

    def finalizes_in_next_layer(self, num_tokens: int) -> bool:
        """Whether a call of so many tokens must be made by `forward_unfinalized`. Raises: ValueError above the plan's
        largest call."""
        return self.plan.place(self.index, num_tokens) is Place.NEXT_LAYER

    def forward_unfinalized(self, hidden: torch.Tensor) -> MoEOutput:
        """The call with its tail still to run. Raises: ValueError for a call that the plan finalizes elsewhere."""
        _check_hidden(hidden)
        if not self.finalizes_in_next_layer(hidden.shape[0]):
            raise ValueError(
                f"hidden must have a number of tokens that the next layer finalizes, got {hidden.shape[0]}: "
                f"{self.plan.range_of(self.index, hidden.shape[0])}"
            )
        return self._unfinalized(hidden)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H], finished here wherever the plan would have finished it: a caller that wants a tensor gets one.

        out  [T, H]: where this rank's finished part is written, for a collective that reads it there. Only where the
             plan finalizes in the experts and there are shared experts, whose add writes it
        """
        _check_hidden(hidden)
        if self.plan.place(self.index, hidden.shape[0]) is Place.EXPERTS:
            if out is not None and not self.shared_experts:
                raise ValueError("out must be None where no add of shared experts writes it, got a tensor")
            return self._separately(hidden, out)
        if out is not None:
            where = self.plan.range_of(self.index, hidden.shape[0])
            raise ValueError(f"out must be None where one op finishes the call, got a tensor: {where}")
        return self._unfinalized(hidden).complete()

    def _unfinalized(self, hidden: torch.Tensor) -> MoEOutput:
        shared = self._fork_shared(hidden)
        weights, ids = self._route(hidden)
        routed = self.experts(hidden, ids, weights)
        return MoEOutput(routed, self._join_shared(shared), self.tail)

    def _separately(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Finalize, add, sum over ranks: three steps, and as many launches of the experts as they need."""
        shared = self._fork_shared(hidden)
        weights, ids = self._route(hidden)
        alone = TailSpec(self.tail.numerics, self.tail.routed_scale)
        most = self.plan.layers[self.index].experts_max_tokens or max(hidden.shape[0], 1)
        pieces = [
            self.experts(h, i, w).finalize(None, alone)
            for h, i, w in zip(hidden.split(most), ids.split(most), weights.split(most), strict=True)
        ]
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        joined = self._join_shared(shared)
        y = y if joined is None else torch.add(y, joined, out=out)
        w = self.tail.workspace
        if w is None or w.world_size == 1:
            return y
        w.admit("hidden", y, y.shape[0])
        return torch.ops.moetail.all_reduce(
            y, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu
        )  # fmt: skip

    def _route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router(hidden)
        return (weights, ids) if self.shared_slots is None else self.shared_slots(weights, ids)

    def _fork_shared(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The shared experts' output; on the side stream, where there is one, behind what made `hidden`."""
        if not self.shared_experts:
            return None
        if self.shared_stream is None:
            return self._shared(hidden)
        self.shared_stream.wait_stream(torch.cuda.current_stream(hidden.device))
        hidden.record_stream(self.shared_stream)
        with torch.cuda.stream(self.shared_stream):
            return self._shared(hidden)

    def _join_shared(self, shared: torch.Tensor | None) -> torch.Tensor | None:
        """The current stream waits for the side stream, and keeps the memory it will read from being given away."""
        if shared is not None and self.shared_stream is not None:
            current = torch.cuda.current_stream(shared.device)
            current.wait_stream(self.shared_stream)
            shared.record_stream(current)
        return shared

    def _shared(self, hidden: torch.Tensor) -> torch.Tensor:
        total = self.shared_experts[0](hidden)
        for expert in self.shared_experts[1:]:
            total = total + expert(hidden)
        return total if self.shared_gate is None else torch.sigmoid(self.shared_gate(hidden)) * total


def _check_hidden(hidden: object) -> None:
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        got = f"shape {tuple(hidden.shape)}" if isinstance(hidden, torch.Tensor) else type(hidden).__name__
        raise ValueError(f"hidden must be a tensor [T, H], got {got}")


def _check_parts(
    router: object, experts: object, shared_experts: object, plan: object, tail: object, shared_gate: object,
    shared_slots: object,
) -> None:  # fmt: skip
    for name, part in (("router", router), ("experts", experts), ("shared_gate", shared_gate)):
        if not callable(part) and not (name == "shared_gate" and part is None):
            raise ValueError(f"{name} must be a module or a function, got {part!r}")
    if not isinstance(shared_experts, (tuple, list)) or not all(callable(part) for part in shared_experts):
        raise ValueError(f"shared_experts must be a tuple of modules or functions, got {shared_experts!r}")
    for name, value, kind in (("tail", tail, TailSpec), ("shared_slots", shared_slots, SharedSlots)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a moetail.{kind.__name__} or None, got {value!r}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be what moetail.plan_tails returns, got {plan!r}")
