"""The finalize kernels that `bench kernels` compares: ours, and what people use today where it is importable.

A contender says whose bits it has (`numerics`), so that it is compared with ours of the same numerics, and its bits are
checked before it is timed. One that is not installed here is left out, and the record names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetail.numerics import Numerics
from moetail.ops.finalize import finalize

Program = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class KernelInputs:
    """One set of inputs. `rows` [T*K, H] are sorted by expert and unweighted, `slot_rows` [T*K, H] weighted and in slot
    order (what moe_sum reads); weights fp32 [T, K], row_map int32 [T, K], shared and out [T, H]."""

    rows: torch.Tensor
    slot_rows: torch.Tensor
    row_map: torch.Tensor
    slot_map: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def random(T: int, K: int, H: int, device: torch.device, num_experts: int = 64) -> KernelInputs:
        """Random bf16 rows under a random routing to distinct experts."""
        experts = torch.rand(T, max(num_experts, K), device=device).argsort(dim=1)[:, :K]
        order = experts.reshape(-1).argsort(stable=True)
        row_map = torch.empty_like(order)
        row_map[order] = torch.arange(T * K, device=device)
        rows = torch.randn(T * K, H, device=device, dtype=torch.bfloat16)
        weights = torch.rand(T, K, device=device)
        slot_rows = (rows[row_map].float() * weights.reshape(-1, 1)).bfloat16()
        slots = torch.arange(T * K, device=device, dtype=torch.int32).view(T, K)
        shared = torch.randn(T, H, device=device, dtype=torch.bfloat16)
        return KernelInputs(rows, slot_rows, row_map.int().view(T, K), slots, weights, shared, torch.empty_like(shared))

    def finalize_args(self, numerics: Numerics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if numerics.uses_weights:
            return self.rows, self.row_map, self.weights, self.shared
        return self.slot_rows, self.slot_map, None, self.shared

    def num_bytes(self, numerics: Numerics) -> int:
        """What a kernel must move at least: every input read once, the output written once."""
        tensors = (*self.finalize_args(numerics), self.out)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True)
class Contender:
    """`bind(inputs)` returns a program that computes the tail and returns [T, H]. `numerics` None: no bits promised,
    compared with ours of `against`."""

    name: str
    numerics: Numerics | None
    bind: Callable[[KernelInputs], Program]
    against: Numerics = Numerics.TRTLLM


def ours(numerics: Numerics) -> Contender:
    def bind(x: KernelInputs) -> Program:
        return functools.partial(finalize, *x.finalize_args(numerics), numerics=numerics, out=x.out)

    return Contender(f"moetail {numerics.name}", numerics, bind, numerics)


def contenders() -> tuple[list[Contender], list[str]]:
    """Every baseline that runs here, and the names of those that are not installed."""
    found = [
        Contender("torch eager", Numerics.TRANSFORMERS, _torch_eager, Numerics.TRANSFORMERS),
        Contender("inductor", None, _inductor),
    ]
    missing = []
    for package, members in _OPTIONAL.items():
        if torch.cuda.is_available() and importlib.util.find_spec(package) is not None:
            found += members
        else:
            missing += [member.name for member in members]
    return found, missing


def _torch_eager(x: KernelInputs) -> Program:
    def program() -> torch.Tensor:
        return (x.rows[x.row_map] * x.weights.unsqueeze(-1)).sum(dim=1).to(x.rows.dtype) + x.shared

    return program


def _expression(rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """The two-rounding tail as one would write it for a compiler."""
    routed = (rows[row_map].float() * weights.unsqueeze(-1)).sum(dim=1)
    return routed.to(rows.dtype) + shared


def _inductor(x: KernelInputs) -> Program:
    compiled = torch.compile(_expression, dynamic=False)
    return functools.partial(compiled, x.rows, x.row_map, x.weights, x.shared)


def load_vllm_ops() -> Any:
    """vLLM's Python wrappers, with its compiled MoE ops registered as torch.ops._moe_C; no engine is started."""
    for module in ("vllm._moe_C_stable_libtorch", "vllm._moe_C"):
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
            return importlib.import_module("vllm._custom_ops")
    raise ModuleNotFoundError("vllm is installed without its compiled MoE ops")


def _vllm_moe_sum(x: KernelInputs) -> Program:
    ops = load_vllm_ops()
    T, H = x.shared.shape
    rows, routed = x.slot_rows.view(T, -1, H), torch.empty_like(x.shared)

    def program() -> torch.Tensor:
        ops.moe_sum(rows, routed)
        return torch.add(routed, x.shared, out=x.out)

    return program


def _vllm_moe_unpermute(x: KernelInputs) -> Program:
    load_vllm_ops()
    K = x.row_map.shape[1]
    routed = torch.empty_like(x.shared)
    every_row = torch.tensor([0, x.rows.shape[0]], dtype=torch.int64, device=x.rows.device)

    def program() -> torch.Tensor:
        torch.ops._moe_C.moe_unpermute(x.rows, x.weights, x.row_map, every_row, K, routed)
        return torch.add(routed, x.shared, out=x.out)

    return program


_OPTIONAL = {
    "vllm": [
        Contender("vllm moe_sum + add", Numerics.PREWEIGHTED, _vllm_moe_sum, Numerics.PREWEIGHTED),
        Contender("vllm moe_unpermute + add", Numerics.TRTLLM, _vllm_moe_unpermute, Numerics.TRTLLM),
    ],
}
