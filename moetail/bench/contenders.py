"""What `bench kernels` compares of an op: its inputs, ours, and what people use today where it is importable.

A contender says whose bits it has (`numerics`), so that it is compared with ours of the same numerics, and its bits are
checked before it is timed. One that is not installed here is left out, and the record names it. `contenders_<op>.py`
has those of each op.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moetail.numerics import Numerics

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


@dataclass(frozen=True)
class Op:
    """An op of the bench. `reference(x, numerics)` is what a contender's program must return, in bits."""

    name: str
    inputs: Callable[[int, int, int, torch.device], KernelInputs]
    ours: Callable[[Numerics], Contender]
    contenders: Callable[[], tuple[list[Contender], list[str]]]
    reference: Callable[[KernelInputs, Numerics], torch.Tensor]


def with_vllm(found: list[Contender], vllm: Contender) -> tuple[list[Contender], list[str]]:
    """(the contenders, the names of those that are not installed here)."""
    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        return found, [vllm.name]
    return [*found, vllm], []


def load_library(package: str, pattern: str) -> None:
    """Register the torch ops of a package's compiled libraries, found without importing the package: `import vllm` sets
    TORCHINDUCTOR_COMPILE_THREADS and patches Inductor, which is a contender in this process.

    Raises: ModuleNotFoundError where the package or the library is not there.
    """
    spec = importlib.util.find_spec(package)
    roots = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    found = sorted(path for root in roots for path in Path(root).glob(pattern))
    if not found:
        raise ModuleNotFoundError(f"{package} has no {pattern} here")
    for path in found:
        torch.ops.load_library(str(path))


def load_vllm_ops() -> None:
    """vLLM's MoE ops as torch.ops._moe_C (0.26 and newer: a stable-ABI library that needs only torch)."""
    load_library("vllm", "_moe_C*.so")


def load_vllm_core_ops() -> None:
    """vLLM's norms and quantizers as torch.ops._C, from the one library or the two that its version has."""
    load_library("vllm", "_C*.so")
