"""finalize_all_reduce and all_reduce, (_norm, _mhc) too, on CUDA GPUs: one Triton kernel from expert rows, or from a
finished partial, to the sum over ranks [T, H] on every rank, and on to the next layer's input.

Here in one shot; calls of more tokens than a static table says go to `two_shot_triton.py`. A call has a number, counted
on the device; its parity names one of two phases of every inbox. A program finalizes its tiles and stores them,
rounded, into its slot of every rank's inbox (its own too). Only then does it poll its own inbox, tile by tile, until no
element is the sentinel, adds the ranks in rank order in fp32, and stores the sentinel back: what is read is cleared by
its only reader, so calls may change size. Two phases suffice: a rank writes phase p again only after it has seen every
rank's push of the call between, and no rank pushes before its own earlier call has ended (tests/lamport_model.py walks
all interleavings).

Each call also pushes a header, so that ranks that do not make the same call are told, in graph replays too. A wait is
bounded. On a fault the status word is set, for good: the output is NaN, and later calls push nothing and return NaN.
Unicast stores only: no multicast, no remote atomics.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moetail.comm import memory, workspace
from moetail.comm.workspace import FaultKind, Kind
from moetail.numerics import Numerics
from moetail.ops.epilogue_triton import _mhc, _quantize, _residual_norm
from moetail.ops.finalize_triton import _INTERPRET, Facts, _finalized, _to, has_pdl

_CALL, _OWNER, _LEFT = (tl.constexpr(word) for word in (workspace.CALL, workspace.OWNER, workspace.LEFT))
_STATUS, _HOST_STATUS = tl.constexpr(workspace.STATUS), tl.constexpr(workspace.HOST_STATUS)
_TIMEOUT_NS, _PEERS = tl.constexpr(workspace.TIMEOUT_NS), tl.constexpr(workspace.PEERS)
_HEADER_BYTES, _SENTINEL = tl.constexpr(memory.HEADER_BYTES), tl.constexpr(memory.SENTINEL)
_TIMED_OUT, _DISAGREED = tl.constexpr(int(FaultKind.TIMED_OUT)), tl.constexpr(int(FaultKind.DISAGREED))
_CONCURRENT = tl.constexpr(int(FaultKind.CONCURRENT))

# What a tile of a call is: there, still expected, of another call than ours, not there in time.
_READY, _WAITING, _WRONG, _LATE = (tl.constexpr(state) for state in range(4))


@dataclass(frozen=True)
class Place:
    """Where a call runs: this rank among W, the tokens a slot holds, and whether the ranks share one GPU."""

    rank: int
    world_size: int
    max_tokens: int
    one_gpu: bool

    def programs(self, device: torch.device, warps: int, threads: int = 512) -> int:
        """How many are sure to be resident at once, which a grid that polls must be: 512 threads a multiprocessor of
        at most 128 registers each, or another product of 65536. Ranks on one GPU share half of that: with all in use, a
        reduction of torch (512 threads) that a late rank runs before its call found no room at W = 8."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = processors * threads // (32 * warps)
        return max(1, programs // (2 * self.world_size) if self.one_gpu else programs)

    def pdl(self, device: torch.device) -> bool:
        """Not on one GPU: the next kernel of one rank, started early, would hold the place another rank waits for."""
        return has_pdl(device) and not self.one_gpu

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose calls this process makes."""
        return tuple(range(self.world_size)) if self.one_gpu else (self.rank,)

    def layout(self, device: torch.device, H: int) -> memory.Layout:
        one_shot = memory.one_shot_tokens(device, self.world_size)
        return memory.Layout(self.world_size, self.max_tokens, H, one_shot)


@dataclass(frozen=True)
class Epilogue:
    """What follows the sum: nothing; "norm", the residual add and the next layer's norm (the sandwich where
    post_norm_weight is given); or "mhc", the mix into the residual streams [T, hc, H], their collapse and its norm.
    `out` then holds h; quantized as `quant`, it is in `values` (bytes) and `scales` too."""

    name: str = "none"
    residual: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    post_norm_weight: torch.Tensor | None = None
    zero_centred: bool = False
    post_mix: torch.Tensor | None = None
    res_mix: torch.Tensor | None = None
    pre_mix: torch.Tensor | None = None
    quant: str | None = None
    values: torch.Tensor | None = None
    scales: torch.Tensor | None = None


# The op of a call, without finalize and with it.
_KINDS = {
    "none": (Kind.ALL_REDUCE, Kind.FINALIZE_ALL_REDUCE),
    "norm": (Kind.ALL_REDUCE_NORM, Kind.FINALIZE_ALL_REDUCE_NORM),
    "mhc": (Kind.ALL_REDUCE_MHC, Kind.FINALIZE_ALL_REDUCE_MHC),
}

# Columns and warps of a program: 8 columns a thread are the 16 bytes of one store to a peer. A program that norms owns
# a token's whole row.
_BLOCK, _WARPS = 512, 2
_ROW_WARPS = 16


def launch(
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
    epilogue: Epilogue = Epilogue(),
) -> None:
    """Write `out` [T, H]. The arguments are checked, `numerics` is concrete; T may be 0."""
    K, (R, H) = row_map.shape[1], rows.shape
    facts = Facts.of(K, H, numerics, routed_scale, place.pdl(rows.device))
    tensors = (rows, row_map, weights, shared, shared_gate, num_valid_rows)
    numbers = finalize_numbers(row_map, weights, shared_gate, R, routed_scale)
    _launch(tensors, numbers, control, place, out, epilogue, facts, finalize=True)


def launch_all_reduce(
    x: torch.Tensor, control: torch.Tensor, place: Place, out: torch.Tensor, epilogue: Epilogue = Epilogue()
) -> None:
    """Write `out` [T, H] from the sum over ranks of each rank's x [T, H]."""
    T, H = x.shape
    facts = Facts.of(1, H, Numerics.TRTLLM, 1.0, place.pdl(x.device))
    tensors = (x, None, None, None, None, None)
    _launch(tensors, (T, T, 0, 0, 0, 0, 0, 1.0), control, place, out, epilogue, facts, finalize=False)


