"""finalize on a CPU: a compiled, multi-threaded kernel (numba: no compiler needed on the user's machine).

One token at a time: its fp32 accumulators stay in the L1 cache while the K expert rows stream by. LLVM vectorizes the
column loops; it neither contracts nor reorders (no fastmath), so a column's arithmetic is exactly what is written.
The threads are torch's (`cpu_threads.py`), which take tokens from a shared counter.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moetail.numerics import Numerics, slot_groups, torch_cpu_main_columns
from moetail.ops import cpu_threads

# Below this much work a second thread costs more than it saves.
_BYTES_PER_THREAD = 512 * 1024

_PRODUCTS = ("none", "fma", "round_f32", "round_row")
# numba has neither bf16 nor a complete fp16: their bits travel as two integer types, which also choose the code below.
_TAGS = {torch.bfloat16: np.uint16(0), torch.float16: np.int16(0), torch.float32: np.float32(0)}


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
    cpu_threads.run(call.function, call.arguments.ctypes.data, call.threads)


@dataclass(frozen=True)
class Call:
    """A C function, its argument and how many threads may run it at once. The argument begins with the token to take
    next, the end of the tokens and how many to take in a turn; `alive` holds the tensors that it points to."""

    function: int
    arguments: np.ndarray
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
    row_map = row_map.to(torch.int64).contiguous()
    weights = None if weights is None else weights.to(torch.float32).contiguous()
    gate = None if shared_gate is None else torch.sigmoid(shared_gate.float()).contiguous()
    if gate is not None and numerics.rounding == "two":
        gate = gate.to(rows.dtype).float()
    kernel = _compiled(
        rows.dtype,
        _PRODUCTS.index(numerics.product),
        0 if shared is None else 1 if gate is None else 2,
        0 if routed_scale == 1.0 else 1 if numerics.scale == "f32" else 2,
        numerics.rounding == "two",
        numerics.zero == "positive",
    )
    main = torch_cpu_main_columns(H) if numerics.order == "torch_cpu" else H
    groups = 1 if numerics.order == "torch_cpu" else len(slot_groups(numerics.order, K))
    threads = min(torch.get_num_threads(), T, 1 + T * K * H * rows.element_size() // _BYTES_PER_THREAD)
    tokens_a_turn = max(1, T // (8 * threads))
    scale_bits = int(np.float32(routed_scale).view(np.int32))
    arguments = np.array([
        0, T, tokens_a_turn, rows.data_ptr(), _row_bytes(rows), row_map.data_ptr(), _address(weights), _address(shared),
        _row_bytes(shared), _address(gate), out.data_ptr(), _row_bytes(out), K, H, main, limit, groups, scale_bits,
    ], dtype=np.int64)  # fmt: skip
    return Call(kernel.address, arguments, threads, (rows, row_map, weights, shared, gate, out))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0) * tensor.element_size()


@intrinsic
def _pointer(typingctx, address, tag):  # noqa: ANN001, ANN202
    """The address as a pointer to the tag's type."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag)(types.int64, tag), codegen


def _emit_load(builder, tag, bits):  # noqa: ANN001, ANN202
    if tag == types.uint16:
        wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())
    if tag == types.int16:
        return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())
    return bits


def _emit_store(builder, tag, value):  # noqa: ANN001, ANN202
    if tag == types.uint16:
        i32, i16 = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(value, i32)
        odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, i32(0x7FFF))), i32(16))
        return builder.select(builder.fcmp_unordered("uno", value, value), i16(0x7FC0), builder.trunc(rounded, i16))
    if tag == types.int16:
        return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
    return value


@intrinsic
def _load(typingctx, bits):  # noqa: ANN001, ANN202
    """fp32 of a stored element: bf16 bits (uint16), fp16 bits (int16) or fp32. Exact."""
    return types.float32(bits), lambda context, builder, signature, args: _emit_load(builder, bits, args[0])


@intrinsic
def _store(typingctx, value, tag):  # noqa: ANN001, ANN202
    """The stored element nearest to an fp32, ties to even. bf16: a NaN becomes 0x7fc0, as torch's does."""
    return tag(types.float32, tag), lambda context, builder, signature, args: _emit_store(builder, tag, args[0])


