"""finalize on a CUDA GPU: one Triton kernel from expert rows to [T, H].

A program owns one token and BLOCK columns and reads each of its K rows once. Programmatic dependent launch: the
kernel lets its dependents start at once and reads nothing before its own wait, because a kernel launched early may run
before the one *before* its producer has finished (map, weights and shared included).
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moetail import tuning
from moetail.numerics import Numerics

_INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True)
class FinalizeConfig:
    """Columns of a program, its warps, and whether neighbouring programs take neighbouring columns of one token (or the
    same columns of neighbouring tokens). A config changes time, never bits."""

    block: int
    warps: int
    columns_first: bool = False


# Programs of 512 columns at which the config changes, for 16-bit rows. H200, Triton 3.6, what the op adds between a
# producer and a consumer, CUDA graph, H 5120 K 6 | H 7168 K 8 | H 2048 K 10, us (2026-11-30, bench/edges.py):
#   T 1      256x4 0.83 | 0.99 | 1.17     512x4 0.83 | 1.16 | 1.18    1024x4 1.34 | 1.53 | 1.70   (two dependent loads)
#   T 16     256x1 1.17 | 1.35 | 1.21     512x4 1.12 | 1.40 | 1.23    1024x4 1.47 | 1.74 | 1.83
#   T 256   1024x8 3.92 | 8.18 | 2.62     512x4 4.06 | 8.26 | 2.81     256x1 6.44 | 9.20 | 2.79
#   T 8192  1024x4 columns first 159.0 | 274.7 | 97.6, tokens first 163.4 | 278.9 | 97.3; at T 1 columns first loses:
#           512x4 1.14 against 0.83
# Several tokens a program never won by more than noise (T 512, H 2048: 7.41 us against 6.64 for one), nor did eviction
# hints or .cg loads beyond one size (evict_first: 9 % faster at T 16 cold, 5 % slower at T 1, 3 % at T 16384).
# A launch that waits for its producer to finish (no early launch) takes 1.6x at T 1 and 1.004x at T 16384.
_CONFIGS = (
    (0, FinalizeConfig(256, 4)),
    (100, FinalizeConfig(256, 1)),
    (700, FinalizeConfig(1024, 8)),
    (8192, FinalizeConfig(1024, 4, columns_first=True)),
)


def heuristic(T: int, H: int, element_size: int) -> FinalizeConfig:
    """The config of a call, from static facts."""
    programs = T * triton.cdiv(H, 512)
    config = next(config for least, config in reversed(_CONFIGS) if programs >= least)
    return _fitted(config, H, element_size)


@tuning.follows_files
def config_for(device: torch.device, T: int, K: int, H: int, dtype: torch.dtype) -> FinalizeConfig:
    """The tuned config where this GPU has one for T, the heuristic's otherwise."""
    tuned = tuning.tuned(FinalizeConfig, device, tuned_shape(K, H, dtype), kernel_hash(), T)
    return heuristic(T, H, dtype.itemsize) if tuned is None else tuned


def every_config(device: torch.device, K: int, H: int, dtype: torch.dtype) -> tuple[FinalizeConfig, ...]:
    """All that `config_for` can answer for some T: what has to be compiled so that no later T compiles."""
    tuned = tuning.every_tuned(FinalizeConfig, device, tuned_shape(K, H, dtype), kernel_hash())
    guessed = (_fitted(config, H, dtype.itemsize) for _, config in _CONFIGS)
    return tuple(dict.fromkeys((*guessed, *tuned)))


def tuned_shape(K: int, H: int, dtype: torch.dtype) -> tuning.Shape:
    return tuning.Shape("finalize", (("K", K), ("H", H)), str(dtype).removeprefix("torch."))


@functools.cache
def kernel_hash() -> str:
    """A hash of all the text that decides how fast a config is."""
    return tuning.source_hash(_finalize_kernel, *FINALIZED)


