"""An arm that keeps what it did: what each MoE layer handed on, and what came out of each boundary."""

from dataclasses import dataclass, field

from moetail.models.tails import Arm


@dataclass(frozen=True)
class WatchedArm(Arm):
    """outputs: (layer, place, the output's type); routed: each layer's experts' output; boundaries: (h, residual')."""

    outputs: list = field(default_factory=list)
    routed: list = field(default_factory=list)
    boundaries: list = field(default_factory=list)

    def moe(self, layer, x):
        self.routed.append(layer._unfinalized(x).take()[0])
        output = super().moe(layer, x)
        self.outputs.append((layer.index, layer.plan.place(layer.index, len(x)), type(output).__name__))
        return output

    def boundary(self, output, tp, **streams):
        h, residual = super().boundary(output, tp, **streams)
        self.boundaries.append((h.clone(), residual.clone()))
        return h, residual
