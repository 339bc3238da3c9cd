"""finalize on a CPU: a compiled, multi-threaded kernel (numba: no compiler needed on the user's machine).

One token at a time, a cache line of columns at a time: all K rows are added in registers, finished there and stored
once. numba's own loops need a buffer for the sums, because LLVM cannot know that y is none of the rows: so these loops
are emitted as vectors. What is emitted is exactly what is computed (`cpu_elements.py`).
The threads are torch's (`cpu_threads.py`), which take tokens from a shared counter.
"""

from __future__ import annotations

import functools
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moetail.numerics import Numerics, slot_groups, torch_cpu_main_columns
from moetail.ops import cpu_threads
from moetail.ops.cpu_elements import (
    PRODUCTS,
    SOURCE,
    TAGS,
    _constant,
    _emit_broadcast,
    _emit_fma,
    _emit_load,
    _emit_multiply_add,
    _emit_rounded,
    _emit_store,
    _float_of_bits,
    _multiply_add,
    _pointer,
    _row,
    _take,
)

# Below this much work a second thread costs more than it saves.
_BYTES_PER_THREAD = 512 * 1024

# Columns that are summed at once: 32 bf16 are a cache line. Then what is left.
_LANES = (32, 8, 1)
_F32, _I64 = ir.FloatType(), ir.IntType(64)


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
) -> None:
    """Write `out`. The arguments are checked, `numerics` is concrete, T >= 1."""
    call = prepare(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out)
    cpu_threads.run(call.function, call.arguments.buffer_info()[0], call.threads)


@dataclass(frozen=True)
class Call:
    """A C function, its argument and how many threads may run it at once. The argument begins with the token to take
    next, the end of the tokens and how many to take in a turn; `alive` holds the tensors of ours that it points to."""

    function: int
    arguments: array[int]
    threads: int
    alive: tuple[torch.Tensor | None, ...]


