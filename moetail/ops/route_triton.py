"""route on a CUDA GPU: one Triton kernel from logits to experts and weights.

A program, of one warp unless tuned otherwise, owns one token. The choices are mapped to integers of the same order, so
that an argmax is a maximum and then a minimum over ids (two warp-wide `redux`; no float compare sees a NaN), once a
slot. The scores of the chosen experts are computed again from their logits: the same function, the same bits.

Bits are torch's on the same GPU: libdevice's exp and log1p, correctly rounded division and square root, and its
orders of addition. Its softmax (dim <= 1024) adds 32 lanes' partial sums, lane i of experts i, i+32, ..., and its sum
over K <= 32 slots one value a lane; both then fold the upper half onto the lower until one is left (sum: since torch
2.10, pytorch#164790; read in the headers of 2.13).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moetail import tuning
from moetail.ops.finalize_triton import _INTERPRET, _sigmoid, has_pdl
from moetail.routing import Router

_MASKED = tl.constexpr(-0x7F800001)  # the key of -inf
_DEAD = tl.constexpr(-0x80000000)  # below the key of every number: not an expert, or taken


@dataclass(frozen=True)
class RouteConfig:
    """Warps of a program, which owns a token. A config changes time, never bits: `_fold` fixes the orders."""

    warps: int


HEURISTIC = RouteConfig(1)  # two warp-wide `redux` a slot, and no barrier
CANDIDATES = (HEURISTIC, RouteConfig(2), RouteConfig(4))


def launch(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    router: Router,
    weights: torch.Tensor,
    ids: torch.Tensor,
    config: RouteConfig | None = None,
) -> None:
    """Write weights and ids, both contiguous. The arguments are checked, T >= 1.

    The first call of a kind compiles and loads every config that another T could ask for.
    """
    T, E = logits.shape
    stride = logits.stride(0) if T > 1 else max(logits.stride(0), E)  # one row has none of its own
    if config is None:
        shape = tuned_shape(E, router, logits.dtype)
        config = tuning.tuned(RouteConfig, logits.device, shape, kernel_hash(), T) or HEURISTIC
        if logits.device.type == "cuda":
            bias_dtype = None if correction_bias is None else correction_bias.dtype
            _compile(logits.device, logits.dtype, bias_dtype, stride, E, router)
    # Triton launches on the current device's stream, whatever device the tensors are on.
    with torch.cuda.device(logits.device) if logits.device.type == "cuda" else contextlib.nullcontext():
        _route_kernel[(T,)](
            logits, correction_bias, weights, ids, stride, float(router.routed_scale),
            **options(E, router, has_pdl(logits.device), config),
        )  # fmt: skip


@functools.cache
def tuned_shape(E: int, router: Router, dtype: torch.dtype) -> tuning.Shape:
    limited = router.top_groups < router.num_groups
    groups = (("groups", router.num_groups), ("top_groups", router.top_groups)) if limited else ()
    dims = (("E", E), ("K", router.top_k), ("score", router.score), *groups)
    return tuning.Shape("route", dims, str(dtype).removeprefix("torch."))


@functools.cache
def kernel_hash() -> str:
    helpers = (_score, _best_groups, _exp_sum, _fold, _key, _unkey, _exp, _log1p_exp, _sigmoid)
    return tuning.source_hash(_route_kernel, *helpers)


@functools.cache
def _compile(
    device: torch.device, dtype: torch.dtype, bias_dtype: torch.dtype | None, stride: int, E: int, router: Router
) -> None:
    """Compile and load every config for tensors of these dtypes (their memory aligned to 16 bytes)."""
    tuned = tuning.every_tuned(RouteConfig, device, tuned_shape(E, router, dtype), kernel_hash())
    with torch.cuda.device(device):
        for config in dict.fromkeys((HEURISTIC, *tuned)):
            compiled = _route_kernel.warmup(
                dtype, bias_dtype, torch.float32, torch.int32, stride, 2.0, grid=(1,),
                **options(E, router, has_pdl(device), config),
            )  # fmt: skip
            compiled[(1, 1, 1)]  # loads it: a module may not be loadable where the first launch is captured


def options(E: int, router: Router, pdl: bool, config: RouteConfig = HEURISTIC) -> dict[str, object]:
    """The compile-time arguments of the kernel, and the launch's."""
    limited = router.top_groups < router.num_groups
    groups = router.num_groups if limited else 1
    return {
        "E": E, "K": router.top_k, "SCORE": router.score, "RENORMALIZE": router.renormalize,
        "GROUPS": groups, "TOP_GROUPS": router.top_groups if limited else 1, "PDL": pdl,
        "SP": triton.next_power_of_2(E // groups), "GP": triton.next_power_of_2(groups),
        "KP": triton.next_power_of_2(router.top_k), "num_warps": config.warps, "enable_fp_fusion": False,
        "launch_pdl": pdl,
    }  # fmt: skip


@triton.jit(do_not_specialize=["routed_scale"])
def _route_kernel(
    logits, bias, weights, ids, logits_stride, routed_scale, E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PDL: tl.constexpr, SP: tl.constexpr,
    GP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = E // GROUPS
    t = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, GP * SP)
    expert = lane // SP * SIZE + lane % SP
    live = (lane % SP < SIZE) & (lane // SP < GROUPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = logits + t * logits_stride
    x = tl.load(row + expert, mask=live, other=float("-inf")).to(tl.float32)
    top = 0.0
    total = 1.0
    if SCORE == "softmax":
        top = tl.max(x)
        total = _exp_sum(row, top, E)
    choice = _score(x, top, total, SCORE)
    if bias is not None:
        choice += tl.load(bias + expert, mask=live, other=0.0).to(tl.float32)
    key = tl.where(x == float("-inf"), _MASKED, _key(choice))
    key = tl.where(live, key, _DEAD)
    if TOP_GROUPS < GROUPS:
        allowed = _best_groups(key, GROUPS, TOP_GROUPS, GP, SP)
        key = tl.where(live & ~allowed, _MASKED, key)

    slot = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    for k in range(K):
        best = tl.min(tl.where(key == tl.max(key), expert, 0x7FFFFFFF))
        chosen = tl.where(slot == k, best, chosen)
        key = tl.where(expert == best, _DEAD, key)

    here = slot < K
    y = tl.load(row + chosen, mask=here, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax_topk":
        w = _exp(y - tl.max(y))
        w = tl.div_rn(w, _fold(w, KP) + tl.zeros_like(w))
    else:
        w = tl.where(here, _score(y, top, total, SCORE), 0.0)
    if RENORMALIZE:
        w = tl.div_rn(w, _fold(w, KP) + 1e-20 + tl.zeros_like(w))
    tl.store(weights + t * K + slot, w * routed_scale, mask=here)
    tl.store(ids + t * K + slot, chosen, mask=here)


@triton.jit
def _score(x, top, total, SCORE: tl.constexpr):
    if SCORE == "softmax":
        return tl.div_rn(_exp(x - top), total + tl.zeros_like(x))
    elif SCORE == "sigmoid":
        return _sigmoid(x)
    elif SCORE == "sqrtsoftplus":
        return tl.sqrt_rn(tl.where(x > 20.0, x, _log1p_exp(x)))
    else:
        return x


@triton.jit
def _best_groups(key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """int1 [GP * SP]: whether an expert's group is among the best, by the sum of its two best choices."""
    keys = tl.reshape(key, [GP, SP])
    column = tl.arange(0, SP)[None, :]
    first = tl.max(keys, axis=1)
    at = tl.min(tl.where(keys == first[:, None], column, SP), axis=1)
    second = tl.max(tl.where(column == at[:, None], _DEAD, keys), axis=1)
    group = tl.arange(0, GP)
    score = tl.where(group < GROUPS, _key(_unkey(first) + _unkey(second)), _DEAD)
    allowed = tl.zeros([GP], tl.int32)
    for _ in range(TOP_GROUPS):
        best = tl.min(tl.where(score == tl.max(score), group, GP))
        allowed = tl.where(group == best, 1, allowed)
        score = tl.where(group == best, _DEAD, score)
    return tl.reshape(tl.broadcast_to(allowed[:, None], [GP, SP]), [GP * SP]) != 0


@triton.jit
def _exp_sum(row, top, E: tl.constexpr):
    """The sum of exp(logit - top) over the experts, in the order of torch's warp softmax."""
    lane = tl.arange(0, 32)
    total = tl.zeros([32], tl.float32)
    for first in range(0, E, 32):
        x = tl.load(row + first + lane, mask=first + lane < E, other=float("-inf")).to(tl.float32)
        total += _exp(x - top)
    return _fold(total, 32)


@triton.jit
def _fold(x, N: tl.constexpr):
    """The sum of x [N], N a power of two: the upper half is added to the lower until one is left."""
    if N <= 2:
        return tl.sum(x)
    else:
        return _fold(tl.sum(tl.reshape(x, [2, N // 2]), axis=0), N // 2)


@triton.jit
def _key(x):
    """fp32 to int32 of the same order: -0 equals +0, a NaN is above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _unkey(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    if _INTERPRET:
        return tl.exp(x)
    else:
        return libdevice.exp(x)  # tl.exp is ex2.approx


@triton.jit
def _log1p_exp(x):
    if _INTERPRET:  # which knows no log1p: in fp64, log(1 + e) corrected for what 1 + e lost
        e = tl.exp(x.to(tl.float64))
        u = 1.0 + e
        return tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))).to(tl.float32)
    else:
        return libdevice.log1p(libdevice.exp(x))
