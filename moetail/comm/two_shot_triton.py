"""The sum over ranks of many tokens on CUDA GPUs, in two shots: finalize_all_reduce and all_reduce (_norm, _mhc too)
above the one-shot kernel's sizes, finalize_reduce_scatter at any.

Each rank owns a slice of the tokens, cut into tiles. Three stages, in one kernel:
1. finalize the tiles that peers own and push each part, rounded, into its owner's inbox; then the tile's flag;
2. finalize the own tiles, wait for the peers' parts of each, add the ranks in rank order in fp32, round once, write the
   sum out and push it to every peer's results; then the tile's flag. A scatter ends here;
3. wait for the results of each tile that a peer owns, and write them, or what the epilogue makes of them, out.
`out` is an ordinary tensor at the price of one local copy, 5 % of the bytes of a finalize of six slots.

A flag is the number of its call: nothing is reset. Data is stored, then a barrier, then one thread releases the flag at
system scope; whoever waits acquires it, then a barrier, then the data. Unicast stores only, no remote atomics.

What is written over is never still read. The inbox has two phases, by the call's parity: a call does not end before
every rank's header of it is here, and a rank pushes that only after its own call before has ended, so a rank in call
n + 2 knows that every rank has ended call n. The results need no second phase: an owner pushes a tile only after it has
this rank's part of it, which comes after this rank's last call, and with it every read of the results, has ended
(tests/two_shot_model.py walks all interleavings).

A program has pushed all its parts before it first waits, and all its sums before it waits for a peer's: no cycle of
waits can close, as long as all programs are resident. Faults are the one-shot kernel's: headers, a bounded wait, a
status word that stays, NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from moetail.comm import finalize_all_reduce_triton as one_shot
from moetail.comm import memory
from moetail.comm.finalize_all_reduce_triton import (
    Epilogue,
    Place,
    _begin,
    _end,
    _fail,
    _followed,
    _globaltimer,
    _uniform,
)
from moetail.comm.workspace import Kind
from moetail.numerics import Numerics
from moetail.ops.epilogue_triton import _quantize
from moetail.ops.finalize_triton import _INTERPRET, Facts, _finalized, _to

_PEERS, _TIMEOUT_NS, _RANKS = one_shot._PEERS, one_shot._TIMEOUT_NS, tl.constexpr(memory.MAX_WORLD_SIZE)
_READY, _WAITING, _WRONG, _LATE = one_shot._READY, one_shot._WAITING, one_shot._WRONG, one_shot._LATE
_TIMED_OUT, _DISAGREED = one_shot._TIMED_OUT, one_shot._DISAGREED


@dataclass(frozen=True)
class TwoShotConfig:
    """Tokens of a tile (a power of two up to 64: ranks that differ in it disagree), columns of a step, warps of a
    program and programs on a multiprocessor. It changes time, never bits."""

    tile: int
    block: int
    warps: int
    programs: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def registers(self) -> int:
        """Of a thread, at most, so that all programs are resident: the compiler is held to it."""
        return min(255, 65536 // (self.threads * self.programs) // 8 * 8)


def heuristic(W: int, H: int, epilogue: str) -> TwoShotConfig:
    """The config of every call: T is no part of it.

    A guess, nothing of this kernel is measured yet. The prototype's best was tile 1, block 1024, 4 warps, 4 programs
    (H200, two ranks, H 5120: 266 us at 8192 tokens, 408 with larger tiles and blocks). A norm by 8 warps of more
    columns or ranks would spill (sm_90, Triton 3.9).
    """
    if epilogue == "none":
        config = TwoShotConfig(tile=1, block=1024, warps=4, programs=4)
    elif epilogue == "norm" and W == 2 and H <= 8192:
        config = TwoShotConfig(tile=1, block=0, warps=8, programs=2)
    else:
        config = TwoShotConfig(tile=1, block=0, warps=16, programs=1)
    return _fitted(config, H, epilogue)


def every_config(H: int, epilogue: str) -> tuple[TwoShotConfig, ...]:
    """What a tuner may try."""
    shapes = ((0, 16, 1), (0, 16, 2), (0, 8, 1), (0, 8, 2), (0, 32, 1))
    if epilogue == "none":
        shapes = ((1024, 4, 3), (1024, 4, 4), (1024, 4, 5), (1024, 4, 6), (2048, 8, 2), (2048, 8, 3),
                  (2048, 4, 4), (512, 2, 8), (4096, 16, 1))  # type: ignore[assignment] # fmt: skip
    found = (
        _fitted(TwoShotConfig(tile, *shape), H, epilogue) for shape in shapes for tile in (1, 2, 4)
    )  # fmt: skip
    return tuple(dict.fromkeys(found))


def _fitted(config: TwoShotConfig, H: int, epilogue: str) -> TwoShotConfig:
    """An epilogue needs the whole row in one program."""
    row = triton.next_power_of_2(H)
    block = min(config.block, row) if epilogue == "none" else row
    return replace(config, block=max(config.threads, block))


def run(
    tensors: tuple[torch.Tensor | None, ...], numbers: tuple[Any, ...], strides: tuple[int, ...], layout: memory.Layout,
    place: Place, T: int, kind: Kind, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Write the tensors' `out`, of T tokens or this rank's share of them. The arguments are the one-shot launch's."""
    config = heuristic(constants["W"], layout.hidden, constants["EPILOGUE"])
    device = next(t for t in tensors if t is not None).device
    programs = place.programs(device, config.warps, config.threads * config.programs)
    tiles = triton.cdiv(triton.cdiv(T, place.world_size), config.tile)
    grid = max(1, min(tiles * (place.world_size - 1), programs))
    with torch.cuda.device(device):
        _two_shot_kernel[(grid,)](
            *tensors, *numbers, layout.slice_tokens, *strides, *_offsets(layout),
            **_options(kind, place.rank, constants, config),
        )  # fmt: skip