def _launch(
    inputs: tuple[torch.Tensor | None, ...], numbers: tuple[Any, ...], control: torch.Tensor, place: Place,
    out: torch.Tensor, e: Epilogue, facts: Facts, *, finalize: bool,
) -> None:  # fmt: skip
    T, H = out.shape
    layout = place.layout(out.device, H)
    tensors, strides, mixes = operands(inputs, control, out, e)
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    constants = shared_constants(e, facts, place, finalize=finalize)
    kind = _KINDS[e.name][finalize]
    _compile(
        out.device, dtypes, strides, layout, numbers[3:6:2], place.ranks, kind, tuple(sorted(constants.items()))
    )  # fmt: skip
    if layout.one_shot_tokens < T:
        from moetail.comm import two_shot_triton

        two_shot_triton.run(tensors, (*numbers, float(e.eps), *mixes), strides, layout, place, T, kind, constants)
        return
    options = _options(kind, constants)
    grid = max(1, min(T * triton.cdiv(H, options["BLOCK"]), place.programs(out.device, options["num_warps"])))
    with torch.cuda.device(out.device):
        _finalize_all_reduce_kernel[(grid,)](
            *tensors, *numbers, float(e.eps), *mixes, place.rank, *strides, layout.slot_elements, **options
        )  # fmt: skip


def finalize_numbers(
    row_map: torch.Tensor, weights: torch.Tensor | None, shared_gate: torch.Tensor | None, R: int, routed_scale: float
) -> tuple[Any, ...]:
    """T, R, the strides that are not specialized, and the scale, in both kernels' order."""
    weights_strides = (0, 0) if weights is None else weights.stride()
    gate_stride = 0 if shared_gate is None else shared_gate.stride(0)
    return row_map.shape[0], R, *row_map.stride(), *weights_strides, gate_stride, float(routed_scale)


def operands(
    inputs: tuple[torch.Tensor | None, ...], control: torch.Tensor, out: torch.Tensor, e: Epilogue
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], tuple[int, ...]]:
    """What both kernels take: the tensors, the strides that are specialized, and the mixes' and scales', which are
    not."""
    tensors = (*inputs, e.residual, e.post_mix, e.res_mix, e.pre_mix, e.norm_weight, e.post_norm_weight, out,
               e.residual_out, e.values, e.scales, control)  # fmt: skip
    streams = tuple(_stride(t, dim) for t in (e.residual, e.residual_out) for dim in (0, 1))
    mixes = tuple(_stride(mix) for mix in (e.post_mix, e.res_mix, e.pre_mix))
    scales = (0, 0) if e.scales is None else e.scales.stride()
    strides = (_stride(inputs[0]), _stride(inputs[3]), _stride(out), *streams, _stride(e.values))
    return tensors, strides, (*mixes, *scales)


