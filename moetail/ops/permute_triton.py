"""permute on a CUDA GPU: a counting sort in one launch (few slots) or two.

Programs own consecutive chunks of slots. Launch one counts each program's slots by expert. In launch two every program
adds up those counts, which gives the first row of each expert and how many of its slots lie in earlier programs, and
walks its chunks: a slot's row is the expert's next row plus its rank among the equal slots of the chunk, found by
comparing all pairs. Atomics only add up counts (tl.histogram), never hand out rows: the order is stable, and every run
the same. With one program the counts come from a first walk over its own chunks, and there is one launch.
Each output element is written once: a padding row by the last slot of its expert, what lies past the end by stride.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moetail import tuning
from moetail.ops.finalize_triton import has_pdl
from moetail.ops.grouped_gemm import BLOCKS

CHUNK = 128  # slots, one a thread: all pairs are 128 comparisons a thread


@dataclass(frozen=True)
class PermuteConfig:
    """How many chunks one program takes alone, and how many programs there are at most (each adds up the counts of all:
    128 at E=384 read 192 KiB from the L2 cache). It changes time, never the order."""

    one_launch: int
    programs: int


HEURISTIC = PermuteConfig(4, 128)
CANDIDATES = (
    HEURISTIC, *(PermuteConfig(one_launch, 128) for one_launch in (1, 2, 8, 16)), PermuteConfig(4, 64),
    PermuteConfig(4, 256),
)  # fmt: skip


def programs(slots: int, config: PermuteConfig = HEURISTIC) -> tuple[int, int]:
    """How many programs, and how many chunks each."""
    chunks = triton.cdiv(slots, CHUNK)
    if chunks <= config.one_launch:
        return 1, chunks
    each = triton.cdiv(chunks, config.programs)
    return triton.cdiv(chunks, each), each


def launch(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    block: int,
    row_map: torch.Tensor,
    source: torch.Tensor,
    block_expert: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    num_rows: torch.Tensor,
    config: PermuteConfig | None = None,
) -> None:
    """Write the outputs, all contiguous. The arguments are checked, T >= 1.

    The first call of a kind compiles and loads every kernel that another T could ask for.
    """
    (T, K), device = topk_ids.shape, topk_ids.device
    if config is None:
        shape = tuned_shape(num_experts, K, block)
        config = tuning.tuned(PermuteConfig, device, shape, kernel_hash(), T) or HEURISTIC
    count, each = programs(T * K, config)
    facts = options(num_experts, K, block, has_pdl(device))
    map_dtype = None if expert_map is None else expert_map.dtype
    if device.type == "cuda":
        blocks = BLOCKS if block in BLOCKS else (block,)  # one T's block is another's at another T
        _compile(device, topk_ids.dtype, map_dtype, num_experts, K, blocks)
    mapped = 0 if expert_map is None else expert_map.numel()
    ids = (topk_ids, *topk_ids.stride(), expert_map, mapped, T * K, each)
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        histogram = counts if count == 1 else torch.empty(count, num_experts, dtype=torch.int32, device=device)
        if count > 1:
            _count_kernel[(count,)](*ids, histogram, **{k: v for k, v in facts.items() if k != "BLOCK"})
        _place_kernel[(count,)](
            *ids, histogram, row_map, source, block_expert, counts, offsets, num_rows, source.numel(), count,
            ALONE=count == 1, **facts,
        )  # fmt: skip


@functools.cache
def tuned_shape(num_experts: int, K: int, block: int) -> tuning.Shape:
    return tuning.Shape("permute", (("E", num_experts), ("K", K), ("block", block)), "int32")


@functools.cache
def kernel_hash() -> str:
    return tuning.source_hash(_count_kernel, _place_kernel, _count, _experts, programs)


def options(num_experts: int, K: int, block: int, pdl: bool) -> dict[str, Any]:
    """The compile-time arguments of the kernels, and the launch's."""
    return {
        "E": num_experts, "EP": max(32, triton.next_power_of_2(num_experts)), "K": K, "BLOCK": block, "CHUNK": CHUNK,
        "PDL": pdl, "num_warps": CHUNK // 32, "launch_pdl": pdl,
    }  # fmt: skip


