"""finalize_mhc on a CUDA GPU: one Triton kernel from expert rows and residual streams to the next layer's input.

A program owns one token, and holds its hc streams in registers as they were loaded: a stream that is written in place
is still read for the streams after it. Programmatic dependent launch as in `finalize_triton.py`: dependents may start
at once, and nothing is read or stored before the kernel's own wait.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl

from moetail import tuning
from moetail.numerics import Numerics
from moetail.ops import epilogue_triton
from moetail.ops.epilogue_triton import RowConfig, _mhc, _quantize
from moetail.ops.finalize_triton import FINALIZED, Facts, _finalized, has_pdl

# As in finalize_norm_triton.py. Not yet timed.
ROW_SHAPES = ((0, 8, True), (256, 16, False))


def launch(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    routed_scale: float,
    numerics: Numerics,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor,
    quant: str | None = None,
    values: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    config: RowConfig | None = None,
) -> None:
    """Write `out` and `residual_out`; `values`, as bytes, and `scales` where `quant` names a format. The arguments are
    checked, `numerics` is concrete, T >= 1.

    The first call of a kind compiles and loads every config that another T could ask for.
    """
    (T, K), (R, H) = row_map.shape, rows.shape
    facts = Facts.of(K, H, numerics, routed_scale, has_pdl(rows.device))
    strides = _Strides(
        rows.stride(0), 0 if shared is None else shared.stride(0), residual.stride(0), residual.stride(1),
        out.stride(0), residual_out.stride(0), residual_out.stride(1), 0 if values is None else values.stride(0),
    )  # fmt: skip
    tensors = (rows, row_map, weights, shared, shared_gate, num_valid_rows, residual, post_mix, res_mix, pre_mix,
               norm_weight, out, residual_out, values, scales)  # fmt: skip
    hc = residual.shape[1]
    if config is None:
        config = config_for(rows.device, T, K, H, rows.dtype, hc)
        if rows.device.type == "cuda":
            _compile(rows.device, tuple(None if t is None else t.dtype for t in tensors), strides, facts, hc, quant)
    weights_strides = (0, 0) if weights is None else weights.stride()
    gate_stride = 0 if shared_gate is None else shared_gate.stride(0)
    scales_strides = (0, 0) if scales is None else scales.stride()
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(rows.device) if rows.device.type == "cuda" else contextlib.nullcontext():
        _finalize_mhc_kernel[(T,)](
            *tensors, R, *row_map.stride(), *weights_strides, gate_stride, post_mix.stride(0), res_mix.stride(0),
            pre_mix.stride(0), *scales_strides, *vars(strides).values(), float(routed_scale), float(eps),
            **_options(facts, hc, config, quant),
        )  # fmt: skip


@tuning.follows_files
def config_for(device: torch.device, T: int, K: int, H: int, dtype: torch.dtype, hc: int) -> RowConfig:
    """The tuned config where this GPU has one for T, the heuristic's otherwise."""
    tuned = tuning.tuned(RowConfig, device, tuned_shape(K, H, dtype, hc), kernel_hash(), T)
    return epilogue_triton.heuristic(ROW_SHAPES, T, H, dtype.itemsize) if tuned is None else tuned


def every_config(device: torch.device, K: int, H: int, dtype: torch.dtype, hc: int) -> tuple[RowConfig, ...]:
    """All that `config_for` can answer for some T: what has to be compiled so that no later T compiles."""
    tuned = tuning.every_tuned(RowConfig, device, tuned_shape(K, H, dtype, hc), kernel_hash())
    return tuple(dict.fromkeys((*epilogue_triton.every_config(ROW_SHAPES, H, dtype.itemsize), *tuned)))


def tuned_shape(K: int, H: int, dtype: torch.dtype, hc: int) -> tuning.Shape:
    return tuning.Shape("finalize_mhc", (("K", K), ("H", H), ("hc", hc)), str(dtype).removeprefix("torch."))


@functools.cache
def kernel_hash() -> str:
    return tuning.source_hash(_finalize_mhc_kernel, *epilogue_triton.EPILOGUES, *FINALIZED)


@dataclass(frozen=True)
class _Strides:
    """Strides of what is read and written in vectors, in elements and the kernel's order. Triton compiles for their
    divisibility."""

    rows: int
    shared: int
    residual_token: int
    residual_stream: int
    out: int
    residual_out_token: int
    residual_out_stream: int
    values: int


def _options(facts: Facts, hc: int, config: RowConfig, quant: str | None = None) -> dict[str, Any]:
    return vars(facts) | {
        "BLOCK": triton.next_power_of_2(facts.H), "HC": hc, "QUANT": quant, "num_warps": config.warps,
        "maxnreg": config.registers or None, "enable_fp_fusion": False, "launch_pdl": facts.PDL,
    }  # fmt: skip


@functools.cache
def _compile(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], strides: _Strides, facts: Facts, hc: int,
    quant: str | None,
) -> None:  # fmt: skip
    """Compile and load every config for tensors of these dtypes (their memory aligned to 16 bytes)."""
    unspecialized = (2,) * 11  # R and ten strides
    with torch.cuda.device(device):
        for config in every_config(device, facts.K, facts.H, cast(torch.dtype, dtypes[0]), hc):
            compiled = _finalize_mhc_kernel.warmup(
                *dtypes, *unspecialized, *vars(strides).values(), 2.0, 2.0, grid=(1,),
                **_options(facts, hc, config, quant),
            )  # fmt: skip
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


# The mixes may be parts of one tensor, at any alignment: their pointers are not specialized either.
@triton.jit(do_not_specialize=["R", "map_stride_t", "map_stride_k", "weights_stride_t", "weights_stride_k",
                               "gate_stride", "post_stride", "comb_stride", "pre_stride", "scales_stride_t",
                               "scales_stride_g", "scale", "eps"],
            do_not_specialize_on_alignment=["post_mix", "res_mix", "pre_mix"])  # fmt: skip
def _finalize_mhc_kernel(
    rows, row_map, weights, shared, gate, num_valid_rows, residual, post_mix, res_mix, pre_mix, norm_weight, out,
    residual_out, values, scales, R, map_stride_t, map_stride_k, weights_stride_t, weights_stride_k, gate_stride,
    post_stride, comb_stride, pre_stride, scales_stride_t, scales_stride_g, rows_stride, shared_stride,
    residual_stride_t, residual_stride_s, out_stride, residual_out_stride_t, residual_out_stride_s, values_stride,
    scale, eps,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, HC: tl.constexpr, PRODUCT: tl.constexpr,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr,
    QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    limit = R
    if num_valid_rows is not None:
        limit = tl.minimum(R.to(tl.int64), tl.load(num_valid_rows).to(tl.int64))
    y = _finalized(
        rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
        weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, out.dtype.element_ty, K, BLOCK, PRODUCT,
        GROUPS, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO,
    )  # fmt: skip
    h = _mhc(
        y, residual + t * residual_stride_t + c, residual_stride_s, residual_out + t * residual_out_stride_t + c,
        residual_out_stride_s, post_mix + t * post_stride, res_mix + t * comb_stride, pre_mix + t * pre_stride,
        tl.load(norm_weight + c, mask=here, other=0.0), None, here, eps, H, HC,
    )  # fmt: skip
    tl.store(out + t * out_stride + c, h, mask=here)
    if QUANT is not None:
        _quantize(
            h, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, None, here, H, BLOCK,
            QUANT,
        )  # fmt: skip
