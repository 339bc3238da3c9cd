"""Experts that stop after their second GEMM, always: what `MoELayer` and any other caller take as `experts`.

    rows = down(swiglu(gate_up(hidden))) + biases        one unweighted row per (token, expert), sorted by expert

Who finalizes, and where, is not among their arguments: nothing in here, and no tuning key below, can depend on it.

    GroupedMMExperts  torch's grouped_mm with the roundings of transformers' `grouped_mm` experts: gate and up to bf16,
                      silu to bf16, their product to bf16. CPU and CUDA
    TritonExperts     `moetail.grouped_gemm`: gather and SwiGLU inside the first GEMM, gate and up in fp32, rounded to
                      bf16 once. On CUDA a token's rows have the same bits in every batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from moetail.contract import UnfinalizedMoEOutput
from moetail.ops.finalize import check_tensors
from moetail.ops.grouped_gemm import block_for, check_limit, grouped_gemm
from moetail.ops.permute import permute
from moetail.shared_slots import SharedSlots, join_weights

_W = TypeVar("_W", bound="_Weights")


@dataclass(frozen=True, eq=False)
class _Weights:
    """The E experts of this rank.

    Shape:
        gate_up_proj  [E, 2*I, H]  bf16, the gate's I rows first; stride 1 in either of the last two dimensions
        down_proj     [E, H, I]    bf16, the same
        gate_up_bias  [E, 2*I]     bf16; None: no bias
        down_bias     [E, H]       bf16; None: no bias
        limit                      clamps SwiGLU: the gate to at most this, up to its range; None: no clamp
        expert_map    [E_global]   int32 | int64: from a router's id to one of the E, or -1 where another rank has it;
                                   None: ids name the E experts

    Called with hidden [T, H], topk_ids and topk_weights [T, K]; the slots of absent experts get row -1.
    Raises: ValueError naming the argument, what it was and what it must be.
    """

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    limit: float | None = None
    expert_map: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check_tensors(("gate_up_proj", self.gate_up_proj, True), ("down_proj", self.down_proj, True),
                      ("gate_up_bias", self.gate_up_bias, False), ("down_bias", self.down_bias, False),
                      ("expert_map", self.expert_map, False))  # fmt: skip
        check_limit(self.limit)
        if self.gate_up_proj.dim() != 3 or self.gate_up_proj.shape[1] % 2:
            raise ValueError(f"gate_up_proj must have shape [E, 2*I, H], got {tuple(self.gate_up_proj.shape)}")
        E, N, H = self.gate_up_proj.shape
        for name, tensor, shape in (
            ("down_proj", self.down_proj, (E, H, N // 2)),
            ("gate_up_bias", self.gate_up_bias, (E, N)),
            ("down_bias", self.down_bias, (E, H)),
        ):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        for name, tensor in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj),
                             ("gate_up_bias", self.gate_up_bias), ("down_bias", self.down_bias)):  # fmt: skip
            if tensor is not None and tensor.dtype != torch.bfloat16:
                raise ValueError(f"{name} must be bfloat16, got {tensor.dtype}")
            if tensor is not None and tensor.device != self.gate_up_proj.device:
                device = self.gate_up_proj.device
                raise ValueError(f"{name} must be on gate_up_proj's device {device}, got {tensor.device}")

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj.shape[0]

    def with_shared(
        self: _W, shared_gate_up: torch.Tensor, shared_down: torch.Tensor, *, limit: float | None
    ) -> tuple[_W, SharedSlots]:
        """(these experts and the shared ones behind them, the slots that a `MoELayer` sends every token to).

        shared_gate_up [2*n*I, H] and shared_down [H, n*I], with n of these experts' I columns; as `join_weights`, which
        copies all of them. Under tensor parallelism both are this rank's columns. limit: the shared experts' clamp

        Raises: ValueError where they are not of these experts' format: shape, dtype, clamp, no biases, no expert map
        (each rank's slot would count, and the sum over ranks is of different experts).
        """
        for name, tensor in (("gate_up_bias", self.gate_up_bias), ("down_bias", self.down_bias),
                             ("expert_map", self.expert_map)):  # fmt: skip
            if tensor is not None:
                raise ValueError(f"{name} must be None for shared experts as slots, got shape {tuple(tensor.shape)}")
        if limit != self.limit:
            raise ValueError(f"limit must be the routed experts' {self.limit}, got {limit}")
        gate_up, down = join_weights(self.gate_up_proj, self.down_proj, shared_gate_up, shared_down)
        slots = SharedSlots.of(self.num_experts, len(gate_up) - self.num_experts, gate_up.device)
        return replace(self, gate_up_proj=gate_up, down_proj=down), slots

    def _check(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        check_tensors(("hidden", hidden, True), ("topk_ids", topk_ids, True), ("topk_weights", topk_weights, True))
        H, device = self.gate_up_proj.shape[2], self.gate_up_proj.device
        if hidden.dim() != 2 or hidden.shape[1] != H:
            raise ValueError(f"hidden must have shape [T, {H}], got {tuple(hidden.shape)}")
        if hidden.dtype != torch.bfloat16:
            raise ValueError(f"hidden must be bfloat16, got {hidden.dtype}")
        if topk_ids.dim() != 2 or topk_ids.shape[0] != hidden.shape[0]:
            raise ValueError(f"topk_ids must have shape [{hidden.shape[0]}, K], got {tuple(topk_ids.shape)}")
        if topk_weights.shape != topk_ids.shape:
            raise ValueError(
                f"topk_weights must have topk_ids' shape {tuple(topk_ids.shape)}, got {tuple(topk_weights.shape)}"
            )
        if topk_weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"topk_weights must be float32, bfloat16 or float16, got {topk_weights.dtype}")
        for name, tensor in (("hidden", hidden), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor.device != device:
                raise ValueError(f"{name} must be on the experts' device {device}, got {tensor.device}")


class GroupedMMExperts(_Weights):
    __doc__ = _Weights.__doc__

    def __post_init__(self) -> None:
        super().__post_init__()
        _, N, H = self.gate_up_proj.shape
        if H % 8 or N % 16:
            raise ValueError(
                f"gate_up_proj must have H and I that are multiples of 8 (grouped_mm's 16 bytes), got H={H}, I={N // 2}"
            )

    def __call__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> UnfinalizedMoEOutput:
        self._check(hidden, topk_ids, topk_weights)
        p = permute(topk_ids, self.num_experts, expert_map=self.expert_map)
        x = hidden[p.source // topk_ids.shape[1]]  # past the end: the last token's, which no group reads
        expert = p.block_expert.clamp(min=0)
        gate, up = self._linear(x, self.gate_up_proj, self.gate_up_bias, p.offsets, expert).chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        rows = self._linear(
            torch.nn.functional.silu(gate) * up, self.down_proj, self.down_bias, p.offsets, expert
        )  # fmt: skip
        return UnfinalizedMoEOutput(rows, p.row_map, topk_weights)

    @staticmethod
    def _linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor, expert: torch.Tensor
    ) -> torch.Tensor:
        y = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
        return y if bias is None else y + bias[expert]


class TritonExperts(_Weights):
    __doc__ = _Weights.__doc__

    def __call__(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> UnfinalizedMoEOutput:
        self._check(hidden, topk_ids, topk_weights)
        (T, K), E = topk_ids.shape, self.num_experts
        p = permute(topk_ids, E, block=block_for(T, K, E), expert_map=self.expert_map)
        h = grouped_gemm(
            hidden, self.gate_up_proj, p, gather=True, activation="swiglu", limit=self.limit, bias=self.gate_up_bias
        )  # fmt: skip
        return UnfinalizedMoEOutput(grouped_gemm(h, self.down_proj, p, bias=self.down_bias), p.row_map, topk_weights)