@functools.cache
def _compile(
    device: torch.device, ids_dtype: torch.dtype, map_dtype: torch.dtype | None, num_experts: int, K: int,
    blocks: tuple[int, ...],
) -> None:  # fmt: skip
    """Compile and load all kernels for tensors of these dtypes (their memory aligned to 16 bytes)."""
    ids = (ids_dtype, 2, 2, map_dtype, 2, 2, 2)
    i32 = torch.int32
    every = [options(num_experts, K, block, has_pdl(device)) for block in blocks]
    with torch.cuda.device(device):
        kernels = [
            _place_kernel.warmup(*ids, i32, i32, i32, i32, i32, i32, i32, 2, 2, grid=(1,), ALONE=alone, **facts)
            for alone in (True, False)
            for facts in every
        ]
        kernels.append(
            _count_kernel.warmup(*ids, i32, grid=(1,), **{k: v for k, v in every[0].items() if k != "BLOCK"})
        )  # fmt: skip
        for kernel in kernels:
            kernel[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


@triton.jit(do_not_specialize=["stride_t", "stride_k", "mapped", "S", "each"])
def _count_kernel(
    ids, stride_t, stride_k, expert_map, mapped, S, each, histogram, E: tl.constexpr, EP: tl.constexpr,
    K: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * each
    counts = _count(ids, stride_t, stride_k, expert_map, mapped, S, first, first + each, E, EP, K, CHUNK)
    expert = tl.arange(0, EP)
    tl.store(histogram + tl.program_id(0) * E + expert, counts, mask=expert < E)


@triton.jit(do_not_specialize=["stride_t", "stride_k", "mapped", "S", "each", "R", "programs"])
def _place_kernel(
    ids, stride_t, stride_k, expert_map, mapped, S, each, histogram, row_map, source, block_expert, counts, offsets,
    num_rows, R, programs, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    first = p * each
    expert = tl.arange(0, EP)
    earlier = tl.zeros([EP], tl.int32)
    if ALONE:
        total = _count(ids, stride_t, stride_k, expert_map, mapped, S, 0, each, E, EP, K, CHUNK)
    else:
        total = tl.zeros([EP], tl.int32)
        TILE: tl.constexpr = 64 if EP < 128 else 8192 // EP
        q = 0
        while q < programs:
            other = q + tl.arange(0, TILE)[:, None]
            at = histogram + other * E + expert[None, :]
            some = tl.load(at, mask=(other < programs) & (expert[None, :] < E), other=0)
            total += tl.sum(some, axis=0)
            earlier += tl.sum(tl.where(other < p, some, 0), axis=0)
            q += TILE
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    end = tl.cumsum(padded, axis=0)
    used = tl.sum(padded)
    behind = end - padded + total  # the row behind an expert's last slot
    next_row = end - padded + earlier
    if p == 0:
        tl.store(counts + expert, total, mask=expert < E)
        tl.store(offsets + expert, end, mask=expert < E)
        tl.store(num_rows, used)

    i = tl.arange(0, CHUNK)
    pad = tl.arange(0, BLOCK)
    chunk = first
    while chunk < first + each:
        slot = chunk * CHUNK + i
        mine = _experts(ids, stride_t, stride_k, expert_map, mapped, S, slot, E, K)
        here = mine >= 0
        named = tl.where(here, mine, 0)
        equal_before = (mine[:, None] == mine[None, :]) & (i[:, None] < i[None, :])
        row = tl.gather(next_row, named, 0) + tl.sum(equal_before.to(tl.int32), axis=0)
        tl.store(row_map + slot, tl.where(here, row, -1), mask=slot < S)
        tl.store(source + row, slot, mask=here)
        tl.store(block_expert + row // BLOCK, mine, mask=here & (row % BLOCK == 0))
        if BLOCK > 1:
            last = here & (row + 1 == tl.gather(behind, named, 0))
            after = row[:, None] + 1 + pad[None, :]
            gap = last[:, None] & (after < (row[:, None] // BLOCK + 1) * BLOCK)
            tl.store(source + after, -1, mask=gap)
        next_row += tl.histogram(named, EP, mask=here)
        chunk += 1

    past = p * CHUNK
    while used + past < R:
        tl.store(source + used + past + i, -1, mask=used + past + i < R)
        tl.store(block_expert + used // BLOCK + past + i, -1, mask=used // BLOCK + past + i < R // BLOCK)
        past += programs * CHUNK


@triton.jit
def _count(
    ids, stride_t, stride_k, expert_map, mapped, S, first, last, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """int32 [EP]: the slots of each expert in chunks first to last."""
    counts = tl.zeros([EP], tl.int32)
    chunk = first
    while chunk < last:  # not range: Triton 3.6's interpreter cannot make one of tensors (numpy 2.4)
        slot = chunk * CHUNK + tl.arange(0, CHUNK)
        mine = _experts(ids, stride_t, stride_k, expert_map, mapped, S, slot, E, K)
        counts += tl.histogram(tl.where(mine >= 0, mine, 0), EP, mask=mine >= 0)
        chunk += 1
    return counts


@triton.jit
def _experts(ids, stride_t, stride_k, expert_map, mapped, S, slot, E: tl.constexpr, K: tl.constexpr):
    """int32: the expert of each slot, -1 where it is absent."""
    at = (slot // K).to(tl.int64) * stride_t + slot % K * stride_k
    expert = tl.load(ids + at, mask=slot < S, other=-1)
    if expert_map is not None:
        expert = tl.load(expert_map + expert, mask=(expert >= 0) & (expert < mapped), other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)
