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
from pathlib import Path

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


def load_library(package: str, pattern: str) -> None:
    """Register the torch ops of a package's compiled library, found without importing the package: `import vllm` sets
    TORCHINDUCTOR_COMPILE_THREADS and patches Inductor, which is a contender in this process.

    Raises: ModuleNotFoundError where the package or the library is not there.
    """
    spec = importlib.util.find_spec(package)
    roots = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    found = sorted(path for root in roots for path in Path(root).glob(pattern))
    if not found:
        raise ModuleNotFoundError(f"{package} has no {pattern} here")
    torch.ops.load_library(str(found[0]))


def load_vllm_ops() -> None:
    """vLLM's MoE ops as torch.ops._moe_C (0.26 and newer: a stable-ABI library that needs only torch)."""
    load_library("vllm", "_moe_C*.so")


def _vllm_moe_sum(x: KernelInputs) -> Program:
    load_vllm_ops()
    T, H = x.shared.shape
    rows, routed = x.slot_rows.view(T, -1, H), torch.empty_like(x.shared)

    def program() -> torch.Tensor:
        torch.ops._moe_C.moe_sum(rows, routed)
        return torch.add(routed, x.shared, out=x.out)

    return program


def _vllm_moe_unpermute(x: KernelInputs) -> Program:
    load_vllm_ops()
    K = x.row_map.shape[1]
    routed = torch.empty_like(x.shared)
    # Only the last element is read: a slot counts where its row is below it.
    every_row = torch.tensor([0, x.rows.shape[0]], dtype=torch.int64, device=x.rows.device)

    def program() -> torch.Tensor:
        torch.ops._moe_C.moe_unpermute(x.rows, x.weights, x.row_map, every_row, K, routed)
        return torch.add(routed, x.shared, out=x.out)

    return program


def _sgl_moe_sum_reduce(x: KernelInputs) -> Program:
    """SGLang's path above 32 tokens. Built with fast math: its bits are PREWEIGHTED's where nothing is subnormal."""
    load_library("sgl_kernel", "**/sm90/common_ops*.so")
    T, H = x.shared.shape
    rows, routed = x.slot_rows.view(T, -1, H), torch.empty_like(x.shared)

    def program() -> torch.Tensor:
        torch.ops.sgl_kernel.moe_sum_reduce.default(rows, routed, 1.0)  # its default scale, 0, zeroes the output
        return torch.add(routed, x.shared, out=x.out)

    return program


def _sglang_fuse_shared(x: KernelInputs) -> Program:
    module = importlib.import_module("sglang.kernels.ops.moe.moe_finalize_fuse_shared")
    row_map, K = x.row_map.view(-1), x.row_map.shape[1]
    return functools.partial(module.moe_finalize_fuse_shared, x.rows, row_map, x.weights, x.shared, K)


def _flashinfer_moe_unpermute(x: KernelInputs) -> Program:
    unpermute = importlib.import_module("flashinfer.fused_moe.cute_dsl.moe_utils").moe_unpermute
    (T, K), routed = x.row_map.shape, torch.empty_like(x.shared)

    def program() -> torch.Tensor:
        unpermute(x.rows, routed, x.row_map, x.weights, T, K)
        return torch.add(routed, x.shared, out=x.out)

    return program


_OPTIONAL = {
    "vllm": [
        Contender("vllm moe_sum + add", Numerics.PREWEIGHTED, _vllm_moe_sum, Numerics.PREWEIGHTED),
        Contender("vllm moe_unpermute + add", Numerics.TRTLLM, _vllm_moe_unpermute),
    ],
    "sgl_kernel": [
        Contender("sgl moe_sum_reduce + add", Numerics.PREWEIGHTED, _sgl_moe_sum_reduce, Numerics.PREWEIGHTED),
    ],
    "sglang": [
        Contender("sglang fuse_shared", Numerics.SINGLE_ROUNDING, _sglang_fuse_shared, Numerics.SINGLE_ROUNDING),
    ],
    "flashinfer": [
        Contender("flashinfer moe_unpermute + add", Numerics.TRTLLM, _flashinfer_moe_unpermute),
    ],
}
