"""What follows the shared add, on one token's row in registers: for every kernel that ends a layer.

One program owns the whole row, as [BLOCK] with BLOCK >= H; `here` is False beyond H. In `_residual_norm` it may be a
cluster of them, as [P, BLOCK]: `cluster_triton.py`. The definitions are
`moetail.reference.rms_norm`, `mhc` and `quantize` there; that of rms_norm says why the sum is of
integers, which `tl.max` and `tl.sum` may then add in any order, on any layout and number of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

from moetail.ops.cluster_triton import CLUSTER, _row_max, _row_sum
from moetail.ops.finalize_triton import _INTERPRET, _to


@dataclass(frozen=True)
class RowConfig:
    """Warps of a program that owns a row, the most registers of a thread (0: the compiler's choice), and how many
    programs own the row together (finalize_norm alone has more than one). A config changes time, never bits."""

    warps: int
    registers: int = 0
    programs: int = 1


# (least T, the 16-bit elements of a row that a thread holds, whether it may have all registers that one program on a
# multiprocessor leaves it) in rising T: a kernel's own. Left to choose, ptxas spares registers for a second program and
# loads the K rows one after the other: at H 5120, K 6 and 8 elements, 37 registers and eight batches of loads; told
# that it may use them all, 55 registers and two (sm_90, Triton 3.6 and 3.9).
RowShapes = tuple[tuple[int, int, bool], ...]


def heuristic(table: RowShapes, T: int, H: int, element_size: int) -> RowConfig:
    """The config of a call, from static facts."""
    return _fitted(next(shape for least, *shape in reversed(table) if least <= T), H, element_size)


def every_config(table: RowShapes, H: int, element_size: int) -> tuple[RowConfig, ...]:
    """All that `heuristic` can answer for some T: what has to be compiled so that no later T compiles."""
    return tuple(dict.fromkeys(_fitted(shape, H, element_size) for _, *shape in table))


def _fitted(shape: Sequence[int], H: int, element_size: int) -> RowConfig:
    elements, all_registers = shape
    warps = max(1, triton.next_power_of_2(H) * element_size // (2 * 32 * elements))
    if warps > 32:
        return RowConfig(32)
    told = all_registers and (warps < 32 or elements <= 8)  # 16 elements in 64 registers: told, ptxas spills (K 8)
    return RowConfig(warps, min(65536 // (32 * warps), 255) if told else 0)


@triton.jit
def _residual_norm(
    y, residual, weight, post_weight, here, eps, H: tl.constexpr, ZERO_CENTRED: tl.constexpr, mailbox=None,
    WARPS: tl.constexpr = 0,
):  # fmt: skip
    """(h, residual'): the sandwich norm of y where post_weight is given, the residual add, the next layer's norm.

    y and residual: the rows' dtype; weight and post_weight: any float dtype; all [BLOCK], or [P, BLOCK] with a
    cluster's mailbox and the warps of a program, which then exchanges twice a norm.
    """
    dtype: tl.constexpr = y.dtype
    if post_weight is not None:
        y = _to(_rms_norm(y.to(tl.float32), post_weight, here, eps, H, ZERO_CENTRED, mailbox, 2, WARPS), dtype)
    residual = _to(residual.to(tl.float32) + y.to(tl.float32), dtype)
    h = _to(_rms_norm(residual.to(tl.float32), weight, here, eps, H, ZERO_CENTRED, mailbox, 0, WARPS), dtype)
    return h, residual


@triton.jit
def _rms_norm(
    x, weight, here, eps, H: tl.constexpr, ZERO_CENTRED: tl.constexpr, mailbox=None, FIRST: tl.constexpr = 0,
    WARPS: tl.constexpr = 0,
):  # fmt: skip
    """fp32 [BLOCK], not yet rounded to the rows' dtype; x is fp32. A cluster's exchanges are FIRST and the next."""
    x = tl.where(here, x, 0.0)  # beyond H a caller's lanes may hold anything: what was never sent, 0 times infinity
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # PTX's abs may keep the sign of a NaN
    largest = _row_max(bits, mailbox, FIRST, WARPS)
    scale = ((276 - tl.maximum(largest >> 23, 89)) << 23).to(tl.float32, bitcast=True)
    x = x * scale
    q = ((tl.abs(x) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000).to(tl.int64)
    total = _row_sum(q * q, mailbox, FIRST + 1, WARPS).to(tl.float32)
    mean = tl.div_rn(total, tl.full(total.shape, H, tl.float32))
    mean = tl.where(largest < 0x7F800000, mean, largest.to(tl.float32, bitcast=True))
    inverse = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps * scale * scale))
    weight = weight.to(tl.float32)
    if ZERO_CENTRED:
        weight = 1.0 + weight
    return x * inverse * weight


@triton.jit
def _mhc(
    y, old_at, old_stride, new_at, new_stride, post_at, comb_at, pre_at, weight, there, here, eps, H: tl.constexpr,
    HC: tl.constexpr,
):  # fmt: skip
    """h, the norm of the collapse; y [BLOCK] has the rows' dtype.

    The HC streams are read at old_at, old_stride apart, and stored at new_at, new_stride apart. The mixes are fp32 and
    contiguous, comb as [source, target]. `there`: whether there is a token, None for yes.

    All is read before the first store, so the new streams may lie where the old ones do. A thread holds HC sums while
    the old streams pass by: holding those, and one sum, takes 28 registers more (H 5120, HC 4, 16 warps, Triton 3.9).
    """
    dtype: tl.constexpr = y.dtype
    y = y.to(tl.float32)
    sums = ()  # Triton has no star in a tuple
    for j in tl.static_range(HC):
        sums = sums + (tl.load(post_at + j, mask=there) * y,)  # type: ignore[assignment] # noqa: RUF005
    for i in tl.static_range(HC):
        old = tl.load(old_at, mask=here, other=0.0)
        mixed = ()
        for j in tl.static_range(HC):
            product = tl.load(comb_at + i * HC + j, mask=there) * old.to(tl.float32)
            mixed = mixed + (sums[j] + product,)  # type: ignore[assignment] # noqa: RUF005
        sums = mixed
        old_at += old_stride
    pre = ()
    for j in tl.static_range(HC):
        pre = pre + (tl.load(pre_at + j, mask=there),)  # type: ignore[assignment] # noqa: RUF005
    collapsed = y
    for j in tl.static_range(HC):
        new = _to(sums[j], dtype)
        tl.store(new_at, new, mask=here)
        part = pre[j] * new.to(tl.float32)
        collapsed = part if j == 0 else collapsed + part
        new_at += new_stride
    collapsed = _to(collapsed, dtype).to(tl.float32)
    return _to(_rms_norm(collapsed, weight, here, eps, H, False), dtype)


@triton.jit
def _quantize(
    h, values_at, scales_at, scales_stride, there, here, H: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr
):
    """Store h [BLOCK], of the rows' dtype, as e4m3 at values_at [BLOCK] and its groups' scales at scales_at,
    scales_stride apart. Where several programs own the row, h and values_at are [P, BLOCK].

    QUANT is a Quant's name; both pointers are to bytes, but that of fp32 scales. `there`: whether there is a token,
    None for yes. Groups lie within H, and a program's part of it, or beyond it.
    """
    GROUP: tl.constexpr = 32 if QUANT == "mxfp8" else 128
    P: tl.constexpr = 1 if len(h.shape) == 1 else h.shape[0]
    GROUPS: tl.constexpr = P * BLOCK // GROUP
    x = tl.reshape(h.to(tl.float32), [GROUPS, GROUP])
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    if QUANT != "mxfp8":
        largest = tl.maximum(largest, 0x2EDBE6FF)  # 1e-10
    if QUANT == "fp8_group128":
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([GROUPS], 448.0, tl.float32))
        divisor = tl.where(finite, scale, float("nan"))
        x = tl.div_rn(x, tl.broadcast_to(divisor[:, None], [GROUPS, GROUP]))
        scale = divisor
    else:
        exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 0)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        x = x * tl.where(finite, factor, float("nan"))[:, None]
        if QUANT == "mxfp8":
            scale = tl.where(finite, exponent, 0xFF).to(tl.uint8)
        else:
            scale = tl.where(finite, exponent << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(values_at, _e4m3(tl.reshape(x, h.shape)), mask=here)
    g = tl.arange(0, GROUPS)
    inside = g < H // GROUP
    if P > 1:
        inside = g % (BLOCK // GROUP) < H // P // GROUP
        g = g // (BLOCK // GROUP) * (H // P // GROUP) + g % (BLOCK // GROUP)
    if there is not None:
        inside = tl.where(there, inside, False)  # the interpreter rejects a block anded with a scalar
    tl.store(scales_at + g * scales_stride, scale, mask=inside)


@triton.jit
def _e4m3(x):
    """fp32 to the byte of an e4m3, to nearest even, saturating; NaN is 0x7F. Triton's interpreter loses the carry into
    the exponent (3.9): by hand there."""
    if _INTERPRET:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent's bias falls from 127 to 7
        # Below 2**-6 the step is 2**-9, and neighbouring fp32 above 2**23 are integers: the addition rounds.
        small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        return tl.where(x == x, code | ((bits >> 24) & 0x80), 0x7F).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


# For the hash of every kernel that ends a layer.
EPILOGUES = (_residual_norm, _rms_norm, _mhc, _quantize, _e4m3, *CLUSTER)
