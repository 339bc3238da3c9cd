"""finalize_norm on a CUDA GPU: one Triton kernel from expert rows and residual to the next layer's input.

A program owns one token: its row stays in registers from the first load to the last store, and the norm's sum needs no
other program. Of few tokens a cluster owns one (sm_90): `cluster_triton.py`. Programmatic dependent launch as in
`finalize_triton.py`: dependents may start at once, and nothing is read or stored before the kernel's own wait.
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
from moetail.ops import cluster_triton, epilogue_triton
from moetail.ops.cluster_triton import _join, _start
from moetail.ops.epilogue_triton import RowConfig, _quantize, _residual_norm
from moetail.ops.finalize_triton import FINALIZED, Facts, _finalized, has_pdl

# H200, Triton 3.6, calls chained to themselves, warps x registers (0: ptxas's choice), us; finalize alone in brackets:
#   H 5120 K 6, T 1    [0.85]  4x0 2.88   8x255 2.74   16x128 3.18   32x64 3.84
#               T 16   [1.12]  4x0 2.86   8x255 3.08   16x128 3.22   32x64 3.88
#               T 64   [2.58]  4x0 6.14   8x255 5.06   16x128 4.38   32x64 4.61
#               T 512  [11.9]  4x0 15.8   8x0 17.5     16x0 18.0     32x0 22.8
#   H 7168 K 8, T 16   [1.55]  4x0 4.54   8x255 3.67   16x128 3.83   32x64 4.46
#   H 5120 K 6, T 8192 [153]   4x0 195.7  8x0 195.9    16x0 222.1    32x0 301.7
# One program a row costs two microseconds over finalize at T 1, whatever its shape: its multiprocessor alone reads all
# of the row, and two sums of the row stand between the loads and the stores. Clusters, programs x warps, and the best
# of one program in the same run:
#   H 5120 K 6, T 1  [0.86]  8x4 1.66  4x8 1.80  8x8 1.84  one 2.80      T 4  [0.99]  8x4 1.72  one 2.82
#               T 16 [1.28]  8x4 2.95  4x8 3.24  8x8 3.50  one 3.14      T 32 [1.64]  8x4 3.67  8x8 3.56  one 4.08
#   H 7168 K 8, T 1  [0.99]  8x4 1.86  4x8 2.11  one 3.50                T 16 [1.35]  8x4 3.30  one 3.58
#   H 2048 K 10, T 1 [1.07]  8x2 1.64  4x4 1.64  8x1 1.76  one 2.08      T 16 [1.59]  2x4 1.92  8x2 2.10  one 2.13
# Of the 0.80 that T 1 still costs over finalize 0.57 are there without any exchange.
ROW_SHAPES = ((0, 32, True), (32, 16, True), (256, 64, False))
# Up to so many tokens a cluster of the first of these sizes owns a row where it can. The others are for the tuner.
CLUSTER_TOKENS, CLUSTER_PROGRAMS = 32, (8, 4, 2)


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
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None,
    zero_centred: bool,
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
    strides = _Strides(rows.stride(0), 0 if shared is None else shared.stride(0), residual.stride(0), out.stride(0),
                       residual_out.stride(0), 0 if values is None else values.stride(0))  # fmt: skip
    tensors = (rows, row_map, weights, shared, shared_gate, num_valid_rows, residual, norm_weight, post_norm_weight,
               out, residual_out, values, scales)  # fmt: skip
    unit = _cluster_unit(facts, rows.dtype, strides, quant)
    if unit and any(t is not None and t.data_ptr() % 16 for t in (rows, shared, *tensors[6:12])):
        unit = 0
    if config is None:
        if quant is not None or post_norm_weight is not None:
            unit = 0  # in a cluster only where a config asks for it: on a GPU none of their tests has run yet
        config = config_for(rows.device, T, K, H, rows.dtype, unit)
        if rows.device.type == "cuda":
            dtypes = tuple(None if t is None else t.dtype for t in tensors)
            _compile(rows.device, dtypes, strides, facts, zero_centred, quant, unit)
    elif rows.device.type == "cuda" and not _fits(config, H, unit):
        raise ValueError(f"config must have one program a row for these tensors, got {config}")
    weights_strides = (0, 0) if weights is None else weights.stride()
    gate_stride = 0 if shared_gate is None else shared_gate.stride(0)
    scales_strides = (0, 0) if scales is None else scales.stride()
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(rows.device) if rows.device.type == "cuda" else contextlib.nullcontext():
        _finalize_norm_kernel[(T,)](
            *tensors, R, *row_map.stride(), *weights_strides, gate_stride, *scales_strides, *vars(strides).values(),
            float(routed_scale), float(eps), **_options(facts, zero_centred, config, quant),
        )  # fmt: skip


@tuning.follows_files
def config_for(device: torch.device, T: int, K: int, H: int, dtype: torch.dtype, unit: int = 0) -> RowConfig:
    """The tuned config where this GPU has one for T, the heuristic's otherwise. `unit`: `_cluster_unit`'s."""
    tuned = tuning.tuned(RowConfig, device, tuned_shape(K, H, dtype), kernel_hash(), T)
    return tuned if tuned is not None and _fits(tuned, H, unit) else heuristic(T, H, dtype.itemsize, unit)


def heuristic(T: int, H: int, element_size: int, unit: int) -> RowConfig:
    """The config of a call, from static facts."""
    clusters = clustered(H, unit) if T <= CLUSTER_TOKENS else ()
    return clusters[0] if clusters else epilogue_triton.heuristic(ROW_SHAPES, T, H, element_size)


def every_config(device: torch.device, K: int, H: int, dtype: torch.dtype, unit: int = 0) -> tuple[RowConfig, ...]:
    """All that `config_for` can answer for some T: what has to be compiled so that no later T compiles."""
    tuned = tuning.every_tuned(RowConfig, device, tuned_shape(K, H, dtype), kernel_hash())
    fitting = (config for config in tuned if _fits(config, H, unit))
    changes = (CLUSTER_TOKENS + 1, *(least for least, *_ in ROW_SHAPES))
    return tuple(dict.fromkeys((*(heuristic(T, H, dtype.itemsize, unit) for T in changes), *fitting)))


def clustered(H: int, unit: int) -> tuple[RowConfig, ...]:
    """The configs of several programs a row, the heuristic's first; a thread has 8 or 4 elements, and a program two
    warps at least."""
    found = []
    for programs in CLUSTER_PROGRAMS:
        warps = triton.next_power_of_2(H // programs) // 256
        found += [RowConfig(w, 255, programs) for w in (warps, 2 * warps) if 2 <= w <= 8]
    return tuple(config for config in found if _fits(config, H, unit))


def _fits(config: RowConfig, H: int, unit: int) -> bool:
    return config.programs == 1 or (unit > 0 and H % (unit * config.programs) == 0)


def _cluster_unit(facts: Facts, dtype: torch.dtype, strides: _Strides, quant: str | None) -> int:
    """What the columns of a program must be a multiple of where several own a row; 0: they cannot, because the GPU has
    no clusters, or a thread cannot load 16 bytes of a row at a time."""
    aligned = all(stride % 16 == 0 for stride in vars(strides).values())  # in elements: what Triton compiles for
    if not (facts.PDL and dtype.itemsize == 2 and aligned):
        return 0
    return 8 if quant is None else 32 if quant == "mxfp8" else 128


def tuned_shape(K: int, H: int, dtype: torch.dtype) -> tuning.Shape:
    return tuning.Shape("finalize_norm", (("K", K), ("H", H)), str(dtype).removeprefix("torch."))


@functools.cache
def kernel_hash() -> str:
    return tuning.source_hash(_finalize_norm_kernel, *epilogue_triton.EPILOGUES, *FINALIZED)


@dataclass(frozen=True)
class _Strides:
    """Row strides, in elements, in the kernel's order. Triton compiles for their divisibility."""

    rows: int
    shared: int
    residual: int
    out: int
    residual_out: int
    values: int