@intrinsic
def _float_of_bits(typingctx, bits):  # noqa: ANN001, ANN202
    """The fp32 whose bits are the low half of an int64."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def _take(typingctx, counter, count):  # noqa: ANN001, ANN202
    """Atomically add `count` to the int64 at `counter`; returns what it was."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def _fma(typingctx, a, b, c):  # noqa: ANN001, ANN202
    """fp32 a * b + c, rounded once: one instruction where the CPU has it, the C library's exact fmaf elsewhere."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: builder.fma(*args)


def _emit_multiply_add(builder, product, tag, acc, element, w):  # noqa: ANN001, ANN202
    """acc + element * w with the rounding of `product`, an index into _PRODUCTS."""
    kind, x = _PRODUCTS[product], _emit_load(builder, tag, element)
    if kind == "none":
        return builder.fadd(acc, x)
    if kind == "fma":
        return builder.fma(x, w, acc)
    value = builder.fmul(x, w)
    if kind == "round_row":
        value = _emit_load(builder, tag, _emit_store(builder, tag, value))
    return builder.fadd(acc, value)


@intrinsic(prefer_literal=True)
def _multiply_add(typingctx, product, acc, bits, w):  # noqa: ANN001, ANN202
    """acc + element * w; `product` is a compile-time number."""
    index, tag = product.literal_value, types.unliteral(bits)

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return _emit_multiply_add(builder, index, tag, *args[1:])

    return types.float32(product, types.float32, tag, types.float32), codegen


@intrinsic(prefer_literal=True)
def _add_column(typingctx, product, acc, rows, weights, c, tag):  # noqa: ANN001, ANN202
    """acc + row0[c] * weights[0] + row1[c] * weights[1] + .., in this order; rows: a tuple of their addresses."""
    index, kind = product.literal_value, types.unliteral(tag)

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        _, total, addresses, factors, column, _ = args
        pointer = context.get_value_type(types.CPointer(kind))
        for i in range(len(rows)):
            row = builder.inttoptr(builder.extract_value(addresses, i), pointer)
            element = builder.load(builder.gep(row, [column]))
            total = _emit_multiply_add(builder, index, kind, total, element, builder.extract_value(factors, i))
        return total

    return types.float32(product, types.float32, rows, weights, types.int64, kind), codegen


@numba.njit(nogil=True, inline="always")
def _add_rows(PRODUCT, a, rows, weights, tag, main):  # noqa: ANN001, ANN202
    for c in range(main):
        a[c] = _add_column(PRODUCT, a[c], rows, weights, c, tag)


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
    DTYPE: torch.dtype, PRODUCT: int, SHARED: int, SCALE: int, TWO_ROUNDINGS: bool, POSITIVE_ZERO: bool, *, cache: bool
) -> Any:
    """The kernel for one set of compile-time facts: a C function of one pointer, kept on disk by numba.

    PRODUCT: index into _PRODUCTS. SHARED: 0 none, 1 plain, 2 gated. SCALE: 0 none, 1 f32, 2 round_row.
    """
    tag = _TAGS[DTYPE]

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=cache)
    def finalize_cpu(call):  # noqa: ANN001, ANN202
        (
            _, T, turn, rows_at, rows_stride, map_at, weights_at, shared_at, shared_stride, gate_at, out_at, out_stride,
            K, H, main, limit, groups, scale_bits,
        ) = numba.carray(call, 18)  # fmt: skip
        row_of = numba.carray(_pointer(map_at, 0), T * K)
        weights = numba.carray(_pointer(weights_at, numba.float32(0)), T * K)
        gates = numba.carray(_pointer(gate_at, numba.float32(0)), T)
        factor = _float_of_bits(scale_bits)
        acc = np.empty((groups, H), np.float32)
        edge = np.empty((4, H - main), np.float32)  # torch_cpu: accumulators of the last columns
        at = np.empty(K, np.int64)  # address and weight of a group's present slots
        by = np.ones(K, np.float32)
        first = _take(call, turn)
        while first < T:
            for t in range(first, min(first + turn, T)):
                acc[:] = 0
                for g in range(groups):
                    n = 0
                    for k in range(g, K, groups):
                        r = row_of[t * K + k]
                        if 0 <= r < limit:
                            at[n] = rows_at + r * rows_stride
                            if PRODUCT != 0:
                                by[n] = weights[t * K + k]
                            n += 1
                    a = acc[g, :main]
                    # Up to eight rows a pass: more loads in flight, and less traffic to the accumulators. Share of the
                    # copy bandwidth, two cores, T 2048 H 4096: K 6 in passes of 4, 1, 1 rows 71 %, of 4, 2 82 %, of 6
                    # 90 %; K 8 in passes of 4, 4 82 %, of 8 86 %; K 10 71 %, 78 % and in passes of 8, 2 82 %.
                    i = 0
                    while n - i >= 8:
                        eight = (at[i], at[i + 1], at[i + 2], at[i + 3], at[i + 4], at[i + 5], at[i + 6], at[i + 7])
                        w = (by[i], by[i + 1], by[i + 2], by[i + 3], by[i + 4], by[i + 5], by[i + 6], by[i + 7])
                        _add_rows(PRODUCT, a, eight, w, tag, main)
                        i += 8
                    if n - i >= 6:
                        six = (at[i], at[i + 1], at[i + 2], at[i + 3], at[i + 4], at[i + 5])
                        w6 = (by[i], by[i + 1], by[i + 2], by[i + 3], by[i + 4], by[i + 5])
                        _add_rows(PRODUCT, a, six, w6, tag, main)
                        i += 6
                    if n - i >= 4:
                        four = (at[i], at[i + 1], at[i + 2], at[i + 3])
                        _add_rows(PRODUCT, a, four, (by[i], by[i + 1], by[i + 2], by[i + 3]), tag, main)
                        i += 4
                    if n - i >= 2:
                        _add_rows(PRODUCT, a, (at[i], at[i + 1]), (by[i], by[i + 1]), tag, main)
                        i += 2
                    if i < n:
                        _add_rows(PRODUCT, a, (at[i],), (by[i],), tag, main)
                for g in range(1, groups):
                    for c in range(main):
                        acc[0, c] += acc[g, c]

                if main < H:
                    edge[:] = 0
                    for k in range(K):
                        r = row_of[t * K + k]
                        if 0 <= r < limit:
                            x = _row(rows_at + r * rows_stride, tag, H)
                            w = weights[t * K + k] if PRODUCT != 0 else numba.float32(1)
                            e = edge[k % 4 if k < K // 4 * 4 else 0]
                            for c in range(main, H):
                                e[c - main] = _multiply_add(PRODUCT, e[c - main], x[c], w)
                    for c in range(main, H):
                        e = edge[:, c - main]
                        acc[0, c] = ((e[0] + e[1]) + e[2]) + e[3]

                total, y, s = acc[0], _row(out_at + t * out_stride, tag, H), _row(shared_at + t * shared_stride, tag, H)
                gate = gates[t] if SHARED == 2 else numba.float32(1)
                for c in range(H):
                    v = total[c]
                    if SCALE == 1:
                        v = v * factor
                    if SCALE == 2:
                        v = _load(_store(v, tag)) * factor
                    if TWO_ROUNDINGS:
                        v = _load(_store(v, tag))
                    if SHARED == 1:
                        v = v + _load(s[c])
                    if SHARED == 2:
                        if TWO_ROUNDINGS:
                            v = v + _load(_store(gate * _load(s[c]), tag))
                        else:
                            v = _fma(gate, _load(s[c]), v)
                    if POSITIVE_ZERO:
                        v = _load(_store(v, tag)) + numba.float32(0)
                    y[c] = _store(v, tag)
            first = _take(call, turn)

    return finalize_cpu


@numba.njit(nogil=True, inline="always")
def _row(address, tag, H):  # noqa: ANN001, ANN202
    return numba.carray(_pointer(address, tag), H)
