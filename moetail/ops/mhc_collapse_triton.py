"""mhc_collapse on a CUDA GPU: one Triton kernel, a token a program, as `mhc_triton.py`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl

from moetail.ops.epilogue_triton import RowConfig, _rms_norm, every_config, heuristic
from moetail.ops.finalize_mhc_triton import ROW_SHAPES
from moetail.ops.finalize_triton import _to, has_pdl


def launch(
    residual: torch.Tensor, pre_mix: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Write `out`. The arguments are checked, T >= 1. The first call of a kind compiles and loads every config that
    another T could ask for."""
    (T, hc, H), pdl = residual.shape, has_pdl(residual.device)
    tensors, strides = (residual, pre_mix, norm_weight, out), (*residual.stride()[:2], out.stride(0))
    config = heuristic(ROW_SHAPES, T, H, residual.element_size())
    on_gpu = residual.device.type == "cuda"
    if on_gpu:
        _compile(residual.device, tuple(t.dtype for t in tensors), strides, H, hc, pdl)
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(residual.device) if on_gpu else contextlib.nullcontext():
        _collapse_kernel[(T,)](*tensors, pre_mix.stride(0), *strides, float(eps), **_options(H, hc, pdl, config))


def _options(H: int, hc: int, pdl: bool, config: RowConfig) -> dict[str, Any]:
    return {
        "H": H, "HC": hc, "PDL": pdl, "BLOCK": triton.next_power_of_2(H), "num_warps": config.warps,
        "enable_fp_fusion": False, "launch_pdl": pdl,
    }  # fmt: skip


@functools.cache
def _compile(
    device: torch.device, dtypes: tuple[torch.dtype, ...], strides: tuple[int, ...], H: int, hc: int, pdl: bool
) -> None:
    with torch.cuda.device(device):
        for config in every_config(ROW_SHAPES, H, dtypes[0].itemsize):
            compiled = _collapse_kernel.warmup(
                *dtypes, 2, *strides, 2.0, grid=(1,), **_options(H, hc, pdl, config)
            )  # fmt: skip
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


# The mix may be a part of another tensor, at any alignment.
@triton.jit(do_not_specialize=["pre_stride", "eps"], do_not_specialize_on_alignment=["pre_mix"])
def _collapse_kernel(
    residual, pre_mix, norm_weight, out, pre_stride, residual_stride_t, residual_stride_s, out_stride, eps,
    H: tl.constexpr, HC: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    collapsed = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(HC):
        stream = tl.load(residual + t * residual_stride_t + i * residual_stride_s + c, mask=here, other=0.0)
        part = tl.load(pre_mix + t * pre_stride + i) * stream.to(tl.float32)
        collapsed = part if i == 0 else collapsed + part
    collapsed = _to(collapsed, dtype).to(tl.float32)
    weight = tl.load(norm_weight + c, mask=here, other=0.0)
    tl.store(out + t * out_stride + c, _to(_rms_norm(collapsed, weight, here, eps, H, False), dtype), mask=here)
