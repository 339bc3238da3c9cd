"""A MoE block up to its tail: router, routed experts that stop after their second GEMM, shared expert.

The experts always return expert-sorted rows without their weights; who weights, un-permutes and adds them is the tail's
business (`tails.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from moetail.contract import UnfinalizedMoEOutput
from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.dense import product_f32, swiglu
from moetail.models.parameters import Parameters
from moetail.models.router import route


@dataclass(frozen=True)
class MoEParameters:
    """gate [E, H] bf16, bias [E] fp32; of this rank's I columns: w13 [E, 2 * I, H], gate rows first, w2 [E, H, I],
    shared_w13 [2 * I, H], shared_w2 [H, I]."""

    gate: torch.Tensor
    bias: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    shared_w13: torch.Tensor
    shared_w2: torch.Tensor

    @staticmethod
    def random(parameters: Parameters, name: str, config: DeepseekV41Config, E: int) -> MoEParameters:
        H, I = config.hidden_size, config.moe_intermediate_size  # noqa: E741

        def w13(p: Parameters, expert: str) -> torch.Tensor:
            return torch.cat([p.linear(f"{expert}.{w}", I, H, split=0) for w in ("w1", "w3")])

        def w2(p: Parameters, expert: str) -> torch.Tensor:
            return p.linear(f"{expert}.w2", H, I, split=1)

        experts, shared = [f"{name}.experts.{e}" for e in range(E)], f"{name}.shared_experts"
        return MoEParameters(
            parameters.linear(f"{name}.gate.weight", E, H),
            parameters.normal(f"{name}.gate.bias", E, std=0.1, dtype=torch.float32),
            parameters.stacked(experts, w13),
            parameters.stacked(experts, w2),
            w13(parameters, shared),
            w2(parameters, shared),
        )


def moe(
    x: torch.Tensor, p: MoEParameters, top_k: int, scale: float, limit: float, expert_ids: torch.Tensor | None = None
) -> tuple[UnfinalizedMoEOutput, torch.Tensor]:
    """x [T, H] -> the routed experts' rows and the shared expert's output [T, H]: this rank's part of both.

    expert_ids  [T, K] int32: where the tokens go whatever the router chose; the weights stay the router's
    """
    ids, weights = route(product_f32(x, p.gate.T), p.bias, top_k, scale)
    if expert_ids is not None:
        ids = expert_ids
    shared = functional.linear(swiglu(functional.linear(x, p.shared_w13), limit), p.shared_w2)
    return expert_rows(x, ids, weights, p.w13, p.w2, limit), shared


def expert_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, limit: float
) -> UnfinalizedMoEOutput:
    """x [T, H] through the experts ids [T, K]: one row a slot, sorted by expert. No host sync."""
    E, K = w13.shape[0], ids.shape[1]
    slots = ids.reshape(-1)
    by_expert, order = torch.sort(slots, stable=True)
    experts = torch.arange(E, dtype=slots.dtype, device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
    inner = functional.grouped_mm(x[order // K], w13.transpose(1, 2), offs=ends)
    rows = functional.grouped_mm(swiglu(inner, limit), w2.transpose(1, 2), offs=ends)
    row_map = torch.empty_like(slots, dtype=torch.int32)
    row_map[order] = torch.arange(len(slots), dtype=torch.int32, device=x.device)
    return UnfinalizedMoEOutput(rows, row_map.view(ids.shape), weights)