def _options(facts: Facts, zero_centred: bool, config: RowConfig, quant: str | None = None) -> dict[str, Any]:
    return vars(facts) | {
        "P": config.programs, "BLOCK": triton.next_power_of_2(facts.H // config.programs), "WARPS": config.warps,
        "ZERO_CENTRED": zero_centred, "QUANT": quant, "num_warps": config.warps, "num_ctas": config.programs,
        "maxnreg": config.registers or None, "enable_fp_fusion": False, "launch_pdl": facts.PDL,
    }  # fmt: skip


@functools.cache
def _compile(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], strides: _Strides, facts: Facts, zero_centred: bool,
    quant: str | None, unit: int,
) -> None:  # fmt: skip
    """Compile and load every config for tensors of these dtypes (their memory aligned to 16 bytes)."""
    unspecialized = (2,) * 8  # R and seven strides
    with torch.cuda.device(device):
        for config in every_config(device, facts.K, facts.H, cast(torch.dtype, dtypes[0]), unit):
            compiled = _finalize_norm_kernel.warmup(
                *dtypes, *unspecialized, *vars(strides).values(), 2.0, 2.0, grid=(1,),
                **_options(facts, zero_centred, config, quant),
            )  # fmt: skip
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured
            if config.programs > 1:
                cluster_triton.check(compiled.asm["ptx"], 2 if dtypes[8] is None else 4)