def launch_reduce_scatter(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    routed_scale: float,
    numerics: Numerics,
    control: torch.Tensor,
    place: Place,
    out: torch.Tensor,
) -> None:
    """Write `out` [T / W, H]. The arguments are checked, `numerics` is concrete; T may be 0."""
    (T, K), (R, H) = row_map.shape, rows.shape
    layout, e = place.layout(rows.device, H), Epilogue()
    facts = Facts.of(K, H, numerics, routed_scale, place.pdl(rows.device))
    inputs = (rows, row_map, weights, shared, shared_gate, num_valid_rows)
    tensors, strides, mixes = one_shot.operands(inputs, control, out, e)
    constants = one_shot.shared_constants(e, facts, place, finalize=True)
    numbers = (*one_shot.finalize_numbers(row_map, weights, shared_gate, R, routed_scale), float(e.eps), *mixes)
    dtypes, kind = tuple(None if t is None else t.dtype for t in tensors), Kind.FINALIZE_REDUCE_SCATTER
    _compile_scatter(
        rows.device, dtypes, strides, layout, numbers[3:6:2], place.ranks, tuple(sorted(constants.items()))
    )
    run(tensors, numbers, strides, layout, place, T, kind, constants)


@functools.cache
def _compile_scatter(device, dtypes, strides, layout, steps, ranks, constants) -> None:
    compile_all(device, dtypes, strides, layout, steps, ranks, Kind.FINALIZE_REDUCE_SCATTER, dict(constants))


def compile_all(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], strides: tuple[int, ...], layout: memory.Layout,
    steps: tuple[int, int], ranks: tuple[int, ...], kind: Kind, constants: dict[str, Any],
) -> None:  # fmt: skip
    """Compile and load what serves every T, for each of these ranks: those whose calls this process makes.

    steps: the strides of k, in row_map and weights."""
    config = heuristic(constants["W"], layout.hidden, constants["EPILOGUE"])
    unspecialized = (2, 2, 2, steps[0], 2, steps[1], 2, 2.0, 2.0, *(2,) * 6)
    with torch.cuda.device(device):
        for rank in ranks:
            options = _options(kind, rank, constants, config)
            compiled = _two_shot_kernel.warmup(
                *dtypes, *unspecialized, *strides, *_offsets(layout), grid=(1,), **options
            )  # fmt: skip
            compiled[(1, 1, 1)]


def _offsets(layout: memory.Layout) -> tuple[int, ...]:
    return layout.arrivals, layout.result_flags, layout.inbox, layout.results


def _options(kind: Kind, rank: int, constants: dict[str, Any], config: TwoShotConfig) -> dict[str, Any]:
    return constants | {
        "KIND": kind.by(config.tile), "SCATTER": kind == Kind.FINALIZE_REDUCE_SCATTER, "RANK": rank,
        "TILE": config.tile, "BLOCK": config.block, "THREADS": config.threads, "num_warps": config.warps,
        "maxnreg": config.registers,
    }  # fmt: skip


