"""finalize_norm on a CPU: `finalize_cpu.py`'s kernel for a few tokens at a time, then their norms, out of the cache.

A thread takes tokens from a shared counter, calls the compiled finalize by its address for _TOKENS of them, which
writes y where h will be, and norms those rows while they are in the cache: one pass over memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from moetail.numerics import Numerics
from moetail.ops import cpu_threads, finalize_cpu
from moetail.ops.cpu_elements import SOURCE, TAGS, _float_of_bits, _load, _row, _store, _take

# Rows between finalize and norm: 80 KB at H 5120, of a level-2 cache; each costs finalize an eighth of a call.
_TOKENS = 8


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
) -> None:
    """Write `out` and `residual_out`. The arguments are checked, `numerics` is concrete, T >= 1."""
    finalize = finalize_cpu.prepare(
        rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out
    )
    factor = norm_weight.float() + 1.0 if zero_centred else norm_weight.float()
    post_factor = None
    if post_norm_weight is not None:
        post_factor = post_norm_weight.float() + 1.0 if zero_centred else post_norm_weight.float()
    kernel = _compiled(rows.dtype, post_factor is not None)
    T, H = out.shape
    turn = int(finalize.arguments[2])
    call = np.array([
        0, T, turn, finalize.function, *finalize.arguments.buffer_info(), H, out.data_ptr(),
        *(finalize_cpu._row_bytes(t) for t in (out, residual, residual_out)), residual.data_ptr(),
        residual_out.data_ptr(), factor.data_ptr(), finalize_cpu._address(post_factor),
        int(np.float32(eps).view(np.int32)),
    ], dtype=np.int64)  # fmt: skip
    cpu_threads.run(kernel.address, call.ctypes.data, finalize.threads)


@intrinsic
def _call(typingctx, function, argument):  # noqa: ANN001, ANN202
    """Call the C function at address `function` with the pointer `argument`."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        pointer = ir.IntType(8).as_pointer()
        c_function = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        builder.call(builder.inttoptr(args[0], c_function), [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _bits_of_float(typingctx, value):  # noqa: ANN001, ANN202
    """The bits of an fp32, as an int64 that is not negative."""

    def codegen(context, builder, signature, args):  # noqa: ANN001, ANN202
        return builder.zext(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(64))

    return types.int64(types.float32), codegen


@functools.cache
def _compiled(dtype: torch.dtype, sandwich: bool) -> Any:
    return finalize_cpu._cached(_kernel, dtype, sandwich)


def _kernel(DTYPE: torch.dtype, SANDWICH: bool, *, cache: bool) -> Any:
    """The kernel for one set of compile-time facts: a C function of one pointer, kept on disk by numba."""
    tag, made_of = TAGS[DTYPE], SOURCE

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=cache)
    def finalize_norm_cpu(call):  # noqa: ANN001, ANN202
        _ = made_of
        (
            _, T, turn, finalize, finalize_arguments, count, H, out_at, out_stride, residual_stride, new_stride,
            residual_at, new_at, factor_at, post_factor_at, eps_bits,
        ) = numba.carray(call, 16)  # fmt: skip
        eps, fp32 = _float_of_bits(eps_bits), numba.float32(0)
        factor, post_factor = _row(factor_at, fp32, H), _row(post_factor_at, fp32, H)
        arguments = _row(finalize_arguments, 0, count).copy()  # this thread's own
        v = np.empty(H, np.float32)
        first = _take(call, turn)
        while first < T:
            last = min(first + turn, T)
            for some in range(first, last, _TOKENS):
                arguments[0], arguments[1], arguments[2] = some, min(some + _TOKENS, last), _TOKENS
                _call(finalize, arguments.ctypes.data)
                for t in range(some, arguments[1]):
                    y, old = _row(out_at + t * out_stride, tag, H), _row(residual_at + t * residual_stride, tag, H)
                    new = _row(new_at + t * new_stride, tag, H)
                    for c in range(H):
                        v[c] = _load(y[c])
                    if SANDWICH:
                        _rms_norm(v, post_factor, eps, H)
                    # `new` may be `old`: no loop has both, so that LLVM's check for overlap lets it vectorize.
                    for c in range(H):
                        v[c] = _load(_store(_load(old[c]) + _load(_store(v[c], tag)), tag))
                    for c in range(H):
                        new[c] = _store(v[c], tag)
                    _rms_norm(v, factor, eps, H)
                    for c in range(H):
                        y[c] = _store(v[c], tag)
            first = _take(call, turn)

    return finalize_norm_cpu


@numba.njit(nogil=True, inline="always")
def _rms_norm(v, factor, eps, H):  # noqa: ANN001, ANN202
    """In place, not yet rounded to the rows' dtype: `reference.rms_norm`, which gives the reasons."""
    largest = 0
    for c in range(H):
        largest = max(largest, _bits_of_float(v[c]) & 0x7FFFFFFF)
    scale = _float_of_bits((276 - max(largest >> 23, 89)) << 23)
    total = 0
    for c in range(H):
        v[c] = v[c] * scale
        # The mask changes nothing in [0, 2**23]; it tells LLVM that a 32-bit multiplication will do.
        q = (_bits_of_float(abs(v[c]) + numba.float32(8388608)) - 0x4B000000) & 0xFFFFFF
        total += q * q
    mean = numba.float32(total) / numba.float32(H)
    if largest >= 0x7F800000:
        mean = _float_of_bits(largest)
    inverse = numba.float32(1) / np.sqrt(mean + eps * scale * scale)
    for c in range(H):
        v[c] = v[c] * inverse * factor[c]
