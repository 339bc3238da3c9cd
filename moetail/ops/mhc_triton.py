"""mhc on a CUDA GPU: one Triton kernel from a finished row to the streams and the next input.

`finalize_mhc_triton.py` without its finalize: a program owns one token. Programmatic dependent launch as there.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moetail.ops.epilogue_triton import RowConfig, _mhc, every_config, heuristic
from moetail.ops.finalize_mhc_triton import ROW_SHAPES
from moetail.ops.finalize_triton import has_pdl


def launch(
    y: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    config: RowConfig | None = None,
) -> None:
    """Write `out` and `residual_out`. The arguments are checked, T >= 1.

    The first call of a kind compiles and loads every config that another T could ask for.
    """
    (T, hc, H), tensors = residual.shape, (y, residual, post_mix, res_mix, pre_mix, norm_weight, out, residual_out)
    strides = _Strides(
        y.stride(0), residual.stride(0), residual.stride(1), out.stride(0), residual_out.stride(0),
        residual_out.stride(1),
    )  # fmt: skip
    kind = _Kind(H, hc, has_pdl(y.device))
    if config is None:
        config = heuristic(ROW_SHAPES, T, H, y.element_size())
        if y.device.type == "cuda":
            _compile(y.device, tuple(t.dtype for t in tensors), strides, kind)
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(y.device) if y.device.type == "cuda" else contextlib.nullcontext():
        _mhc_kernel[(T,)](
            *tensors, post_mix.stride(0), res_mix.stride(0), pre_mix.stride(0), *vars(strides).values(), float(eps),
            **_options(kind, config),
        )  # fmt: skip


@dataclass(frozen=True)
class _Strides:
    """Of what is read and written in vectors, in elements and the kernel's order."""

    y: int
    residual_token: int
    residual_stream: int
    out: int
    residual_out_token: int
    residual_out_stream: int


@dataclass(frozen=True)
class _Kind:
    H: int
    HC: int
    PDL: bool


def _options(kind: _Kind, config: RowConfig) -> dict[str, Any]:
    return vars(kind) | {
        "BLOCK": triton.next_power_of_2(kind.H), "num_warps": config.warps, "enable_fp_fusion": False,
        "launch_pdl": kind.PDL,
    }  # fmt: skip


@functools.cache
def _compile(device: torch.device, dtypes: tuple[torch.dtype, ...], strides: _Strides, kind: _Kind) -> None:
    """Compile and load every config for tensors of these dtypes (their memory aligned to 16 bytes)."""
    with torch.cuda.device(device):
        for config in every_config(ROW_SHAPES, kind.H, dtypes[0].itemsize):
            compiled = _mhc_kernel.warmup(
                *dtypes, 2, 2, 2, *vars(strides).values(), 2.0, grid=(1,), **_options(kind, config)
            )  # fmt: skip
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


# The mixes may be parts of one tensor, at any alignment: their pointers are not specialized either.
@triton.jit(do_not_specialize=["post_stride", "comb_stride", "pre_stride", "eps"],
            do_not_specialize_on_alignment=["post_mix", "res_mix", "pre_mix"])  # fmt: skip
def _mhc_kernel(
    y, residual, post_mix, res_mix, pre_mix, norm_weight, out, residual_out, post_stride, comb_stride, pre_stride,
    y_stride, residual_stride_t, residual_stride_s, out_stride, residual_out_stride_t, residual_out_stride_s, eps,
    H: tl.constexpr, HC: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    h = _mhc(
        tl.load(y + t * y_stride + c, mask=here, other=0.0), residual + t * residual_stride_t + c, residual_stride_s,
        residual_out + t * residual_out_stride_t + c, residual_out_stride_s, post_mix + t * post_stride,
        res_mix + t * comb_stride, pre_mix + t * pre_stride, tl.load(norm_weight + c, mask=here, other=0.0), None, here,
        eps, H, HC,
    )  # fmt: skip
    tl.store(out + t * out_stride + c, h, mask=here)
