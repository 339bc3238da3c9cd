"""Shared experts as slots: experts E .. E+n-1 of the experts' own weights, which every token is sent to with weight 1.

    [T, K] ids and weights of the router  ->  [T, K+n], the shared slots last

The experts' GEMMs then compute the shared part too, and the finalize adds it as its last slots: nobody runs shared
experts or adds them. The bits are others than a separate add's, which rounds twice: `docs/numerics.md`.
SGLang calls this shared experts fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class SharedSlots:
    """first: the id of the first shared expert, which is the number of routed ones; ids [n] int32; weights [n] fp32.

    The two tensors are made once: a call copies nothing from the host and may be captured.
    """

    first: int
    ids: torch.Tensor
    weights: torch.Tensor

    @staticmethod
    def of(num_experts: int, count: int, device: torch.device) -> SharedSlots:
        """`count` slots behind `num_experts` routed experts. Raises: ValueError for a number below 1."""
        for name, value in (("num_experts", num_experts), ("count", count)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value!r}")
        ids = torch.arange(num_experts, num_experts + count, dtype=torch.int32, device=device)
        return SharedSlots(num_experts, ids, torch.ones(count, device=device))

    @property
    def count(self) -> int:
        return self.ids.shape[0]

    def __call__(self, weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weights and ids [T, K] -> [T, K+n], in their own dtypes: a torch.cat each, for `route`'s fp32 and int32.

        Raises: ValueError naming the argument, what it was and what it must be.
        """
        for name, tensor in (("weights", weights), ("ids", ids)):
            if tensor.dim() != 2:
                raise ValueError(f"{name} must be [T, K], got shape {tuple(tensor.shape)}")
            if tensor.device != self.ids.device:
                raise ValueError(f"{name} must be on the slots' device {self.ids.device}, got {tensor.device}")
        if weights.shape != ids.shape:
            raise ValueError(f"weights must have ids' shape {tuple(ids.shape)}, got {tuple(weights.shape)}")
        if not weights.dtype.is_floating_point:
            raise ValueError(f"weights must be of a floating-point dtype, got {weights.dtype}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids must be int32 or int64, got {ids.dtype}")
        T = ids.shape[0]
        ones, last = self.weights.to(weights.dtype).expand(T, -1), self.ids.to(ids.dtype).expand(T, -1)
        return torch.cat([weights, ones], dim=1), torch.cat([ids, last], dim=1)


def join_weights(
    gate_up_proj: torch.Tensor, down_proj: torch.Tensor, shared_gate_up: torch.Tensor, shared_down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate_up_proj [E+n, 2*I, H], down_proj [E+n, H, I]): the routed experts, then the shared, contiguous copies.

    Shape:
        gate_up_proj    [E, 2*I, H]    the gate's I rows first
        down_proj       [E, H, I]
        shared_gate_up  [2*n*I, H]     a shared expert of n*I columns, or n of them side by side; the gate's rows first
        shared_down     [H, n*I]       slot j is its columns j*I to (j+1)*I

    Raises: ValueError naming the argument, what it was and what it must be.
    """
    for name, tensor, form in (
        ("gate_up_proj", gate_up_proj, "[E, 2*I, H]"), ("down_proj", down_proj, "[E, H, I]"),
        ("shared_gate_up", shared_gate_up, "[2*n*I, H]"), ("shared_down", shared_down, "[H, n*I]"),
    ):  # fmt: skip
        if tensor.dim() != form.count(",") + 1:
            raise ValueError(f"{name} must be {form}, got shape {tuple(tensor.shape)}")
    E, N, H = gate_up_proj.shape
    if N < 2 or N % 2:
        raise ValueError(f"gate_up_proj must be [E, 2*I, H], got shape {tuple(gate_up_proj.shape)}, 2*I={N}")
    columns, n = N // 2, shared_gate_up.shape[0] // N
    if down_proj.shape != (E, H, columns):
        raise ValueError(f"down_proj must have shape {(E, H, columns)}, got {tuple(down_proj.shape)}")
    for name, tensor, shape, like in (
        ("shared_gate_up", shared_gate_up, (max(n, 1) * N, H), gate_up_proj),
        ("shared_down", shared_down, (H, n * columns), down_proj),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, whole slots of I={columns}, got {tuple(tensor.shape)}")
        if (tensor.dtype, tensor.device) != (like.dtype, like.device):
            raise ValueError(f"{name} must be {like.dtype} on {like.device}, got {tensor.dtype} on {tensor.device}")
    gate_up = shared_gate_up.reshape(2, n, columns, H).transpose(0, 1).reshape(n, N, H)
    down = shared_down.reshape(H, n, columns).transpose(0, 1)
    return torch.cat([gate_up_proj, gate_up]), torch.cat([down_proj, down])
