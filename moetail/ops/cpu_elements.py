"""What the CPU kernels do to one element, or to a vector of neighbours: LLVM code that numba puts into their loops.

numba has neither bf16 nor a complete fp16: their bits travel as two integer types, `TAGS`, which also choose the code.
The `_emit` functions take scalars and vectors alike, so that both have the same arithmetic: LLVM neither contracts nor
reorders it (no fastmath).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# numba keeps a compiled kernel as long as the file it is defined in and the numbers it closes over stay what they were:
# each kernel closes over this one, so that an edit here is not lost.
SOURCE = zlib.crc32(Path(__file__).read_bytes())
PRODUCTS = ("none", "fma", "round_f32", "round_row")
TAGS = {torch.bfloat16: np.uint16(0), torch.float16: np.int16(0), torch.float32: np.float32(0)}

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)


@intrinsic
def _pointer(typingctx, address, tag):  # noqa: ANN001, ANN202
    """The address as a pointer to the tag's type."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(tag)(types.int64, tag), codegen


@numba.njit(nogil=True, inline="always")
def _row(address, tag, H):  # noqa: ANN001, ANN202
    return numba.carray(_pointer(address, tag), H)


@intrinsic
def _load(typingctx, bits):  # noqa: ANN001, ANN202
    """fp32 of a stored element: bf16 bits (uint16), fp16 bits (int16) or fp32. Exact."""
    return types.float32(bits), lambda context, builder, signature, args: _emit_load(builder, bits, args[0])


@intrinsic
def _store(typingctx, value, tag):  # noqa: ANN001, ANN202
    """The stored element nearest to an fp32, ties to even. bf16: a NaN becomes 0x7fc0, as torch's does."""
    return tag(types.float32, tag), lambda context, builder, signature, args: _emit_store(builder, tag, args[0])


@intrinsic
def _float_of_bits(typingctx, value):  # noqa: ANN001, ANN202
    """The fp32 whose bits are the low half of an int64."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.bitcast(builder.trunc(args[0], _I32), _F32)

    return types.float32(types.int64), codegen


@intrinsic
def _take(typingctx, counter, count):  # noqa: ANN001, ANN202
    """Atomically add `count` to the int64 at `counter`; returns what it was."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.atomic_rmw("add", args[0], args[1], "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic(prefer_literal=True)
def _multiply_add(typingctx, product, acc, bits, w):  # noqa: ANN001, ANN202
    """acc + element * w; `product` is a compile-time number."""
    index, tag = product.literal_value, types.unliteral(bits)

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return _emit_multiply_add(builder, index, tag, *args[1:])

    return types.float32(product, types.float32, tag, types.float32), codegen


def _emit_load(builder, tag, bits):  # noqa: ANN001, ANN202
    if tag == types.uint16:
        wide = builder.zext(bits, _like(bits, _I32))
        return builder.bitcast(builder.shl(wide, _constant(wide, 16)), _like(bits, _F32))
    if tag == types.int16:
        return builder.fpext(builder.bitcast(bits, _like(bits, ir.HalfType())), _like(bits, _F32))
    return bits


def _emit_store(builder, tag, value):  # noqa: ANN001, ANN202
    narrow = _like(value, _I16)
    if tag == types.uint16:
        bits = builder.bitcast(value, _like(value, _I32))
        odd = builder.and_(builder.lshr(bits, _constant(bits, 16)), _constant(bits, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _constant(bits, 0x7FFF))), _constant(bits, 16))
        kept = builder.trunc(rounded, narrow)
        return builder.select(builder.fcmp_unordered("uno", value, value), _constant(kept, 0x7FC0), kept)
    if tag == types.int16:
        return builder.bitcast(builder.fptrunc(value, _like(value, ir.HalfType())), narrow)
    return value


def _emit_multiply_add(builder, product, tag, acc, element, w):  # noqa: ANN001, ANN202
    """acc + element * w with the rounding of `product`, an index into PRODUCTS."""
    kind, x = PRODUCTS[product], _emit_load(builder, tag, element)
    if kind == "none":
        return builder.fadd(acc, x)
    if kind == "fma":
        return _emit_fma(builder, x, w, acc)
    value = builder.fmul(x, w)
    if kind == "round_row":
        value = _emit_rounded(builder, tag, value)
    return builder.fadd(acc, value)


def _emit_fma(builder, a, b, c):  # noqa: ANN001, ANN202
    """a * b + c, rounded once: one instruction where the CPU has it, the C library's exact fmaf elsewhere."""
    name = f"llvm.fma.v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "llvm.fma.f32"
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(a.type, [a.type] * 3))
    return builder.call(function, [a, b, c])


def _emit_rounded(builder, tag, value):  # noqa: ANN001, ANN202
    """The fp32 that is stored and read again."""
    return _emit_load(builder, tag, _emit_store(builder, tag, value))


def _emit_broadcast(builder, value, lanes):  # noqa: ANN001, ANN202
    """A vector of `lanes` times the scalar; the scalar itself for one."""
    if lanes == 1:
        return value
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _like(value: Any, kind: Any) -> Any:
    """The type of as many `kind` as the value has lanes."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def _constant(value: Any, number: float) -> Any:
    """The number, of the value's type."""
    lanes = [number] * value.type.count if isinstance(value.type, ir.VectorType) else number
    return ir.Constant(value.type, lanes)
