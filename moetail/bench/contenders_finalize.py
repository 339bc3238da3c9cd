"""finalize's contenders: torch, Inductor, vLLM's two kernels, SGLang's and FlashInfer's."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from moetail import reference
from moetail.bench.contenders import Contender, KernelInputs, Op, Program, load_library, load_vllm_ops
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize


def _ours(numerics: Numerics) -> Contender:
    def bind(x: KernelInputs) -> Program:
        return functools.partial(finalize, *x.finalize_args(numerics), numerics=numerics, out=x.out)

    return Contender(f"moetail {numerics.name}", numerics, bind, numerics)


def _contenders() -> tuple[list[Contender], list[str]]:
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


def _reference(x: KernelInputs, numerics: Numerics) -> torch.Tensor:
    return reference.finalize(*x.finalize_args(numerics), numerics=numerics)


OP = Op("finalize", KernelInputs.random, _ours, _contenders, _reference)
