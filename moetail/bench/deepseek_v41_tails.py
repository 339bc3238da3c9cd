"""A decoder step's tails alone: every sublayer's end, recorded once and run again by each arm on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moetail.bench import timing
from moetail.bench.forward import differing_bits
from moetail.bench.ranks import Ranks
from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.layer import MoELayer
from moetail.models.parallel import TensorParallel
from moetail.models.tails import Arm, Output, Partial
from moetail.plan import Place, Plan

_ROUNDS = 10
# Input sets rotate until they leave any cache, or there are this many.
_ROTATED_BYTES, _MAX_SETS = 256 * 1024 * 1024, {"cuda": 16, "cpu": 1}


@dataclass(frozen=True)
class Attention:
    """This rank's part y [T, H], and the keyword arguments of its boundary."""

    y: torch.Tensor
    streams: Mapping[str, Any]


@dataclass(frozen=True)
class MoE:
    """What a layer's experts gave. streams None: the output is finished and no more, before an Engram or a stage."""

    index: int
    routed: UnfinalizedMoEOutput
    shared: torch.Tensor
    streams: Mapping[str, Any] | None


@dataclass(frozen=True)
class RecordingArm(Arm):
    """Runs, and keeps every sublayer's end in `calls`. The experts run twice."""

    calls: list[Attention | MoE] = field(default_factory=list)
    pending: list[MoE] = field(default_factory=list)

    def moe(self, layer: MoELayer, x: torch.Tensor) -> Output:
        routed, shared, _ = layer._unfinalized(x).take()
        assert shared is not None
        self.pending.append(MoE(layer.index, routed, shared, None))
        return super().moe(layer, x)

    def boundary(self, output: Output, tp: TensorParallel, **streams: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pending:
            self.calls.append(replace(self.pending.pop(), streams=streams))
        else:
            assert isinstance(output, Partial)
            self.calls.append(Attention(output.y.clone(), streams))
        return super().boundary(output, tp, **streams)

    def finished(self, output: Output, tp: TensorParallel) -> torch.Tensor:
        if self.pending:
            self.calls.append(self.pending.pop())
        return super().finished(output, tp)


def run(
    call: Attention | MoE, arm: Arm, plan: Plan, tp: TensorParallel, y: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """One sublayer's end, as the decoder runs it. `y`: instead of an attention's output; sums in place change it."""
    if isinstance(call, Attention):
        return arm.boundary(Partial(call.y.clone() if y is None else y), tp, **call.streams)
    output: Output
    if not arm.fuses:
        routed = call.routed.finalize(None, TailSpec())
        output = Partial(torch.add(routed, call.shared, out=arm.collective.buffer))
    else:
        passed = arm.passes_on and plan.place(call.index, len(call.shared)) is Place.NEXT_LAYER
        pending = MoEOutput(call.routed, call.shared, TailSpec(workspace=tp.workspace))
        output = pending if passed else pending.complete()
    return (arm.finished(output, tp),) if call.streams is None else arm.boundary(output, tp, **call.streams)


def measure(
    calls: list[Attention | MoE], arms: Mapping[str, Arm], plan: Plan, tp: TensorParallel, ranks: Ranks,
    device: torch.device,
) -> dict[str, list[float]]:  # fmt: skip
    """By arm, microseconds of all calls together.

    Raises: RuntimeError where the arms differ in a bit.
    """
    outputs = {name: [t.clone() for call in calls for t in run(call, arm, plan, tp)] for name, arm in arms.items()}
    first = next(iter(outputs.values()))
    if ranks.total(sum(differing_bits(tuple(first), tuple(other)) for other in outputs.values())):
        raise RuntimeError("the tails of the arms differ in their bits")
    size = sum(call.routed.rows.numel() * 2 for call in calls if isinstance(call, MoE))
    sets = [[_copied(call) for call in calls] for _ in range(min(_MAX_SETS[device.type], 1 + _ROTATED_BYTES // size))]

    zeros = torch.zeros_like(next(call.y for call in calls if isinstance(call, Attention)))

    def program(arm: Arm) -> Callable[[], None]:
        y = arm.collective.buffer if arm.collective.buffer is not None else zeros

        def all_calls() -> None:
            for one in sets:
                for call in one:
                    run(call, arm, plan, tp, y)

        return all_calls

    make = timing.cuda_graph_arm if device.type == "cuda" else timing.cpu_arm
    timed = [make(name, program(arm), ranks.rendezvous) for name, arm in arms.items()]
    timing.warm_up(timed, seconds=0.1, slowest=ranks.slowest)
    samples, _ = timing.interleave(timed, _ROUNDS, slowest=ranks.slowest)
    return {name: [us / len(sets) for us in values] for name, values in samples.items()}


def _copied(call: Attention | MoE) -> Attention | MoE:
    streams = None if call.streams is None else {**call.streams, "residual": call.streams["residual"].clone()}
    if isinstance(call, Attention):
        assert streams is not None
        return Attention(call.y.clone(), streams)
    return replace(
        call, routed=replace(call.routed, rows=call.routed.rows.clone()), shared=call.shared.clone(), streams=streams
    )