def prepare(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    routed_scale: float,
    numerics: Numerics,
    out: torch.Tensor,
) -> Call:
    (T, K), (R, H) = row_map.shape, rows.shape
    limit = R if num_valid_rows is None else min(R, int(num_valid_rows))
    if row_map.dtype != torch.int64 or not row_map.is_contiguous():
        row_map = row_map.to(torch.int64).contiguous()
    if weights is not None and (weights.dtype != torch.float32 or not weights.is_contiguous()):
        weights = weights.to(torch.float32).contiguous()
    gate = None if shared_gate is None else torch.sigmoid(shared_gate.float()).contiguous()
    if gate is not None and numerics.rounding == "two":
        gate = gate.to(rows.dtype).float()
    kind = _kind(rows.dtype, K, H, numerics, 0 if shared is None else 1 if gate is None else 2, routed_scale)
    threads = min(torch.get_num_threads(), T, 1 + T * K * H * rows.element_size() // _BYTES_PER_THREAD)
    tokens_a_turn = max(1, T // (8 * threads))
    arguments = array("q", (
        0, T, tokens_a_turn, rows.data_ptr(), _row_bytes(rows), row_map.data_ptr(), _address(weights), _address(shared),
        _row_bytes(shared), _address(gate), out.data_ptr(), _row_bytes(out), H, kind.main, limit,
        kind.absent.data_ptr(), kind.scale_bits,
    ))  # fmt: skip
    return Call(kind.function, arguments, threads, (row_map, weights, gate))


@dataclass(frozen=True)
class _Kind:
    """What many calls have in common. main: the columns that are added in slot order. absent [H]: the row of an absent
    slot, minus zeros; to add it, with whatever weight that is not negative, changes no bit of any sum."""

    function: int
    main: int
    absent: torch.Tensor
    scale_bits: int


# One lookup: in a decode step every Python object that a call touches comes from memory, because the weights have just
# streamed through the caches.
@functools.lru_cache(maxsize=256)
def _kind(dtype: torch.dtype, K: int, H: int, numerics: Numerics, shared_kind: int, routed_scale: float) -> _Kind:
    in_one_row = numerics.order == "torch_cpu"
    kernel = _compiled(
        dtype,
        K,
        1 if in_one_row else len(slot_groups(numerics.order, K)),
        PRODUCTS.index(numerics.product),
        shared_kind,
        0 if routed_scale == 1.0 else 1 if numerics.scale == "f32" else 2,
        numerics.rounding == "two",
        numerics.zero == "positive",
    )
    scale_bits = int(np.float32(routed_scale).view(np.int32))
    main = torch_cpu_main_columns(H) if in_one_row else H
    return _Kind(kernel.address, main, torch.full((H,), -0.0, dtype=dtype), scale_bits)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0) * tensor.element_size()


@intrinsic(prefer_literal=True)
def _columns(typingctx, facts, tag, slots, first, end, ends, factors):  # noqa: ANN001, ANN202
    """y[first:end] of one token, its sums in registers from the first slot to the last rounding.

    facts: (K, GROUPS, PRODUCT, SHARED, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO), compile-time numbers. slots: where the K
    rows' addresses and weights lie. ends: the addresses of y and of the shared row. factors: routed scale, gate.
    """
    literals, kind = [fact.literal_value for fact in facts.types], types.unliteral(tag)
    pair, i64 = types.UniTuple(types.int64, 2), types.int64
    signature = types.void(facts, kind, pair, i64, i64, pair, types.UniTuple(types.float32, 2))

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        element, column = context.get_value_type(kind), args[3]
        for lanes in _LANES:
            column = _emit_columns(builder, literals, kind, element, lanes, column, args)
        return context.get_dummy_value()

    return signature, codegen


def _emit_columns(builder, facts, tag, element, lanes, first, args):  # noqa: ANN001, ANN202
    """Columns from `first` on, `lanes` at a time while so many are left; returns the first that is left."""
    (K, GROUPS, PRODUCT, *_), (_, _, slots, _, end, ends, factors) = facts, args
    addresses, weights, y, shared = (builder.extract_value(two, i) for two in (slots, ends) for i in range(2))
    scale, gate = (_emit_broadcast(builder, builder.extract_value(factors, i), lanes) for i in range(2))
    vector, sums = (ir.VectorType(kind, lanes) if lanes > 1 else kind for kind in (element, _F32))
    zero = ir.Constant(sums, [0.0] * lanes if lanes > 1 else 0.0)
    bytes_each = 4 if element == _F32 else 2

    def at(base, index, kind):  # noqa: ANN001, ANN202
        return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])

    def read(base, column):  # noqa: ANN001, ANN202
        where = builder.bitcast(at(base, column, element), vector.as_pointer())
        return builder.load(where, align=bytes_each)

    count = builder.sdiv(builder.sub(end, first), _I64(lanes))
    with cgutils.for_range(builder, count) as chunk:
        column = builder.add(first, builder.mul(chunk.index, _I64(lanes)))
        total = None
        for g in range(GROUPS):
            acc = zero
            for k in range(g, K, GROUPS):
                row = builder.load(at(addresses, _I64(k), _I64))
                weight = _emit_broadcast(builder, builder.load(at(weights, _I64(k), _F32)), lanes)
                acc = _emit_multiply_add(builder, PRODUCT, tag, acc, read(row, column), weight)
            total = acc if total is None else builder.fadd(total, acc)
        value = _emit_end(builder, facts[3:], tag, total, lambda: read(shared, column), scale, gate)
        builder.store(value, builder.bitcast(at(y, column, element), vector.as_pointer()), align=bytes_each)
    return builder.add(first, builder.mul(count, _I64(lanes)))


def _emit_end(builder, facts, tag, value, read_shared, scale, gate):  # noqa: ANN001, ANN202
    """The stored elements of y, from the sum of the routed rows; facts: from SHARED on."""
    SHARED, SCALE, TWO_ROUNDINGS, POSITIVE_ZERO = facts
    if SCALE == 2:
        value = _emit_rounded(builder, tag, value)
    if SCALE:
        value = builder.fmul(value, scale)
    if TWO_ROUNDINGS:
        value = _emit_rounded(builder, tag, value)
    if SHARED:
        shared = _emit_load(builder, tag, read_shared())
        if SHARED == 1:
            value = builder.fadd(value, shared)
        elif TWO_ROUNDINGS:
            value = builder.fadd(value, _emit_rounded(builder, tag, builder.fmul(gate, shared)))
        else:
            value = _emit_fma(builder, gate, shared, value)
    if POSITIVE_ZERO:
        rounded = _emit_rounded(builder, tag, value)
        value = builder.fadd(rounded, _constant(rounded, 0.0))
    return _emit_store(builder, tag, value)


