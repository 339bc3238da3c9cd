"""Several programs own a row: the row's maximum and sum, exchanged through the shared memory of a thread-block cluster.

`num_ctas=P` makes Triton launch every program as P thread blocks of one cluster. A tensor [P, BLOCK] is split among
them, a line each; its reduction along axis 1 stays within a block, and the inline PTX here takes it from there:

- `_start`, the kernel's first act: an mbarrier for each exchange, in static shared memory beside Triton's own. It tells
  the cluster that they are ready, and waits for nobody. `_join`: all blocks have started and their mbarriers are ready.
- `_row_max` and `_row_sum`: each warp reduces what its threads hold and sends its part to all P blocks (`st.async`,
  which counts its bytes on the receiver's mbarrier). A warp waits for the P * WARPS parts and reduces them itself.
  There is neither a barrier among a block's warps nor a memory fence.

A block leaves after it has received all, so that no part is ever sent to a block that is gone. Maxima and sums of
integers have the same bits in any order. Needs sm_90. In Triton's interpreter the whole tensor is reduced at once.

What the PTX needs of a tensor's layout is that each thread holds one run of BLOCK / (32 * WARPS) neighbours of its
block's line, as a 16-byte load gives it. `check` counts, in a compiled kernel, how often the PTX is there: once an
exchange is once a thread, and P * 32 * WARPS threads then hold as many runs, each another one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moetail.ops.finalize_triton import _INTERPRET

_SLOTS = 64  # the bytes of the mbarriers, 8 each: eight exchanges, of which four are in use
_LOW = "0x7ffffff"  # 27 bits: 32 such numbers have a sum below 2**32, which redux.sync adds


def check(ptx: str, exchanges: int) -> None:
    """Raises: RuntimeError where Triton has laid a row out so that a thread does not send exactly one part."""
    sends, clusters = ptx.count("st.async"), ptx.count(".reqnctapercluster")
    if (sends, clusters) != (exchanges, 1):
        raise RuntimeError(
            f"a clustered kernel must send {exchanges} times in one cluster, Triton {triton.__version__} made it send "
            f"{sends} times in {clusters}"
        )


@triton.constexpr_function
def _start_ptx(P: int, WARPS: int, exchanges: int) -> str:
    parts = P * WARPS
    barriers = [f"[$0+{8 * i}]" for i in range(exchanges)]
    return "\n".join((
        "{ .reg .pred first; .reg .b32 t; .reg .b64 none;",
        f".shared .align 16 .b8 moetail_cluster[{_SLOTS + 8 * parts * exchanges}];",
        "mov.u32 $0, moetail_cluster; mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;",
        *(f"@first mbarrier.init.shared::cta.b64 {at}, 1;" for at in barriers),
        "@first fence.mbarrier_init.release.cluster;",
        # Even exchanges are of 4 bytes, maxima; odd ones of 8.
        *(f"@first mbarrier.arrive.expect_tx.shared::cta.b64 none, {at}, {parts * (8 if i % 2 else 4)};"
          for i, at in enumerate(barriers)),
        "barrier.cluster.arrive.relaxed.aligned; }",
    ))  # fmt: skip


@triton.constexpr_function
def _exchange_ptx(P: int, WARPS: int, INDEX: int, wide: bool) -> str:
    """$0: the row's value, $1: a thread's part of it, $2: what `_start` returned. `wide`: the sum of int64 that are
    less than 2**54 / 32 a thread and 2**63 in all; otherwise the maximum of int32 >= 0."""
    parts, size, kind = P * WARPS, 8 if wide else 4, "b64" if wide else "b32"
    slots = _SLOTS + 8 * parts * INDEX
    combine = "add.s64" if wide else "max.s32"
    received = [f"ld.shared.{kind} got, [at+{size * n}]; {combine} part, part, got;" for n in range(0, parts, 32)]
    if parts < 32:  # lanes beyond the last part have none
        received = [f"setp.lt.u32 sends, lane, {parts}; @sends ld.shared.{kind} part, [at];"]
    return "\n".join((
        f"{{ .reg .pred sends, done; .reg .b32 lane, warp, rank, at, bell, x, y, z; .reg .{kind} part, got;",
        ".reg .b64 low, middle, high;",
        "mov.u32 warp, %tid.x; and.b32 lane, warp, 31; shr.u32 warp, warp, 5; mov.u32 rank, %cluster_ctarank;",
        _warp_sum("$1", "part", 2) if wide else "redux.sync.max.s32 part, $1, 0xffffffff;",
        # Lane l sends to block l: its slot there is this block's and this warp's.
        f"mad.lo.u32 at, rank, {WARPS}, warp; mad.lo.u32 at, at, {size}, $2; add.u32 at, at, {slots};",
        f"add.u32 bell, $2, {8 * INDEX}; setp.lt.u32 sends, lane, {P};",
        "@sends mapa.shared::cluster.u32 at, at, lane; @sends mapa.shared::cluster.u32 x, bell, lane;",
        f"@sends st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [at], part, [x];",
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [bell], 0; @!done bra.uni again;",
        f"mad.lo.u32 at, lane, {size}, $2; add.u32 at, at, {slots}; mov.{kind} part, 0;",
        *received,
        (_warp_sum("part", "$0", 3) if wide else "redux.sync.max.s32 $0, part, 0xffffffff;") + " }",
    ))  # fmt: skip


@triton.constexpr_function
def _warp_sum(value: str, total: str, digits: int) -> str:
    """PTX for the sum over a warp of int64 >= 0, in `digits` of 27 bits: a third of the steps that shuffles take."""
    text = [f"mov.b64 high, {value};"]
    for digit in "xyz"[:digits]:
        text.append(f"cvt.u32.u64 {digit}, high; shr.u64 high, high, 27;")
        if digit != "xyz"[digits - 1]:
            text.append(f"and.b32 {digit}, {digit}, {_LOW};")
    text += [f"redux.sync.add.u32 {digit}, {digit}, 0xffffffff;" for digit in "xyz"[:digits]]
    text.append("cvt.u64.u32 low, x; cvt.u64.u32 middle, y; shl.b64 middle, middle, 27; add.u64 low, low, middle;")
    if digits == 3:
        text.append("cvt.u64.u32 high, z; shl.b64 high, high, 54; add.u64 low, low, high;")
    return " ".join((*text, f"mov.b64 {total}, low;"))


@triton.jit
def _start(number, P: tl.constexpr, WARPS: tl.constexpr, EXCHANGES: tl.constexpr):
    """What the exchanges are given, an int32. `number`: any int32, which is not looked at."""
    if _INTERPRET:
        return number
    else:
        return tl.inline_asm_elementwise(
            _start_ptx(P, WARPS, EXCHANGES), "=&r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _join(mailbox):
    if _INTERPRET:
        return mailbox
    else:
        return tl.inline_asm_elementwise(
            "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;", "=r,r", [mailbox], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def _row_max(x, mailbox, INDEX: tl.constexpr, WARPS: tl.constexpr):
    """The maximum of x, int32 >= 0, as a scalar where x is [BLOCK]; where it is [P, BLOCK], as [P, BLOCK]."""
    if mailbox is None:
        return tl.max(x, axis=0)
    elif _INTERPRET:
        return tl.broadcast_to(tl.max(tl.max(x, axis=1), axis=0), x.shape)
    else:
        P: tl.constexpr = x.shape[0]
        RUN: tl.constexpr = x.shape[1] // (32 * WARPS)
        part = tl.max(tl.reshape(x, [P, 32 * WARPS, RUN]), axis=2)
        part = tl.inline_asm_elementwise(
            _exchange_ptx(P, WARPS, INDEX, False), "=&r,r,r", [part, mailbox], dtype=tl.int32, is_pure=False, pack=1
        )
        return tl.reshape(tl.broadcast_to(tl.expand_dims(part, 2), [P, 32 * WARPS, RUN]), x.shape)


@triton.jit
def _row_sum(x, mailbox, INDEX: tl.constexpr, WARPS: tl.constexpr):
    """The sum of x, int64 in [0, 2**46], as `_row_max` returns it."""
    if mailbox is None:
        return tl.sum(x, axis=0)
    elif _INTERPRET:
        return tl.broadcast_to(tl.sum(tl.sum(x, axis=1), axis=0), x.shape)
    else:
        P: tl.constexpr = x.shape[0]
        RUN: tl.constexpr = x.shape[1] // (32 * WARPS)
        part = tl.sum(tl.reshape(x, [P, 32 * WARPS, RUN]), axis=2)
        part = tl.inline_asm_elementwise(
            _exchange_ptx(P, WARPS, INDEX, True), "=&l,l,r", [part, mailbox], dtype=tl.int64, is_pure=False, pack=1
        )
        return tl.reshape(tl.broadcast_to(tl.expand_dims(part, 2), [P, 32 * WARPS, RUN]), x.shape)


# For the hash of every kernel that ends a layer.
CLUSTER: tuple[Any, ...] = (_start_ptx, _exchange_ptx, _warp_sum, _start, _join, _row_max, _row_sum)