# The strides of k are specialized: where they are 1, 24 registers of offsets become constants (K 6).
@triton.jit(do_not_specialize=["T", "R", "map_stride_t", "weights_stride_t", "gate_stride", "scale", "eps",
                               "post_stride", "comb_stride", "pre_stride", "scales_stride_t", "scales_stride_g",
                               "slice_tokens"],
            do_not_specialize_on_alignment=["post_mix", "res_mix", "pre_mix"])  # fmt: skip
def _two_shot_kernel(
    rows, row_map, weights, shared, gate, num_valid_rows, residual, post_mix, res_mix, pre_mix, norm_weight,
    post_norm_weight, out, residual_out, values, scales, control, T, R, map_stride_t, map_stride_k, weights_stride_t,
    weights_stride_k, gate_stride, scale, eps, post_stride, comb_stride, pre_stride, scales_stride_t, scales_stride_g,
    slice_tokens, rows_stride, shared_stride, out_stride, residual_stride_t, residual_stride_s, residual_out_stride_t,
    residual_out_stride_s, values_stride, arrivals, result_flags, inbox, results,
    K: tl.constexpr, H: tl.constexpr, PRODUCT: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr, PDL: tl.constexpr, KIND: tl.constexpr,
    FINALIZE: tl.constexpr, EPILOGUE: tl.constexpr, HC: tl.constexpr, ZERO_CENTRED: tl.constexpr, QUANT: tl.constexpr,
    W: tl.constexpr, RANK: tl.constexpr, SCATTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns: tl.constexpr = tl.cdiv(H, BLOCK)
    STRIDE: tl.constexpr = (H + 7) // 8 * 8  # tl.cdiv is no constexpr in Triton 3.6
    dtype = out.dtype.element_ty
    call, alone, alive = _begin(control, THREADS)
    phase = call % 2
    header = ((call & 0x7FFFFFFF) << 32) | (KIND << 24) | T
    lane = tl.arange(0, THREADS)
    peers = tl.load(control + _PEERS + lane, mask=lane < W, other=0)
    mine = tl.load(control + _PEERS + RANK)
    part = tl.cdiv(T, W)  # tokens of a rank
    tiles = tl.cdiv(part, TILE)
    limit = R
    if num_valid_rows is not None:
        limit = tl.minimum(R.to(tl.int64), tl.load(num_valid_rows).to(tl.int64))
    if (tl.program_id(0) == 0) & alive:
        for w in tl.static_range(W):
            tl.store(tl.load(control + _PEERS + w).to(tl.pointer_type(tl.int64)) + phase * W + RANK, header)

    # Of the stages 1 and 2 nothing but `present` may hold a predicate across the loads of the rows: with the rank, its
    # masks and the fault's in registers, ptxas (12.9) ran out of the seven and waited for each row before the next.
    # 1: parts of the peers' tiles, the next rank's first
    for unit in range(tl.program_id(0), tl.where(alive, tiles * (W - 1), 0), tl.num_programs(0)):
        tile, owner = unit // (W - 1), (RANK + 1 + unit % (W - 1)) % W
        first = owner * part + tile * TILE
        there = tl.minimum(tl.minimum(TILE, part - tile * TILE), T - first)  # none where T is no multiple of W
        if there > 0:
            slot = (phase * (W - 1) + RANK - (owner < RANK)) * slice_tokens + tile * TILE
            to = tl.load(control + _PEERS + owner) + inbox
            for step in range(0, there * columns):
                t = (first + step // columns).to(tl.int64)
                c = step % columns * BLOCK + tl.arange(0, BLOCK)
                here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
                y = _part(
                    rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
                    weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, dtype, K, BLOCK, PRODUCT,
                    GROUPS, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO, FINALIZE,
                )  # fmt: skip
                tl.store(_row(to, slot + step // columns, c, dtype, STRIDE), y, mask=here)
            flag = ((phase * slice_tokens + tile) * _RANKS + RANK) * 8
            _release(peers + arrivals + flag, call, lane == owner)

    failed = tl.where(alive, _READY, _LATE)
    if failed == 0:
        words = mine + (phase * W + lane % _RANKS) * 8
        failed = _awaited(control, words, header, tl.where(lane % _RANKS < W, -1, 0), call, True, THREADS)

    # 2: sums of the own tiles
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = RANK * part + tile * TILE
        there = tl.minimum(tl.minimum(TILE, part - tile * TILE), T - first)
        if (failed == 0) & (there > 0):
            words = mine + arrivals + ((phase * slice_tokens + tile) * _RANKS + lane % _RANKS) * 8
            others = tl.where((lane % _RANKS < W) & (lane % _RANKS != RANK), -1, 0)
            failed = _awaited(control, words, call, others, call, False, THREADS)
        if (failed == 0) & (there > 0):
            for step in range(0, there * columns):
                t = (first + step // columns).to(tl.int64)
                c = step % columns * BLOCK + tl.arange(0, BLOCK)
                here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
                own = _part(
                    rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
                    weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, dtype, K, BLOCK, PRODUCT,
                    GROUPS, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO, FINALIZE,
                )  # fmt: skip
                slot = phase * (W - 1) * slice_tokens + tile * TILE + step // columns
                total = own.to(tl.float32)
                for w in tl.static_range(W):
                    if w == RANK:
                        one = own
                    else:
                        one = tl.load(_row(mine + inbox, slot, c, dtype, STRIDE), mask=here, other=0.0,
                                      cache_modifier=".cg")  # fmt: skip
                        slot += slice_tokens
                    total = one.to(tl.float32) if w == 0 else total + one.to(tl.float32)
                y = _to(total, dtype)
                if not SCATTER:
                    for behind in tl.static_range(1, W):
                        to = tl.load(control + _PEERS + (RANK + behind) % W) + results
                        tl.store(_row(to, t, c, dtype, STRIDE), y, mask=here)
                y = _followed(
                    y, t, c, None, here, residual, post_mix, res_mix, pre_mix, norm_weight, post_norm_weight,
                    residual_out, eps, post_stride, comb_stride, pre_stride, residual_stride_t, residual_stride_s,
                    residual_out_stride_t, residual_out_stride_s, H, EPILOGUE, HC, ZERO_CENTRED,
                )  # fmt: skip
                tl.store(out + (t - RANK * part if SCATTER else t) * out_stride + c, y, mask=here)
                if QUANT is not None:
                    _quantize(y, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, None,
                              here, H, BLOCK, QUANT)  # fmt: skip
            if not SCATTER:
                _release(peers + result_flags + (tile * _RANKS + RANK) * 8, call, (lane < W) & (lane != RANK))

    # 3: the peers' sums
    if not SCATTER:
        for unit in range(tl.program_id(0), tiles * (W - 1), tl.num_programs(0)):
            tile, owner = unit // (W - 1), (RANK + 1 + unit % (W - 1)) % W
            first = owner * part + tile * TILE
            there = tl.minimum(tl.minimum(TILE, part - tile * TILE), T - first)
            if (failed == 0) & (there > 0):
                words = mine + result_flags + (tile * _RANKS + lane % _RANKS) * 8
                from_owner = tl.where(lane % _RANKS == owner, -1, 0)
                failed = _awaited(control, words, call, from_owner, call, False, THREADS)
            for step in range(0, tl.where(failed == 0, there * columns, 0)):
                t = (first + step // columns).to(tl.int64)
                c = step % columns * BLOCK + tl.arange(0, BLOCK)
                here = (c < H) if H % BLOCK else tl.full([BLOCK], True, tl.int1)
                y = tl.load(_row(mine + results, t, c, dtype, STRIDE), mask=here, other=0.0, cache_modifier=".cg")
                y = _followed(
                    y, t, c, None, here, residual, post_mix, res_mix, pre_mix, norm_weight, post_norm_weight,
                    residual_out, eps, post_stride, comb_stride, pre_stride, residual_stride_t, residual_stride_s,
                    residual_out_stride_t, residual_out_stride_s, H, EPILOGUE, HC, ZERO_CENTRED,
                )  # fmt: skip
                tl.store(out + t * out_stride + c, y, mask=here)
                if QUANT is not None:
                    _quantize(y, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, None,
                              here, H, BLOCK, QUANT)  # fmt: skip

    if failed != 0:
        tl.debug_barrier()  # what this program has written of these tiles is there
        OWNERS: tl.constexpr = 1 if SCATTER else W
        for unit in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _nan(unit, RANK, part, T, out, out_stride, RANK * part if SCATTER else 0, residual_out,
                 residual_out_stride_t, residual_out_stride_s, values, values_stride, scales, scales_stride_t,
                 scales_stride_g, H, HC, QUANT, TILE, BLOCK)  # fmt: skip
        for unit in range(tl.program_id(0), tiles * (OWNERS - 1), tl.num_programs(0)):
            _nan(unit // (W - 1), (RANK + 1 + unit % (W - 1)) % W, part, T, out, out_stride, 0, residual_out,
                 residual_out_stride_t, residual_out_stride_s, values, values_stride, scales, scales_stride_t,
                 scales_stride_g, H, HC, QUANT, TILE, BLOCK)  # fmt: skip
    _end(control, alone, tl.full([], RANK, tl.int32), call)


@triton.jit
def _nan(
    tile, owner, part, T, out, out_stride, out_first, residual_out, residual_out_stride_t, residual_out_stride_s,
    values, values_stride, scales, scales_stride_t, scales_stride_g, H: tl.constexpr, HC: tl.constexpr,
    QUANT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a tile is after a fault."""
    columns: tl.constexpr = tl.cdiv(H, BLOCK)
    first = owner * part + tile * TILE
    for step in range(0, tl.minimum(tl.minimum(TILE, part - tile * TILE), T - first) * columns):
        t = (first + step // columns).to(tl.int64)
        c = step % columns * BLOCK + tl.arange(0, BLOCK)
        nan = tl.full([BLOCK], float("nan"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + (t - out_first) * out_stride + c, nan, mask=c < H)
        if residual_out is not None:
            for stream in range(0, HC if HC else 1):
                at = residual_out + t * residual_out_stride_t + stream * residual_out_stride_s + c
                tl.store(at, nan, mask=c < H)
        if QUANT is not None:
            _quantize(nan, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, None, c < H,
                      H, BLOCK, QUANT)  # fmt: skip


@triton.jit
def _part(
    rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k, weights_stride_t,
    weights_stride_k, shared_stride, gate_stride, scale, dtype: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr, TWO_ROUNDINGS: tl.constexpr,
    POSITIVE_ZERO: tl.constexpr, FINALIZE: tl.constexpr,
):  # fmt: skip
    """This rank's own part of token t."""
    if FINALIZE:
        y = _finalized(
            rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
            weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, dtype, K, BLOCK, PRODUCT, GROUPS,
            SCALE, TWO_ROUNDINGS, POSITIVE_ZERO,
        )  # fmt: skip
    else:
        y = tl.load(rows + t * rows_stride + c, mask=here, other=0.0)
    return y


@triton.jit
def _row(address, row, c, dtype: tl.constexpr, STRIDE: tl.constexpr):
    """Columns c of a row in a rank's memory. The hint makes the accesses 16 bytes wide: the address was loaded."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)) + row.to(tl.int64) * STRIDE + c, 16)


@triton.jit
def _release(addresses, value, on):
    """Store the flag where `on`, one lane of the program to each peer, after all that this program has stored."""
    tl.debug_barrier()
    if _INTERPRET:
        tl.store(addresses.to(tl.pointer_type(tl.int64)), value, mask=on)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %p;
            setp.ne.s32 %p, $3, 0;
            @%p st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r", [addresses, value, on.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _acquired(addresses):
    if _INTERPRET:
        words = tl.load(addresses.to(tl.pointer_type(tl.int64)), volatile=True)
    else:
        words = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [addresses], dtype=tl.int64, is_pure=False, pack=1
        )  # fmt: skip
    return words


@triton.jit
def _awaited(control, addresses, wanted, relevant, call, HEADERS: tl.constexpr, THREADS: tl.constexpr):
    """Wait until the word of every relevant lane (-1, the others 0) is `wanted`; lane i looks at that of rank i % 8.
    Returns _READY, or what is wrong, and then the fault is set."""
    rank = tl.arange(0, THREADS) % _RANKS
    timeout = tl.load(control + _TIMEOUT_NS)
    since = tl.zeros([], tl.int64)
    worst = tl.zeros([], tl.int32) + _WAITING * _RANKS  # the state, and which rank it is about
    while worst // _RANKS == _WAITING:
        word = _acquired(addresses)
        state = tl.where(word == wanted, _READY, _WAITING)
        if HEADERS:
            state = tl.where((word != wanted) & (word >> 32 == wanted >> 32), _WRONG, state)
        worst = _uniform((state * _RANKS + rank) & relevant)
        if worst // _RANKS == _WAITING:
            now = _uniform(_globaltimer(tl.arange(0, THREADS)))
            since = tl.where(since == 0, now, since)
            worst = tl.where(now - since > timeout, _LATE * _RANKS + worst % _RANKS, worst)
    tl.debug_barrier()
    state = worst // _RANKS
    if state != _READY:
        _fail(control, tl.where(state == _LATE, _TIMED_OUT, _DISAGREED).to(tl.int64), worst % _RANKS, call)
    return state