def shared_constants(e: Epilogue, facts: Facts, place: Place, *, finalize: bool) -> dict[str, Any]:
    """The compile-time arguments of both kernels that no config chooses."""
    return vars(facts) | {
        "FINALIZE": finalize, "EPILOGUE": e.name, "HC": 0 if e.res_mix is None else e.res_mix.shape[1],
        "ZERO_CENTRED": e.zero_centred, "QUANT": e.quant, "W": place.world_size, "enable_fp_fusion": False,
        "launch_pdl": facts.PDL,
    }  # fmt: skip


def _options(kind: Kind, constants: dict[str, Any]) -> dict[str, Any]:
    whole_row = constants["EPILOGUE"] != "none"
    warps = _ROW_WARPS if whole_row else _WARPS
    block = max(32 * warps, triton.next_power_of_2(constants["H"])) if whole_row else _BLOCK
    return constants | {"KIND": int(kind), "BLOCK": block, "THREADS": 32 * warps, "num_warps": warps}


def _stride(tensor: torch.Tensor | None, dim: int = 0) -> int:
    """Of a dimension but the last, in which a step is one element for every tensor here."""
    return 0 if tensor is None or dim == tensor.dim() - 1 else tensor.stride(dim)


@functools.cache
def _compile(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], strides: tuple[int, ...], layout: memory.Layout,
    steps: tuple[int, int], ranks: tuple[int, ...], kind: Kind, constants: tuple[tuple[str, Any], ...],
) -> None:  # fmt: skip
    """Compile and load what serves every T: a module that is loaded while another rank's kernel polls on
    the same GPU waits for it."""
    options = _options(kind, dict(constants))
    unspecialized = (*(2,) * 7, 2.0, 2.0, *(2,) * 6)  # T, R, five strides, scale, eps, mixes' and scales' strides, rank
    with torch.cuda.device(device):
        compiled = _finalize_all_reduce_kernel.warmup(
            *dtypes, *unspecialized, *strides, layout.slot_elements, grid=(1,), **options
        )
        compiled[(1, 1, 1)]
    if layout.one_shot_tokens < layout.max_tokens:
        from moetail.comm import two_shot_triton

        two_shot_triton.compile_all(device, dtypes, strides, layout, steps, ranks, kind, dict(constants))


# The mixes may be parts of one tensor, at any alignment: their pointers are not specialized either.
@triton.jit(do_not_specialize=["T", "R", "map_stride_t", "map_stride_k", "weights_stride_t", "weights_stride_k",
                               "gate_stride", "scale", "eps", "post_stride", "comb_stride", "pre_stride",
                               "scales_stride_t", "scales_stride_g", "RANK"],
            do_not_specialize_on_alignment=["post_mix", "res_mix", "pre_mix"])  # fmt: skip
