"""grouped_gemm on a CUDA GPU: one Triton kernel for both GEMMs of an expert.

A program owns a block of permuted rows, all of one expert, and `columns` rows of that expert's weight (for SwiGLU half
of them the gate's, half up's). Programs of a block that is past the end stop at once: the grid is a static bound.
Small blocks make the weight the left operand: wgmma takes 64 rows on the left and as few as 8 on the right, so that
16 tokens do not pay for 64.

Bits: every config walks Kd in rising order into one fp32 accumulator, never split, and a row of a matrix product does
not depend on its neighbours. The tensor cores add 16 products at a time (wgmma, k = 16, whichever side the weight is
on), one instruction behind the other, so that how many of them a step of the loop holds is no part of the order. So a
config changes time, and a row has the same bits alone and in any batch. What the hardware does inside an instruction
is not documented: `moetail tune` compares each candidate's bits on the GPU and keeps none that differs.
Programmatic dependent launch: as `finalize_triton`.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from moetail import tuning
from moetail.ops.finalize_triton import _INTERPRET, _to, has_pdl

_SHARED_BYTES = 227 * 1024  # of one program on sm_90


@dataclass(frozen=True)
class GemmConfig:
    """A program's rows (the permutation's block) and rows of weight, its warps, its loads in flight, whether the weight
    is the left operand, how many blocks of rows run through the columns together, so that they share the weight and
    their rows in the L2 cache, and how much of a row one step reads: 64 are 128 bytes, one swizzled line of shared
    memory; 128 are two, for fewer and longer reads of DRAM. A config changes time, never bits."""

    block: int
    columns: int
    warps: int
    stages: int
    weight_left: bool
    group: int
    block_k: int = 64

    @property
    def shared_bytes(self) -> int:
        """What its loads in flight take."""
        return (self.block + self.columns) * self.block_k * 2 * self.stages


# One a block; the others are what a probe measures them against.
CONFIGS = {
    16: GemmConfig(16, 64, 4, 6, weight_left=True, group=1),
    64: GemmConfig(64, 128, 4, 4, weight_left=False, group=8),
    128: GemmConfig(128, 256, 8, 4, weight_left=False, group=8),
}
# What the tuner tries. Left operands of whole 64 rows and whole groups of four warps: else it would not be wgmma, whose
# order the bits are. At most 128 accumulators a thread, which do not spill.
CANDIDATES = (
    *CONFIGS.values(),
    # Decode streams weights: 60 to 200 KiB of them in flight a multiprocessor, in one to five programs.
    *(GemmConfig(16, 64, 4, stages, True, 1) for stages in (4, 10)),
    *(GemmConfig(16, 64, 4, stages, True, 1, 128) for stages in (3, 5)),
    *(GemmConfig(16, 128, 4, stages, True, 1) for stages in (4, 6)),
    *(GemmConfig(16, 128, 4, stages, True, 1, 128) for stages in (3, 6)),
    GemmConfig(16, 128, 8, 6, True, 1),
    GemmConfig(16, 256, 8, 3, True, 1),
    GemmConfig(16, 64, 4, 6, True, 8),
    # Between: most experts are one block.
    GemmConfig(64, 128, 4, 3, False, 8),
    GemmConfig(64, 128, 4, 3, True, 8),
    GemmConfig(64, 128, 4, 4, True, 8),
    GemmConfig(64, 128, 4, 4, True, 1),
    GemmConfig(64, 128, 4, 3, True, 8, 128),
    GemmConfig(64, 256, 8, 4, False, 8),
    GemmConfig(64, 256, 8, 4, True, 8),
    # Prefill: two programs a multiprocessor of 128 columns, where one's epilogue hides behind the other's loop, or one
    # of 256, which reads a quarter less from the L2 cache.
    GemmConfig(128, 128, 8, 3, False, 8),
    GemmConfig(128, 128, 4, 3, False, 8),
    GemmConfig(128, 128, 4, 4, False, 8),
    GemmConfig(128, 256, 8, 3, False, 8),
    GemmConfig(128, 256, 8, 4, True, 8),
    GemmConfig(128, 256, 8, 4, False, 1),
    GemmConfig(128, 256, 8, 4, False, 16),
)


def candidates(block: int) -> tuple[GemmConfig, ...]:
    """The heuristic's first."""
    return tuple(config for config in CANDIDATES if config.block == block and config.shared_bytes <= _SHARED_BYTES)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    source: torch.Tensor,
    block_expert: torch.Tensor,
    T: int,
    K: int,
    block: int,
    gather: bool,
    activation: str | None,
    limit: float | None,
    out: torch.Tensor,
    config: GemmConfig | None = None,
) -> None:
    """Write the live rows of `out`, which is contiguous. The arguments are checked, R >= 1.

    The first call of a kind compiles and loads every config that another T could ask for.
    """
    device, (E, N, Kd) = x.device, weight.shape
    facts = Facts(N, Kd, K, gather, activation is not None, limit is not None, has_pdl(device))
    x_stride = x.stride(0) if x.shape[0] > 1 else max(x.stride(0), Kd)  # one row has none of its own
    strides = (x_stride, *weight.stride(), 0 if bias is None else bias.stride(0))
    if config is None:
        shape = tuned_shape(E, K, N, Kd, block, gather, activation is not None, weight.stride(2) != 1)
        config = tuning.tuned(GemmConfig, device, shape, kernel_hash(), T) or CONFIGS[block]
        if device.type == "cuda":
            _compile(device, None if bias is None else bias.dtype, strides, facts, shape)
    row_blocks = source.shape[0] // block
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _grouped_gemm_kernel[(row_blocks * facts.tiles(config),)](
            x, weight, bias, source, block_expert, out, *strides, float(limit or 0.0), row_blocks,
            **facts.options(config),
        )  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The compile-time arguments that a config does not choose."""

    N: int
    KD: int
    K: int
    GATHER: bool
    SWIGLU: bool
    LIMITED: bool
    PDL: bool

    def tiles(self, config: GemmConfig) -> int:
        return triton.cdiv(self.N, config.columns)

    def options(self, config: GemmConfig) -> dict[str, Any]:
        return vars(self) | {
            "BLOCK": config.block, "COLUMNS": config.columns, "BLOCK_K": config.block_k,
            "WEIGHT_LEFT": config.weight_left, "GROUP": config.group, "num_warps": config.warps,
            "num_stages": config.stages, "enable_fp_fusion": False, "launch_pdl": self.PDL,
        }  # fmt: skip


@functools.cache
def tuned_shape(
    E: int, K: int, N: int, Kd: int, block: int, gather: bool, swiglu: bool, transposed: bool = False
) -> tuning.Shape:
    """`transposed`: the weight has stride 1 in N. Bias and limit are not in it: they cost nothing that shows."""
    dims = {"E": E, "K": K, "N": N, "Kd": Kd, "block": block, "gather": int(gather), "swiglu": int(swiglu)}
    return tuning.Shape("grouped_gemm", tuple((dims | {"transposed": int(transposed)}).items()))


@functools.cache
def kernel_hash() -> str:
    return tuning.source_hash(_dot, _grouped_gemm_kernel, _rows, _silu, _to)


@functools.cache
def _compile(
    device: torch.device, bias_dtype: torch.dtype | None, strides: tuple[int, ...], facts: Facts, shape: tuning.Shape
) -> None:
    """Compile and load what any block and any T could ask for."""
    for block in CONFIGS:
        other = replace(shape, dims=tuple((name, block if name == "block" else n) for name, n in shape.dims))
        tuned = tuning.every_tuned(GemmConfig, device, other, kernel_hash())
        for config in dict.fromkeys((CONFIGS[block], *tuned)):
            compile_one(device, bias_dtype, strides, facts, config)


def compile_one(
    device: torch.device, bias_dtype: torch.dtype | None, strides: tuple[int, ...], facts: Facts, config: GemmConfig
) -> None:
    """Compile and load one config for memory aligned to 16 bytes."""
    bf16, i32 = torch.bfloat16, torch.int32
    with torch.cuda.device(device):
        compiled = _grouped_gemm_kernel.warmup(
            bf16, bf16, bias_dtype, i32, i32, bf16, *strides, 2.0, 2, grid=(1,), **facts.options(config)
        )
        compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


@triton.jit(do_not_specialize=["limit", "row_blocks", "bias_stride"])
def _grouped_gemm_kernel(
    x, weight, bias, source, block_expert, out, x_stride, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride, limit, row_blocks, N: tl.constexpr, KD: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    SWIGLU: tl.constexpr, LIMITED: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, WEIGHT_LEFT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    # GROUP blocks of rows by all tiles, the blocks first: neighbours read the same rows of weight.
    group = tl.program_id(0) // (GROUP * TILES)
    within = tl.program_id(0) % (GROUP * TILES)
    in_group = tl.minimum(row_blocks - group * GROUP, GROUP)
    b = group * GROUP + within % in_group
    tile = within // in_group
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.load(block_expert + b)
    if e < 0:
        return
    at = source + b * BLOCK
    if BLOCK == 128 and tl.load(at + 32) < 0:
        _rows(x, weight, bias, at, out, x_stride, weight_stride_e, weight_stride_n, weight_stride_k, bias_stride,
              limit, e, b, tile, N, KD, K, GATHER, SWIGLU, LIMITED, BLOCK, 32, COLUMNS, BLOCK_K, True)  # fmt: skip
    elif BLOCK == 128 and tl.load(at + 64) < 0:
        _rows(x, weight, bias, at, out, x_stride, weight_stride_e, weight_stride_n, weight_stride_k, bias_stride,
              limit, e, b, tile, N, KD, K, GATHER, SWIGLU, LIMITED, BLOCK, 64, COLUMNS, BLOCK_K, True)  # fmt: skip
    else:
        _rows(x, weight, bias, at, out, x_stride, weight_stride_e, weight_stride_n, weight_stride_k, bias_stride,
              limit, e, b, tile, N, KD, K, GATHER, SWIGLU, LIMITED, BLOCK, BLOCK, COLUMNS, BLOCK_K,
              WEIGHT_LEFT)  # fmt: skip


@triton.jit
def _rows(
    x, weight, bias, source_at, out, x_stride, weight_stride_e, weight_stride_n, weight_stride_k, bias_stride, limit,
    e, b, tile, N: tl.constexpr, KD: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, SWIGLU: tl.constexpr,
    LIMITED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    WEIGHT_LEFT: tl.constexpr,
):  # fmt: skip
    """The first ROWS rows of block b by one tile of expert e's columns."""
    HALF: tl.constexpr = COLUMNS // 2
    N_OUT: tl.constexpr = N // 2 if SWIGLU else N
    i = tl.arange(0, ROWS)
    r = b * BLOCK + i
    slot = tl.load(source_at + i)
    live = slot >= 0
    row = tl.where(live, slot // K, 0) if GATHER else r

    c = tl.arange(0, COLUMNS)
    if SWIGLU:
        column = tile * HALF + c % HALF
        n = column + c // HALF * N_OUT
        here = column < N_OUT
    else:
        n = tile * COLUMNS + c
        here = n < N
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight + e.to(tl.int64) * weight_stride_e + n[:, None] * weight_stride_n + k[None, :] * weight_stride_k
    acc = tl.zeros([COLUMNS, ROWS] if WEIGHT_LEFT else [ROWS, COLUMNS], tl.float32)
    for start in range(0, KD, BLOCK_K):
        x_here, w_here = live[:, None], here[:, None]
        if KD % BLOCK_K:
            x_here = x_here & (start + k < KD)[None, :]
            w_here = w_here & (start + k < KD)[None, :]
        x_tile = tl.load(x_at, mask=x_here, other=0.0)
        if N_OUT % (HALF if SWIGLU else COLUMNS) == 0 and KD % BLOCK_K == 0:
            w_tile = tl.load(w_at)
        else:
            w_tile = tl.load(w_at, mask=w_here, other=0.0)
        if WEIGHT_LEFT:
            acc = _dot(w_tile, x_tile, acc)
        else:
            acc = _dot(x_tile, w_tile, acc)
        x_at += BLOCK_K
        w_at += BLOCK_K * weight_stride_k
    y = tl.trans(acc) if WEIGHT_LEFT else acc
    if bias is not None:
        y += tl.load(bias + e * bias_stride + n, mask=here, other=0.0).to(tl.float32)[None, :]
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, [ROWS, 2, HALF]), [0, 2, 1]))
        if LIMITED:  # not minimum and maximum, which drop a NaN
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = _silu(gate) * up
        n = tile * HALF + tl.arange(0, HALF)
    at = out + r.to(tl.int64)[:, None] * N_OUT + n[None, :]
    tl.store(at, _to(y, out.dtype.element_ty), mask=live[:, None] & (n < N_OUT)[None, :])


@triton.jit
def _dot(a, b, acc):
    """acc + a [M, k] @ b [N, k].T, its products added in rising k."""
    if _INTERPRET:  # which multiplies the bit patterns of bf16, and adds a whole step before it adds it to acc
        a, b = a.to(tl.float32), b.to(tl.float32)
        for first in tl.static_range(0, a.shape[1], 64):
            acc = tl.dot(_columns(a, first), tl.trans(_columns(b, first)), acc)
        return acc
    else:
        return tl.dot(a, tl.trans(b), acc)


@triton.jit
def _columns(a, first: tl.constexpr):
    """Columns first to first + 63 of a, which has 64 or 128."""
    if a.shape[1] == 64:
        return a
    else:
        low, high = tl.split(tl.permute(tl.reshape(a, [a.shape[0], 2, 64]), [0, 2, 1]))
        return low if first == 0 else high


@triton.jit
def _silu(x):
    """x / (1 + exp(-x)) in fp32. tl.exp is off by about |x| + 2 units of 2**-24: 2**-17 at the end of fp32's range, far
    below a bf16's 2**-9."""
    return tl.div_rn(x, 1.0 + tl.exp(-x))
