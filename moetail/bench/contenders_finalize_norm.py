"""finalize_norm's contenders: separate kernels (ours and torch's), and Inductor's one for all of it.

Their norm is torch's, whose mean is added in another order than ours: none has our bits, each is compared in time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

import torch

from moetail import reference
from moetail.bench.contenders import Contender, KernelInputs, Op, Program, load_vllm_core_ops, with_vllm
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize
from moetail.ops.finalize_norm import finalize_norm
from moetail.quantization import Quantized

_EPS = 1e-6


@dataclass(frozen=True)
class NormInputs(KernelInputs):
    """And the residual [T, H], where the new one goes, and the norm's weight [H]."""

    residual: torch.Tensor
    residual_out: torch.Tensor
    norm_weight: torch.Tensor

    @staticmethod
    def random(T: int, K: int, H: int, device: torch.device, num_experts: int = 64) -> NormInputs:
        x = KernelInputs.random(T, K, H, device, num_experts)
        residual = torch.randn_like(x.shared)
        return NormInputs(**vars(x), residual=residual, residual_out=torch.empty_like(residual),
                          norm_weight=torch.randn(H, device=device, dtype=residual.dtype))  # fmt: skip

    def num_bytes(self, numerics: Numerics) -> int:
        """What a kernel must move at least: the residual is read and written besides."""
        return super().num_bytes(numerics) + 2 * self.residual.numel() * self.residual.element_size()


def _ours(numerics: Numerics) -> Contender:
    return Contender(f"moetail {numerics.name}", numerics, functools.partial(call, numerics=numerics), numerics)


def call(inputs: KernelInputs, numerics: Numerics, quant_out: Quantized | None = None) -> Program:
    """finalize_norm on these NormInputs; the program returns h."""
    x = cast(NormInputs, inputs)
    bound = functools.partial(
        finalize_norm, *x.finalize_args(numerics), residual=x.residual, norm_weight=x.norm_weight, eps=_EPS,
        numerics=numerics, out=x.out, residual_out=x.residual_out, quant_out=quant_out,
    )  # fmt: skip
    return lambda: bound()[0]


def finalize_alone(x: KernelInputs) -> Program:
    """What the op's first part takes by itself: no baseline, but what the rest is measured over."""
    return functools.partial(finalize, *x.finalize_args(Numerics.TRTLLM), out=x.out)


def _contenders() -> tuple[list[Contender], list[str]]:
    found = [
        Contender("finalize alone", None, finalize_alone),
        Contender("finalize, then torch add and norm", None, _finalize_then_torch),
        Contender("torch eager", None, _torch_eager),
        Contender("finalize, then inductor's add and norm", None, _finalize_then_inductor),
        Contender("inductor", None, _inductor),
    ]
    return with_vllm(found, Contender("finalize, then vllm fused_add_rms_norm", None, _finalize_then_vllm))


def _add_norm(y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, residual) with torch's norm."""
    residual = residual + y
    return torch.nn.functional.rms_norm(residual, weight.shape, weight, _EPS), residual


def _expression(
    rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    routed = (rows[row_map].float() * weights.unsqueeze(-1)).sum(dim=1)
    return _add_norm(routed.to(rows.dtype) + shared, residual, norm_weight)


def _finalize_then_torch(inputs: KernelInputs) -> Program:
    x = cast(NormInputs, inputs)

    def program() -> torch.Tensor:
        y = finalize(*x.finalize_args(Numerics.TRTLLM), out=x.out)
        return _add_norm(y, x.residual, x.norm_weight)[0]

    return program


def _finalize_then_inductor(inputs: KernelInputs) -> Program:
    x, compiled = cast(NormInputs, inputs), torch.compile(_add_norm, dynamic=False)

    def program() -> torch.Tensor:
        return compiled(finalize(*x.finalize_args(Numerics.TRTLLM), out=x.out), x.residual, x.norm_weight)[0]

    return program


def _finalize_then_vllm(inputs: KernelInputs) -> Program:
    load_vllm_core_ops()
    x = cast(NormInputs, inputs)
    residual = x.residual.clone()  # it is added to in place, at every call

    def program() -> torch.Tensor:
        y = finalize(*x.finalize_args(Numerics.TRTLLM), out=x.out)
        torch.ops._C.fused_add_rms_norm(y, residual, x.norm_weight, _EPS)
        return y

    return program


def _torch_eager(inputs: KernelInputs) -> Program:
    x = cast(NormInputs, inputs)
    return lambda: _expression(x.rows, x.row_map, x.weights, x.shared, x.residual, x.norm_weight)[0]


def _inductor(inputs: KernelInputs) -> Program:
    x, compiled = cast(NormInputs, inputs), torch.compile(_expression, dynamic=False)
    return lambda: compiled(x.rows, x.row_map, x.weights, x.shared, x.residual, x.norm_weight)[0]


def expected(inputs: KernelInputs, numerics: Numerics) -> torch.Tensor:
    """h."""
    x = cast(NormInputs, inputs)
    h, _ = reference.finalize_norm(
        *x.finalize_args(numerics), residual=x.residual, norm_weight=x.norm_weight, eps=_EPS, numerics=numerics
    )
    return h


OP = Op("finalize_norm", NormInputs.random, _ours, _contenders, expected)