def _finalize_all_reduce_kernel(
    rows, row_map, weights, shared, gate, num_valid_rows, residual, post_mix, res_mix, pre_mix, norm_weight,
    post_norm_weight, out, residual_out, values, scales, control, T, R, map_stride_t, map_stride_k, weights_stride_t,
    weights_stride_k, gate_stride, scale, eps, post_stride, comb_stride, pre_stride, scales_stride_t, scales_stride_g,
    RANK, rows_stride, shared_stride, out_stride, residual_stride_t, residual_stride_s, residual_out_stride_t,
    residual_out_stride_s, values_stride, capacity,
    K: tl.constexpr, H: tl.constexpr, PRODUCT: tl.constexpr, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    TWO_ROUNDINGS: tl.constexpr, POSITIVE_ZERO: tl.constexpr, PDL: tl.constexpr, KIND: tl.constexpr,
    FINALIZE: tl.constexpr, EPILOGUE: tl.constexpr, HC: tl.constexpr, ZERO_CENTRED: tl.constexpr, QUANT: tl.constexpr,
    W: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns: tl.constexpr = tl.cdiv(H, BLOCK)
    STRIDE: tl.constexpr = tl.cdiv(H, 8) * 8  # rows of a slot start at 16 bytes
    dtype = out.dtype.element_ty
    capacity = capacity.to(tl.int64)
    call, alone, alive = _begin(control, THREADS)
    phase = call % 2
    number = call & 0x7FFFFFFF
    header = (number << 32) | (KIND << 24) | T
    mine = tl.load(control + _PEERS + RANK)

    # every push of this program, before its first poll
    if (tl.program_id(0) == 0) & alive:
        for w in tl.static_range(W):
            peer = tl.load(control + _PEERS + w).to(tl.pointer_type(tl.int64))
            tl.store(peer + phase * W + RANK, header)
    limit = R
    if num_valid_rows is not None:
        limit = tl.minimum(R.to(tl.int64), tl.load(num_valid_rows).to(tl.int64))
    for b in range(tl.program_id(0), T * columns, tl.num_programs(0)):
        t = (b // columns).to(tl.int64)
        c = b % columns * BLOCK + tl.arange(0, BLOCK)
        here = c < H
        if FINALIZE:
            y = _finalized(
                rows, row_map, weights, shared, gate, limit, t, c, here, rows_stride, map_stride_t, map_stride_k,
                weights_stride_t, weights_stride_k, shared_stride, gate_stride, scale, dtype, K, BLOCK, PRODUCT, GROUPS,
                SCALE, TWO_ROUNDINGS, POSITIVE_ZERO,
            )  # fmt: skip
        else:
            y = tl.load(rows + t * rows_stride + c, mask=here, other=0.0)
        nan = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        bits = tl.where(y != y, tl.full([BLOCK], nan, tl.int16), y.to(tl.int16, bitcast=True))
        at = (phase * W + RANK) * capacity + t * STRIDE + c
        for w in tl.static_range(W):
            tl.store(_slot(tl.load(control + _PEERS + w), at), bits, mask=here & alive)

    headers = mine.to(tl.pointer_type(tl.int64)) + phase * W
    timeout = tl.load(control + _TIMEOUT_NS)
    failed = tl.zeros([], tl.int32)
    # a call without tokens still reads the headers
    for b in range(tl.program_id(0), tl.maximum(T * columns, 1), tl.num_programs(0)):
        t = (b // columns).to(tl.int64)
        c = b % columns * BLOCK + tl.arange(0, BLOCK)
        here = (c < H) & (T > 0)
        at = phase * W * capacity + t * STRIDE + c
        total = tl.zeros([BLOCK], tl.float32)
        who = tl.zeros([THREADS], tl.int32)
        since = tl.zeros([], tl.int64)
        latest = tl.zeros([], tl.int32)
        state = tl.where(alive & (failed == 0), _WAITING, _READY)
        while state == _WAITING:
            late = tl.zeros([BLOCK], tl.int32)
            found = tl.zeros([THREADS], tl.int32)
            for w in tl.static_range(W):
                bits = tl.load(_slot(mine, at + w * capacity), mask=here, other=0, volatile=True)
                head = tl.load(headers + w + tl.zeros([THREADS], tl.int32), volatile=True)
                pushed = head >> 32 == number
                found = tl.maximum(found, tl.where(pushed, tl.where(head == header, _READY, _WRONG), _WAITING))
                who = tl.where(head == header, who, w)
                late = tl.maximum(late, tl.where(bits == _SENTINEL, w + 1, 0))
                y = bits.to(dtype, bitcast=True).to(tl.float32)
                total = y if w == 0 else total + y
            latest = tl.max(late)
            state = tl.maximum(_uniform(found), tl.minimum(latest, _WAITING))
            if state == _WAITING:
                now = _uniform(_globaltimer(tl.arange(0, THREADS)))
                since = tl.where(since == 0, now, since)
                state = tl.where(now - since > timeout, _LATE, state)
        if state != _READY:
            failed = state
            peer = tl.maximum(_uniform(who), latest - 1)
            _fail(control, tl.where(state == _LATE, _TIMED_OUT, _DISAGREED).to(tl.int64), peer, call)
        good = alive & (failed == 0)
        y = _to(tl.where(good, total, float("nan")), dtype)
        y = _followed(
            y, t, c, T > 0, here, residual, post_mix, res_mix, pre_mix, norm_weight, post_norm_weight, residual_out,
            eps, post_stride, comb_stride, pre_stride, residual_stride_t, residual_stride_s, residual_out_stride_t,
            residual_out_stride_s, H, EPILOGUE, HC, ZERO_CENTRED,
        )  # fmt: skip
        tl.store(out + t * out_stride + c, y, mask=here)
        if QUANT is not None:
            _quantize(
                y, values + t * values_stride + c, scales + t * scales_stride_t, scales_stride_g, T > 0, here, H, BLOCK,
                QUANT,
            )  # fmt: skip
        for w in tl.static_range(W):
            tl.store(_slot(mine, at + w * capacity), tl.full([BLOCK], _SENTINEL, tl.int16), mask=here & good)

    _end(control, alone, RANK, call)


@triton.jit
def _begin(control, THREADS: tl.constexpr):
    """(the call's number, whether it is inside no other call, whether it may push and poll)."""
    call = tl.load(control + _CALL)
    grid_id = tl.zeros([], tl.int64) + 1
    if not _INTERPRET:
        grid_id += tl.inline_asm_elementwise("mov.u64 $0, %gridid;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    owner = tl.atomic_cas(control + _OWNER, tl.zeros([], tl.int64), grid_id, sem="relaxed", scope="gpu")
    alone = (owner == 0) | (owner == grid_id)
    status = _uniform(tl.load(control + _STATUS + tl.zeros([THREADS], tl.int32), volatile=True))
    return call, alone, alone & (status == 0)


@triton.jit
def _end(control, alone, RANK, call):
    """The last program to leave counts the call."""
    if alone:
        if tl.atomic_add(control + _LEFT, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
            tl.store(control + _LEFT, 0)
            tl.store(control + _CALL, call + 1)
            tl.store(control + _OWNER, 0)
    else:
        _fail(control, _CONCURRENT, RANK, call)


@triton.jit
def _followed(
    y, t, c, there, here, residual, post_mix, res_mix, pre_mix, norm_weight, post_norm_weight, residual_out, eps,
    post_stride, comb_stride, pre_stride, residual_stride_t, residual_stride_s, residual_out_stride_t,
    residual_out_stride_s, H: tl.constexpr, EPILOGUE: tl.constexpr, HC: tl.constexpr, ZERO_CENTRED: tl.constexpr,
):  # fmt: skip
    """What the epilogue makes of token t's finished sum: what belongs in `out`. It stores the residual itself."""
    if EPILOGUE == "norm":
        old = tl.load(residual + t * residual_stride_t + c, mask=here, other=0.0)
        weight = tl.load(norm_weight + c, mask=here, other=0.0)
        post_weight = None
        if post_norm_weight is not None:
            post_weight = tl.load(post_norm_weight + c, mask=here, other=0.0)
        y, new = _residual_norm(y, old, weight, post_weight, here, eps, H, ZERO_CENTRED)
        tl.store(residual_out + t * residual_out_stride_t + c, new, mask=here)
    if EPILOGUE == "mhc":
        weight = tl.load(norm_weight + c, mask=here, other=0.0)
        y = _mhc(
            y, residual + t * residual_stride_t + c, residual_stride_s, residual_out + t * residual_out_stride_t + c,
            residual_out_stride_s, post_mix + t * post_stride, res_mix + t * comb_stride, pre_mix + t * pre_stride,
            weight, there, here, eps, H, HC,
        )  # fmt: skip
    return y


@triton.jit
def _slot(memory, at):
    """Elements of a rank's inbox. The hint is what makes the accesses 16 bytes wide: the address was loaded."""
    return tl.multiple_of((memory + _HEADER_BYTES).to(tl.pointer_type(tl.int16)) + at, 16)


@triton.jit
def _fail(control, kind, peer, call):
    """The first fault stays: it is the cause, what follows are consequences. The host reads its copy without a sync."""
    word = kind | (peer.to(tl.int64) << 8) | (call << 16)
    first = tl.atomic_cas(control + _STATUS, tl.zeros([], tl.int64), word, sem="relaxed", scope="gpu")
    if first == 0:
        tl.store(tl.load(control + _HOST_STATUS).to(tl.pointer_type(tl.int64)), word)


@triton.jit
def _uniform(x):
    """One value for the whole program from one a thread, which may differ between threads: branch on nothing less."""
    return tl.max(x)


@triton.jit
def _globaltimer(lane):
    """Nanoseconds, read by every lane. Time stands still in the interpreter."""
    if _INTERPRET:
        now = lane.to(tl.int64) * 0 + 1
    else:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer; // $1", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
        )  # fmt: skip
    return now
