"""finalize_norm with its output quantized too (fp8, groups of 128), against a separate kernel that quantizes.

The bits compared are those of h; `tests/test_quant_out.py` has those of the quantized output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch

from moetail.bench import contenders_finalize_norm as norm
from moetail.bench.contenders import Contender, KernelInputs, Op, Program, load_vllm_core_ops, with_vllm
from moetail.bench.contenders_finalize_norm import NormInputs
from moetail.numerics import Numerics
from moetail.quantization import Quant, Quantized

_QUANT = Quant.FP8_GROUP128


def _buffers(x: KernelInputs) -> Quantized:
    T, H = x.shared.shape
    return Quantized.empty(_QUANT, T, H, x.shared.device)


def _ours(numerics: Numerics) -> Contender:
    def bind(inputs: KernelInputs) -> Program:
        x = cast(NormInputs, inputs)
        return norm.call(x, numerics, quant_out=_buffers(x))

    return Contender(f"moetail {numerics.name}", numerics, bind, numerics)


def _contenders() -> tuple[list[Contender], list[str]]:
    found = [
        Contender("finalize_norm alone", None, functools.partial(norm.call, numerics=Numerics.TRTLLM)),
        Contender("finalize_norm, then torch's quantize", None, _then(_quantize)),
        Contender("finalize_norm, then inductor's quantize", None, _then(torch.compile(_quantize, dynamic=False))),
    ]
    return with_vllm(found, Contender("finalize_norm, then vllm per_token_group_fp8_quant", None, _then_vllm))


def _quantize(h: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """As one would write it."""
    groups = h.float().unflatten(1, (-1, _QUANT.group))
    scale = groups.abs().amax(-1).clamp(min=_QUANT.least) / 448.0
    values.copy_((groups / scale.unsqueeze(-1)).clamp(-448.0, 448.0).flatten(1))
    scales.copy_(scale)


def _then(quantize: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Callable[[KernelInputs], Program]:
    def bind(inputs: KernelInputs) -> Program:
        x = cast(NormInputs, inputs)
        first, q = norm.call(x, Numerics.TRTLLM), _buffers(x)

        def program() -> torch.Tensor:
            h = first()
            quantize(h, q.values, q.scales)
            return h

        return program

    return bind


def _then_vllm(inputs: KernelInputs) -> Program:
    load_vllm_core_ops()
    x = cast(NormInputs, inputs)
    first, q = norm.call(x, Numerics.TRTLLM), _buffers(x)
    op = torch.ops._C.per_token_group_fp8_quant.default
    unused = len(op._schema.arguments) - 8  # newer versions have two flags that say nothing here

    def program() -> torch.Tensor:
        h = first()
        op(h, q.values, q.scales, _QUANT.group, _QUANT.least, -448.0, 448.0, False, *[False] * unused)
        return h

    return program


OP = Op("finalize_norm_fp8", NormInputs.random, _ours, _contenders, norm.expected)
