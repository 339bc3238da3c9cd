"""A producer and a consumer for `bench kernels`: what stands before and behind the tail in a model, at its least.

Both take part in programmatic dependent launch, as a model's GEMM and norm do, so that the op is measured with an early
launch on both of its edges.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def produce(source: torch.Tensor, rows: torch.Tensor) -> None:
    """rows = source: stands for the second expert GEMM's stores."""
    _launch(_produce_kernel, rows.numel(), source, rows)


def consume(y: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
    """out = y + residual: stands for the next layer's first read."""
    _launch(_consume_kernel, y.numel(), y, residual, out)


def _launch(kernel: Any, count: int, *tensors: torch.Tensor) -> None:
    pdl = torch.cuda.get_device_capability(tensors[0].device) >= (9, 0)
    kernel[(triton.cdiv(count, _BLOCK),)](*tensors, count, BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl)


@triton.jit
def _produce_kernel(source, rows, count, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: ANN001, ANN202
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(rows + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit
def _consume_kernel(y, residual, out, count, BLOCK: tl.constexpr, PDL: tl.constexpr):  # noqa: ANN001, ANN202
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(residual + i, mask=i < count) + tl.load(y + i, mask=i < count)
    tl.store(out + i, total, mask=i < count)
