"""What is known about a model before it is built: enough to plan its tails and to name every kernel it launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moetail.plan import LayerFacts
from moetail.routing import Router


@dataclass(frozen=True)
class ExpertsFacts:
    """One kind of MoE layer: E experts with I columns inside, before ranks split them.

    router      None: code that is not ours routes
    transposed  the weights are [E, in, out]
    """

    E: int
    K: int
    H: int
    I: int  # noqa: E741
    router: Router | None = None
    is_drafter: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """layers: the model's and then its drafter's. stage_cuts: the layers at which a pipeline stage may start, None for
    any. experts: the kinds of MoE layers. hc: the residual streams of a decoder with mHC, 0 for one residual."""

    name: str
    layers: tuple[LayerFacts, ...]
    K: int
    H: int
    stage_cuts: tuple[int, ...] | None = None
    experts: tuple[ExpertsFacts, ...] = ()
    hc: int = 0

    def with_shared_slots(self, count: int) -> ModelFacts:
        """These facts with the shared experts of every layer as so many slots of its experts (0: as they are).

        Raises: ValueError where there are no shared experts.
        """
        if count == 0:
            return self
        if not any(layer.has_shared_experts for layer in self.layers):
            raise ValueError(f"shared_slots must be 0 for {self.name}, which has no shared experts, got {count}")
        layers = (
            replace(layer, has_shared_experts=False, shared_slots=count) if layer.has_shared_experts else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def check_tp(self, tp: int) -> None:
        """Raises: ValueError where the experts' columns cannot be split among `tp` ranks."""
        for kind in self.experts:
            if kind.I % tp:
                raise ValueError(f"tp must divide the experts' {kind.I} columns, got {tp}")

    def stage_starts(self, pp: int) -> tuple[int, ...]:
        """The first layer of each of `pp` stages of equal length, to the layer.

        Raises: ValueError where the model has fewer layers, or may not be cut there.
        """
        count = sum(not layer.is_drafter for layer in self.layers)
        if not 1 <= pp <= count:
            raise ValueError(f"pp must be from 1 to the {count} layers of {self.name}, got {pp}")
        starts = tuple(stage * count // pp for stage in range(pp))
        if self.stage_cuts is not None and not set(starts[1:]) <= set(self.stage_cuts):
            raise ValueError(
                f"pp must cut {self.name} at layers {', '.join(map(str, self.stage_cuts))} only, got {pp}, which cuts "
                f"at {', '.join(map(str, starts[1:]))}"
            )
        return starts