@triton.jit(do_not_specialize=["R", "map_stride_t", "map_stride_k", "weights_stride_t", "weights_stride_k",
                               "gate_stride", "scales_stride_t", "scales_stride_g", "scale", "eps"])  # fmt: skip
def _finalize_norm_kernel(
    rows, row_map, weights, shared, gate, num_valid_rows, residual, norm_weight, post_norm_weight, out, residual_out,
    values, scales, R, map_stride_t, map_stride_k, weights_stride_t, weights_stride_k, gate_stride, scales_stride_t,
    scales_stride_g, rows_stride, shared_stride, residual_stride, out_stride, residual_out_stride, values_stride, scale,
    eps,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, GROUPS: tl.constexpr,
    SCALE: tl.constexpr, TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr, ZERO_CENTRED: tl.constexpr,
    QUANT: tl.constexpr, PDL: tl.constexpr, P: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    mailbox = None
    if P == 1:
        c = tl.arange(0, BLOCK)
        here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
    else:
        COLUMNS: tl.constexpr = H // P
        c = tl.arange(0, P)[:, None] * COLUMNS + tl.arange(0, BLOCK)[None, :]
        here = tl.broadcast_to(tl.arange(0, BLOCK)[None, :] < COLUMNS, [P, BLOCK])
        mailbox = _start(R, P, WARPS, 2 if post_norm_weight is None else 4)
    if PDL:
        tl.extra.cuda.gdc_wait()
    limit = R
    if num_valid_rows is not None:
        limit = tl.minimum(R.to(tl.int64), tl.load(num_valid_rows).to(tl.int64))
    # Loaded first: they wait for no row index, and the norm then waits for none of them.
    old = tl.load(residual + t * residual_stride + c, mask=here, other=0.0)
    weight = tl.load(norm_weight + c, mask=here, other=0.0)
    post_weight = None
    if post_norm_weight is not None:
        post_weight = tl.load(post_norm_weight + c, mask=here, other=0.0)
    y = _finalized(
        rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
        weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, out.dtype.element_ty, K, BLOCK, PRODUCT,
        GROUPS, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO,
    )  # fmt: skip
    if P > 1:
        mailbox = _join(mailbox)
    h, new = _residual_norm(y, old, weight, post_weight, here, eps, H, ZERO_CENTRED, mailbox, WARPS)
    tl.store(residual_out + t * residual_out_stride + c, new, mask=here)
    tl.store(out + t * out_stride + c, h, mask=here)
    if QUANT is not None:
        _quantize(
            h, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, None, here, H, BLOCK,
            QUANT,
        )  # fmt: skip