@intrinsic(prefer_literal=True)
def _end(typingctx, facts, value, bits, factors):  # noqa: ANN001, ANN202
    """The stored element of y, from a sum and the shared element; facts from SHARED on, factors as `_columns`."""
    literals, kind = [fact.literal_value for fact in facts.types], types.unliteral(bits)

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        _, total, shared, two = args
        scale, gate = (builder.extract_value(two, i) for i in range(2))
        return _emit_end(builder, literals, kind, total, lambda: shared, scale, gate)

    return kind(facts, types.float32, kind, types.UniTuple(types.float32, 2)), codegen


@functools.cache
def _compiled(*facts: Any) -> Any:
    return _cached(_kernel, *facts)


def _cached(kernel: Callable[..., Any], *facts: Any) -> Any:
    try:
        return kernel(*facts, cache=True)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        warnings.warn(
            f"moetail: numba cannot keep compiled kernels on disk ({error}), so each process compiles them anew: "
            f"set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return kernel(*facts, cache=False)


def _kernel(
    DTYPE: torch.dtype, K: int, GROUPS: int, PRODUCT: int, SHARED: int, SCALE: int, TWO_ROUNDINGS: bool,
    POSITIVE_ZERO: bool, *, cache: bool,
) -> Any:  # fmt: skip
    """The kernel for one set of compile-time facts: a C function of one pointer, kept on disk by numba.

    GROUPS: slot k belongs to group k % GROUPS; the groups' sums are added in order. PRODUCT: index into PRODUCTS.
    SHARED: 0 none, 1 plain, 2 gated. SCALE: 0 none, 1 f32, 2 round_row.
    """
    tag, made_of = TAGS[DTYPE], SOURCE
    TWO, POSITIVE = int(TWO_ROUNDINGS), int(POSITIVE_ZERO)

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=cache)
    def finalize_cpu(call):  # noqa: ANN001, ANN202
        _ = made_of
        (
            _, T, turn, rows_at, rows_stride, map_at, weights_at, shared_at, shared_stride, gate_at, out_at, out_stride,
            H, main, limit, absent_at, scale_bits,
        ) = numba.carray(call, 17)  # fmt: skip
        row_of = numba.carray(_pointer(map_at, 0), T * K)
        weights = numba.carray(_pointer(weights_at, numba.float32(0)), T * K)
        gates = numba.carray(_pointer(gate_at, numba.float32(0)), T)
        factor = _float_of_bits(scale_bits)
        edge = np.empty(4, np.float32)  # torch_cpu: accumulators of one of the last columns
        at, by = np.empty(K, np.int64), np.empty(K, np.float32)  # a token's rows and their weights
        first = _take(call, turn)
        while first < T:
            for t in range(first, min(first + turn, T)):
                for k in range(K):
                    r = row_of[t * K + k]
                    present = 0 <= r < limit
                    at[k] = rows_at + r * rows_stride if present else absent_at
                    by[k] = weights[t * K + k] if PRODUCT != 0 and present else numba.float32(0)
                y_at, s_at = out_at + t * out_stride, shared_at + t * shared_stride
                factors = (factor, gates[t] if SHARED == 2 else numba.float32(1))
                _columns(
                    (K, GROUPS, PRODUCT, SHARED, SCALE, TWO, POSITIVE), tag, (at.ctypes.data, by.ctypes.data), 0, main,
                    (y_at, s_at), factors,
                )  # fmt: skip
                if main < H:
                    y, s = _row(y_at, tag, H), _row(s_at, tag, H)
                    for c in range(main, H):
                        edge[:] = 0
                        for k in range(K):
                            e = k % 4 if k < K // 4 * 4 else 0
                            edge[e] = _multiply_add(PRODUCT, edge[e], _row(at[k], tag, H)[c], by[k])
                        v = ((edge[0] + edge[1]) + edge[2]) + edge[3]
                        y[c] = _end((SHARED, SCALE, TWO, POSITIVE), v, s[c] if SHARED != 0 else tag, factors)
            first = _take(call, turn)

    return finalize_cpu