def _fitted(config: FinalizeConfig, H: int, element_size: int) -> FinalizeConfig:
    return replace(config, block=min(config.block * 2 // element_size, triton.next_power_of_2(H)))


def launch(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    routed_scale: float,
    numerics: Numerics,
    out: torch.Tensor,
    config: FinalizeConfig | None = None,
) -> None:
    """Write `out`. The arguments are checked, `numerics` is concrete, T >= 1.

    The first call of a kind compiles and loads every config that another T could ask for.
    """
    (T, K), (R, H) = row_map.shape, rows.shape
    facts = Facts.of(K, H, numerics, routed_scale, has_pdl(rows.device))
    strides = (rows.stride(0), 0 if shared is None else shared.stride(0), out.stride(0))
    if config is None:
        config = config_for(rows.device, T, K, H, rows.dtype)
        if rows.device.type == "cuda":
            tensors = (rows, row_map, weights, shared, shared_gate, num_valid_rows, out)
            _compile(rows.device, tuple(None if t is None else t.dtype for t in tensors), strides, facts)
    rows_stride, shared_stride, out_stride = strides
    weights_strides = (0, 0) if weights is None else weights.stride()
    gate_stride = 0 if shared_gate is None else shared_gate.stride(0)
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(rows.device) if rows.device.type == "cuda" else contextlib.nullcontext():
        _finalize_kernel[facts.grid(T, config)](
            rows, row_map, weights, shared, shared_gate, num_valid_rows, out, R, rows_stride, *row_map.stride(),
            *weights_strides, shared_stride, gate_stride, out_stride, float(routed_scale), **facts.options(config),
        )  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The compile-time arguments that a config does not choose."""

    K: int
    H: int
    PRODUCT: str
    GROUPS: int
    SCALE: str
    TWO_ROUNDINGS: bool
    POSITIVE_ZERO: bool
    PDL: bool

    @staticmethod
    def of(K: int, H: int, numerics: Numerics, routed_scale: float, pdl: bool) -> Facts:
        """`numerics` is concrete."""
        return Facts(
            K, H, numerics.product, _groups(numerics.order), "none" if routed_scale == 1.0 else numerics.scale,
            numerics.rounding == "two", numerics.zero == "positive", pdl,
        )  # fmt: skip

    def grid(self, T: int, config: FinalizeConfig) -> tuple[int, ...]:
        blocks = triton.cdiv(self.H, config.block)
        return (T * blocks,) if config.columns_first else (T, blocks)

    def options(self, config: FinalizeConfig) -> dict[str, Any]:
        return vars(self) | {
            "BLOCK": config.block, "COLUMNS_FIRST": config.columns_first, "num_warps": config.warps,
            "enable_fp_fusion": False, "launch_pdl": self.PDL,
        }  # fmt: skip


@functools.cache
def _compile(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], strides: tuple[int, int, int], facts: Facts
) -> None:
    """Compile and load every config for tensors of these dtypes (their memory aligned to 16 bytes)."""
    rows_stride, shared_stride, out_stride = strides
    with torch.cuda.device(device):
        for config in every_config(device, facts.K, facts.H, cast(torch.dtype, dtypes[0])):
            compiled = _finalize_kernel.warmup(
                *dtypes,
                2,
                rows_stride,
                2,
                2,
                2,
                2,
                shared_stride,
                2,
                out_stride,
                2.0,
                grid=(1,),
                **facts.options(config),
            )
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


@functools.cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _groups(order: str) -> int:
    if order == "torch_cpu":
        raise ValueError("numerics order torch_cpu must run on a cpu: it is the order of torch.sum there")
    return 1 if order == "sequential" else int(order.removeprefix("split(").removesuffix(")"))


@triton.jit(do_not_specialize=["R", "map_stride_t", "map_stride_k", "weights_stride_t", "weights_stride_k",
                               "gate_stride", "scale"])  # fmt: skip
def _finalize_kernel(
    rows, row_map, weights, shared, gate, num_valid_rows, out, R, rows_stride, map_stride_t, map_stride_k,
    weights_stride_t, weights_stride_k, shared_stride, gate_stride, out_stride, scale,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, COLUMNS_FIRST: tl.constexpr, PRODUCT: tl.constexpr,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if COLUMNS_FIRST:
        blocks: tl.constexpr = tl.cdiv(H, BLOCK)
        t = (tl.program_id(0) // blocks).to(tl.int64)
        c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    else:
        t = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    tl.store(out + t * out_stride + c, y, mask=here)


@triton.jit
def _finalized(
    rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
    weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, dtype: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, PRODUCT: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr,
):  # fmt: skip
    """Columns c of token t, rounded to dtype: all of the op but its store, for every kernel that finalizes."""
    y = _routed_sum(
        rows, row_map + t * map_stride_t, map_stride_k, weights, t * weights_stride_t, weights_stride_k, c, here,
        limit, rows_stride, K, BLOCK, PRODUCT, GROUPS,
    )  # fmt: skip
    if SCALE == "round_row":
        y = _round(y, dtype)
    if SCALE != "none":
        y = y * scale
    if TWO_ROUNDINGS:
        y = _round(y, dtype)
    if shared is not None:
        s = tl.load(shared + t * shared_stride + c, mask=here, other=0.0).to(tl.float32)
        if gate is None:
            y = y + s
        else:
            g = _sigmoid(tl.load(gate + t * gate_stride).to(tl.float32) + tl.zeros_like(s))
            y = y + _round(_round(g, dtype) * s, dtype) if TWO_ROUNDINGS else _fma(g, s, y)
    y = _to(y, dtype)
    if POSITIVE_ZERO:
        y = tl.where(y == 0.0, tl.zeros_like(y), y)
    return y


@triton.jit
def _routed_sum(
    rows, row_map, map_stride_k, weights, weights_at, weights_stride_k, c, here, limit, rows_stride,
    K: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One token's fp32 [BLOCK]: GROUPS accumulators, slot k to k % GROUPS, added left to right."""
    total = tl.zeros([BLOCK], tl.float32)
    for g in tl.static_range(GROUPS if GROUPS < K else K):
        acc = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(g, K, GROUPS):
            r = tl.load(row_map + k * map_stride_k)
            present = (r >= 0) & (r < limit)
            # The row index alone is widened: R * H may pass 2**31, T * K does not.
            at = rows + r.to(tl.int64) * rows_stride + c
            x = tl.load(at, mask=tl.where(present, here, False), other=0.0).to(tl.float32)
            if PRODUCT == "none":
                added = acc + x
            else:
                w = tl.load(weights + weights_at + k * weights_stride_k).to(tl.float32)
                if PRODUCT == "fma":
                    added = _fma(x, w + tl.zeros_like(x), acc)
                elif PRODUCT == "round_row":
                    added = acc + _round(x * w, rows.dtype.element_ty)
                else:
                    added = acc + x * w
            acc = tl.where(present, added, acc)
        total = acc if g == 0 else total + acc
    return total


@triton.jit
def _to(x, dtype: tl.constexpr):
    """fp32 to the rows' dtype, to nearest even. Triton's interpreter truncates to bf16 (3.6 to 3.9): by hand there."""
    if _INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _round(x, dtype: tl.constexpr):
    return _to(x, dtype).to(tl.float32)


@triton.jit
def _fma(x, w, acc):
    """fp32 x * w + acc, rounded once. Triton 3.6's interpreter multiplies and adds: there as `reference.fma`."""
    if _INTERPRET:
        product, addend = x.to(tl.float64) * w.to(tl.float64), acc.to(tl.float64)
        total = product + addend
        error = (product - (total - (total - product))) + (addend - (total - product))
        bits = total.to(tl.int64, bitcast=True)
        toward = tl.where((error > 0) == (total > 0), 1, -1)
        inexact = (error != 0) & (bits & 1 == 0) & (tl.abs(total) < float("inf"))
        return tl.where(inexact, bits + toward, bits).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(x, w, acc)


@triton.jit
def _sigmoid(x):
    """torch.sigmoid in fp32: a full-precision exp (tl.exp is ex2.approx) and a correctly rounded division."""
    if _INTERPRET:
        e = tl.exp(-x)
    else:
        e = libdevice.exp(-x)
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + e)


# What `_finalized` is made of, for the hash of every kernel that finalizes.
FINALIZED = (_finalized, _routed_sum, _to, _round, _fma, _sigmoid)
