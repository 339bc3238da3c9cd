"""mhc_mixes on a CUDA GPU: two Triton kernels.

    _sums_kernel   [16 tokens, SLICE columns] a program: its part of fn @ f on the tensor cores, and of the squares
    _mixes_kernel  a token a program: the slices' sums, sigmoids, and the Sinkhorn steps on hc * hc numbers

f is bf16 and fn is fp32, whose 24 bits are those of three bf16 numbers: three products of bf16 tiles, added in fp32
from the small ones up, lose nothing that an fp32 product would keep. Tiles are the same for every T: a token's bits do
not depend on its batch. Programmatic dependent launch as in `finalize_triton.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from moetail.ops.finalize_triton import _INTERPRET, has_pdl

# At 20480 columns one tile of tokens makes 80 programs; a longer slice would leave more of an H200 idle at decode. Not
# yet timed.
SLICE, COLUMNS, TOKENS = 256, 128, 16


def launch(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, rms_eps: float, hc_eps: float,
    iterations: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write `out` [T, hc*(hc+2)]. The arguments are checked, T >= 1."""
    T, hc, H = streams.shape
    slices, pdl = triton.cdiv(hc * H, SLICE), has_pdl(streams.device)
    rows = max(triton.next_power_of_2(hc * (hc + 2)), 16)  # a tile of the tensor cores is no smaller
    sums = out.new_empty(slices, T, rows)
    squares = out.new_empty(slices, T)
    grid = (slices, triton.cdiv(T, TOKENS))
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(streams.device) if streams.device.type == "cuda" else contextlib.nullcontext():
        _sums_kernel[grid](streams, fn, sums, squares, T, streams.stride(0), **_sums_options(hc, H, rows, pdl))
        _mixes_kernel[(T,)](
            sums, squares, base, scale, out, T, float(rms_eps), float(hc_eps), iterations,
            **_mixes_options(hc, H, rows, slices, pdl),
        )  # fmt: skip


def _sums_options(hc: int, H: int, rows: int, pdl: bool) -> dict[str, Any]:
    return {
        "C": hc * H, "N": hc * (hc + 2), "ROWS": rows, "SLICE": SLICE, "COLUMNS": COLUMNS, "TOKENS": TOKENS, "PDL": pdl,
        "num_warps": 4, "enable_fp_fusion": False, "launch_pdl": pdl,
    }  # fmt: skip


def _mixes_options(hc: int, H: int, rows: int, slices: int, pdl: bool) -> dict[str, Any]:
    """One warp: the Sinkhorn steps are a chain of sums over four numbers, which must not cross warps."""
    return {
        "C": hc * H, "HC": hc, "STREAMS": triton.next_power_of_2(hc), "ROWS": rows, "SLICES": slices,
        "BLOCK": triton.next_power_of_2(slices), "PDL": pdl, "num_warps": 1,
        "enable_fp_fusion": False, "launch_pdl": pdl,
    }  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _sums_kernel(
    streams, fn, sums, squares, T, stride, C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.arange(0, ROWS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for first in tl.static_range(0, SLICE, COLUMNS):
        c = part * SLICE + first + tl.arange(0, COLUMNS)
        f_mask, fn_mask = (t < T)[:, None] & (c < C)[None, :], (n < N)[:, None] & (c < C)[None, :]
        f = tl.load(streams + t[:, None].to(tl.int64) * stride + c[None, :], mask=f_mask, other=0.0)
        w = tl.load(fn + n[:, None] * C + c[None, :], mask=fn_mask, other=0.0)
        x = f.to(tl.float32)
        square += tl.sum(x * x, axis=1)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if _INTERPRET:  # which multiplies the bit patterns of bf16
            f, low, middle, high = x, low.to(tl.float32), middle.to(tl.float32), high.to(tl.float32)
        total = tl.dot(f, tl.trans(low), total)
        total = tl.dot(f, tl.trans(middle), total)
        total = tl.dot(f, tl.trans(high), total)
    row = part.to(tl.int64) * T + t
    tl.store(sums + row[:, None] * ROWS + n[None, :], total, mask=(t < T)[:, None])
    tl.store(squares + row, square, mask=t < T)


@triton.jit(do_not_specialize=["T", "rms_eps", "hc_eps", "iterations"])
def _mixes_kernel(
    sums, squares, base, scale, out, T, rms_eps, hc_eps, iterations, C: tl.constexpr, HC: tl.constexpr,
    STREAMS: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    part, i = tl.arange(0, BLOCK), tl.arange(0, STREAMS)
    there = part < SLICES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = part.to(tl.int64) * T + t
    mean = tl.sum(tl.load(squares + row, mask=there, other=0.0), axis=0) / C
    inverse = 1.0 / tl.sqrt(mean + rms_eps)
    line = sums + row * ROWS
    out += t * (HC * (HC + 2))

    mask = there[:, None] & (i < HC)[None, :]
    m = tl.sum(tl.load(line[:, None] + i[None, :], mask=mask, other=0.0), axis=0) * inverse
    pre = _sigmoid(m * tl.load(scale) + tl.load(base + i, mask=i < HC, other=0.0)) + hc_eps
    m = tl.sum(tl.load(line[:, None] + HC + i[None, :], mask=mask, other=0.0), axis=0) * inverse
    post = 2.0 * _sigmoid(m * tl.load(scale + 1) + tl.load(base + HC + i, mask=i < HC, other=0.0))
    tl.store(out + i, pre, mask=i < HC)
    tl.store(out + HC + i, post, mask=i < HC)

    at = 2 * HC + i[:, None] * HC + i[None, :]  # [source, target]
    here = (i < HC)[:, None] & (i < HC)[None, :]
    m = tl.load(line[:, None, None] + at[None, :, :], mask=there[:, None, None] & here[None, :, :], other=0.0)
    a = tl.sum(m, axis=0) * inverse * tl.load(scale + 2) + tl.load(base + at, mask=here, other=0.0)
    a = tl.where(here, a, float("-inf"))
    largest = tl.where(i < HC, tl.max(a, axis=1), 0.0)
    e = tl.exp(a - largest[:, None])
    total = tl.where(i < HC, tl.sum(e, axis=1), 1.0)
    comb = tl.where(here, e / total[:, None] + hc_eps, 0.0)
    comb = comb / (tl.sum(comb, axis=0) + hc_eps)[None, :]
    step = 1
    while step < iterations:  # not range: Triton 3.6's interpreter cannot make one of tensors (numpy 2.4)
        comb = comb / (tl.sum(comb, axis=1) + hc_eps)[:, None]
        comb = comb / (tl.sum(comb, axis=0) + hc_eps)[None, :]
        step += 1
    tl.store(out + at, comb, mask=here)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
