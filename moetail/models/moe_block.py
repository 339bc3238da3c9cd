"""A MoE block: router, routed experts that stop after their second GEMM, shared expert, as a `MoELayer`.

The experts always return expert-sorted rows without their weights; who weights, un-permutes and adds them is the tail's
business (`tails.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from moetail.contract import TailSpec, UnfinalizedMoEOutput
from moetail.experts import TritonExperts
from moetail.layer import MoELayer
from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.dense import product_f32, swiglu
from moetail.models.parameters import Parameters
from moetail.ops.route import route
from moetail.plan import Plan
from moetail.routing import Router
from moetail.shared_slots import SharedSlots


@dataclass(frozen=True)
class MoEParameters:
    """gate [E, H] bf16, bias [E] fp32; of this rank's I columns, the shared expert behind the E routed ones:
    experts_w13 [E+1, 2 * I, H], gate rows first, experts_w2 [E+1, H, I]."""

    gate: torch.Tensor
    bias: torch.Tensor
    experts_w13: torch.Tensor
    experts_w2: torch.Tensor
    slots: SharedSlots

    @property
    def w13(self) -> torch.Tensor:
        return self.experts_w13[:-1]

    @property
    def w2(self) -> torch.Tensor:
        return self.experts_w2[:-1]

    @property
    def shared_w13(self) -> torch.Tensor:
        return self.experts_w13[-1]

    @property
    def shared_w2(self) -> torch.Tensor:
        return self.experts_w2[-1]

    @staticmethod
    def random(parameters: Parameters, name: str, config: DeepseekV41Config, E: int) -> MoEParameters:
        H, I = config.hidden_size, config.moe_intermediate_size  # noqa: E741

        def w13(p: Parameters, expert: str) -> torch.Tensor:
            return torch.cat([p.linear(f"{expert}.{w}", I, H, split=0) for w in ("w1", "w3")])

        def w2(p: Parameters, expert: str) -> torch.Tensor:
            return p.linear(f"{expert}.w2", H, I, split=1)

        experts = [*(f"{name}.experts.{e}" for e in range(E)), f"{name}.shared_experts"]
        return MoEParameters(
            parameters.linear(f"{name}.gate.weight", E, H),
            parameters.normal(f"{name}.gate.bias", E, std=0.1, dtype=torch.float32),
            parameters.stacked(experts, w13),
            parameters.stacked(experts, w2),
            SharedSlots.of(E, 1, parameters.device),
        )


def router(top_k: int, config: DeepseekV41Config) -> Router:
    """The router's bias selects and never weighs; the routed scale is in the weights, nobody multiplies by it again.

    Text only: image tokens, which select with a bias of their own, are left out.
    """
    return Router(top_k, "sqrtsoftplus", renormalize=True, routed_scale=config.routed_scaling_factor)


def moe_layer(
    p: MoEParameters, router: Router, limit: float, plan: Plan, index: int, tail: TailSpec,
    expert_ids: torch.Tensor | None = None, shared_stream: torch.cuda.Stream | None = None,
) -> MoELayer:  # fmt: skip
    """These parameters as a MoELayer, which holds none of its own: making one costs a few microseconds on the host.

    The shared expert is a slot of the experts where the plan has it as one.
    expert_ids  [T, K] int32: where the tokens go whatever the router chose; the weights stay the router's
    """
    as_slot = plan.layers[index].shared_slots > 0

    def chosen(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = route(product_f32(hidden, p.gate.T), router, p.bias)
        return weights, ids if expert_ids is None else expert_ids

    def experts(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> UnfinalizedMoEOutput:
        w13, w2 = (p.experts_w13, p.experts_w2) if as_slot else (p.w13, p.w2)
        return expert_rows(hidden, topk_ids, topk_weights, w13, w2, limit)

    def shared(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(swiglu(functional.linear(x, p.shared_w13), limit), p.shared_w2)

    return MoELayer(
        chosen, experts, () if as_slot else (shared,), plan=plan, index=index, tail=tail, shared_stream=shared_stream,
        shared_slots=p.slots if as_slot else None,
    )  # fmt: skip


def expert_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float
) -> UnfinalizedMoEOutput:
    """x [T, H] through the experts ids [T, K]: one row a slot, sorted by expert. No host sync.

    Not `GroupedMMExperts`: at eight tokens torch's kernel takes 1.6 times as long, and how long depends on the
    addresses of its operands: five captures of one program were 0.6 % apart, each in every replay (H200)."""
    return TritonExperts(w13, w2, limit=limit)(x, ids, weights)
