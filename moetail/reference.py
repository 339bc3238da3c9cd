"""The torch definition of every op: what the bits must be, on any device, slowly.

Each function takes the arguments of the op of the same name, a collective's those of every rank. The rounding points
are written out, one `.to()` each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moetail.numerics import Numerics, slot_groups, torch_cpu_main_columns
from moetail.quantization import Quant, check_columns
from moetail.routing import Permutation, Router, row_bound


def finalize(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> torch.Tensor:
    """Definition of `moetail.finalize`; shapes, dtypes and errors are documented there."""
    (T, K), (R, H) = row_map.shape, rows.shape
    n = numerics.resolve(T, K, H, rows.device.type, rows.dtype, None if weights is None else weights.dtype)
    limit = R if num_valid_rows is None else num_valid_rows.reshape(()).clamp(max=R)
    present = (row_map >= 0) & (row_map < limit)
    index = torch.where(present, row_map, 0).long()

    main = torch_cpu_main_columns(H) if n.order == "torch_cpu" else H
    routed = _routed_sum(rows[:, :main], index, present, weights, n, "sequential" if main < H else n.order)
    if main < H:
        tail = _routed_sum(rows[:, main:], index, present, weights, n, "torch_cpu")
        routed = torch.cat([routed, tail], dim=1)

    if routed_scale != 1.0:
        if n.scale == "round_row":
            routed = routed.to(rows.dtype).float()
        routed = routed * routed_scale
    if n.rounding == "two":
        routed = routed.to(rows.dtype).float()
    y = routed if shared is None else _add_shared(routed, shared, shared_gate, rows.dtype, n.rounding)
    y = y.to(rows.dtype)
    return torch.where(y == 0, torch.zeros_like(y), y) if n.zero == "positive" else y


def finalize_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_norm`: (h, residual); shapes, dtypes and errors are documented there."""
    y = finalize(
        rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
        num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    return _residual_norm(y, residual, norm_weight, eps, post_norm_weight, zero_centred)


def _residual_norm(
    y: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    post_norm_weight: torch.Tensor | None, zero_centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, residual) behind a finished y [T, H]."""
    if post_norm_weight is not None:
        y = rms_norm(y, post_norm_weight, eps, zero_centred=zero_centred)
    residual = (residual.float() + y.float()).to(y.dtype)
    return rms_norm(residual, norm_weight, eps, zero_centred=zero_centred), residual


def finalize_mhc(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_mhc`: (h, residual); shapes, dtypes and errors are documented there."""
    y = finalize(
        rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
        num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    return _mhc(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps)


def mhc(y: torch.Tensor, **mhc: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.mhc`: (h, residual); shapes, dtypes and errors are documented there."""
    return _mhc(y, **mhc)


def _mhc(
    y: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor, pre_mix: torch.Tensor,
    norm_weight: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, residual) behind a finished y [T, H]. In fp32 each product and each sum is rounded, no FMA; a sum starts from
    its first product, so that a zero keeps its sign."""
    hc, streams = residual.shape[1], residual.float()
    mixed = post_mix[:, :, None] * y.float()[:, None]
    for source in range(hc):
        mixed = mixed + res_mix[:, source, :, None] * streams[:, source, None]
    residual = mixed.to(y.dtype)
    return mhc_collapse(residual, pre_mix=pre_mix, norm_weight=norm_weight, eps=eps), residual


def mhc_collapse(
    residual: torch.Tensor, *, pre_mix: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:  # fmt: skip
    """Definition of `moetail.mhc_collapse`: h; shapes, dtypes and errors are documented there."""
    weighted = pre_mix[:, :, None] * residual.float()
    collapsed = weighted[:, 0]
    for stream in range(1, residual.shape[1]):
        collapsed = collapsed + weighted[:, stream]
    return rms_norm(collapsed.to(residual.dtype), norm_weight, eps)


def mhc_mixes(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, *, rms_eps: float, hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Definition of `moetail.mhc_mixes`: (pre, post, comb). The order of the product's sums is left to torch."""
    T, hc, _ = streams.shape
    f = streams.flatten(1).float()
    m = (f @ fn.T) * torch.rsqrt(f.square().mean(-1, keepdim=True) + rms_eps)
    sizes = (hc, hc, hc * hc)
    parts = zip(m.split(sizes, dim=-1), scale, base.split(sizes), strict=True)
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
    return (
        torch.sigmoid(pre) + hc_eps,
        2.0 * torch.sigmoid(post),
        sinkhorn(comb.reshape(T, hc, hc), hc_eps, iterations),
    )


def sinkhorn(a: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """a [.., source, target] -> comb, whose targets each sum to 1 over the sources.

    The softmax is the first row step; the last step is a column step.
    """
    comb = torch.softmax(a, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centred: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight (1 + weight where zero-centred) of [T, H], in x's dtype.

    All in fp32, rounded to x's dtype once, after the weight (as FlashInfer and vLLM do; transformers' Llama rounds
    before the weight too).

    Adding the squares in floating point would make the bits depend on a kernel's layout. Here the sum is of integers:
    a row is scaled by a power of two so that its largest element lies in [2**22, 2**23), each |element| is rounded to
    an integer q (ties to even), and q**2 is added in int64. H <= 16384 numbers of at most 2**46 stay below 2**63, so
    every order of addition gives the same sum, and any block size, warp count or thread count the same bits.

    The error of that sum: q differs from the scaled |x| by at most 1/2, and only where |x| < 2**7 (bf16, 8 significant
    bits), 2**10 (fp16, 11 bits) or 2**23 (fp32); the sum is at least 2**44. So it is off by at most H * 2**-37 of
    itself (bf16; 2**-24 at H 8192, half an ulp of fp32), H * 2**-34 (fp16) or sqrt(H) * 2**-22 (fp32, where all errors
    have one sign). What follows (to fp32, / H, + eps, square root, reciprocal) is correctly rounded by IEEE operations.

    Range: every finite x, 1e-20 <= eps <= 1. In the scaled row nothing overflows, whatever x is (an fp32 mean of
    squares would be inf from an RMS of 2**64 on). The scale stops at 2**60: below a largest element of 2**-37 the grid
    stays at 2**-60, an error of 2**-97 beside an eps of at least 2**-67. A row with an infinity has mean inf: NaN at
    the infinity and zeros elsewhere; a row with a NaN is NaN.
    """
    x32, one = x.float(), torch.ones((), device=x.device)
    largest = (x32.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)  # |fp32| are ordered as their bits are
    scale = ((276 - (largest >> 23).clamp(min=89)) << 23).view(torch.float32)  # 2**23 / the power of two above largest
    scaled = x32 * scale
    # In [2**23, 2**24] neighbouring fp32 are integers, and their bits count them: the addition rounds.
    q = ((scaled.abs() + 2.0**23).view(torch.int32) - 0x4B000000).long()
    # Divided by a tensor: on CUDA torch turns a division by a Python number into a multiplication.
    mean = (q * q).sum(-1, keepdim=True).float() / (one * x.shape[1])
    mean = torch.where(largest < 0x7F800000, mean, largest.view(torch.float32))  # inf or NaN
    # torch.sqrt of fp32 is not correctly rounded on a CPU (MKL; torch 2.13: 18 % of values). By fp64 it is: the square
    # root of an fp32 lies at least four fp64 ulps from the middle of two fp32.
    inverse = one / torch.sqrt((mean + one * eps * scale * scale).double()).float()
    factor = 1.0 + weight.float() if zero_centred else weight.float()
    return (scaled * inverse * factor).to(x.dtype)


def quantize(h: torch.Tensor, quant: Quant) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of an op's `quant_out`: (values [T, H] float8_e4m3fn, scales [T, H / group]) of a finished h [T, H].

    `moetail.Quant` says what each format is. To nearest even; a quotient above 448 (by a rounding) becomes 448.
    Raises: ValueError where H is no multiple of the format's group.
    """
    T, H = h.shape
    check_columns(quant, H)
    x = h.float().reshape(T, H // quant.group, quant.group)
    one = torch.ones((), device=h.device)  # rms_norm says why a divisor is a tensor
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    finite = largest < 0x7F800000
    largest = largest.view(torch.float32).clamp(min=quant.least).view(torch.int32)
    if quant.power_of_two:
        # 448 is 1.75 * 2**8: a fraction above .75 (0x600000) carries into the exponent.
        exponent = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=0)
        scaled = x * ((254 - exponent) << 23).view(torch.float32)[..., None]
        scales = exponent.to(torch.uint8) if quant.scale_dtype == torch.uint8 else (exponent << 23).view(torch.float32)
    else:
        scales = largest.view(torch.float32) / (one * 448)
        scaled = x / scales[..., None]
    values = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    values = torch.where(finite[..., None], values, 0x7F).view(torch.float8_e4m3fn)
    nan = 0xFF if quant.scale_dtype == torch.uint8 else float("nan")
    return values.reshape(T, H), torch.where(finite, scales, nan)


def all_reduce(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """Definition of `moetail.all_reduce`: `partials` holds every rank's x [T, H], in rank order."""
    total = partials[0].float()  # not from +0.0: a zero that is negative on every rank stays so
    for partial in partials[1:]:
        total = total + partial.float()
    return total.to(partials[0].dtype)


def finalize_all_reduce(ranks: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Definition of `moetail.finalize_all_reduce`: `ranks` holds every rank's arguments of `finalize`, by name."""
    return all_reduce([finalize(**arguments) for arguments in ranks])


def finalize_reduce_scatter(ranks: Sequence[Mapping[str, Any]], rank: int) -> torch.Tensor:
    """Definition of `moetail.finalize_reduce_scatter`: what rank `rank` keeps of `finalize_all_reduce`."""
    return finalize_all_reduce(ranks).chunk(len(ranks))[rank]


def all_reduce_norm(
    partials: Sequence[torch.Tensor],
    *,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.all_reduce_norm`: the norm of the sum, never the sum of norms."""
    return _residual_norm(all_reduce(partials), residual, norm_weight, eps, post_norm_weight, zero_centred)


def finalize_all_reduce_norm(ranks: Sequence[Mapping[str, Any]], **norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_all_reduce_norm`: as `finalize_all_reduce`, then as `all_reduce_norm`."""
    return all_reduce_norm([finalize(**arguments) for arguments in ranks], **norm)


def all_reduce_mhc(partials: Sequence[torch.Tensor], **mhc: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.all_reduce_mhc`: the streams take up the sum, once."""
    return _mhc(all_reduce(partials), **mhc)


def finalize_all_reduce_mhc(ranks: Sequence[Mapping[str, Any]], **mhc: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.finalize_all_reduce_mhc`: as `finalize_all_reduce`, then as `all_reduce_mhc`."""
    return all_reduce_mhc([finalize(**arguments) for arguments in ranks], **mhc)


def route(
    logits: torch.Tensor, router: Router, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of `moetail.route`; its softmax and its sums are torch's own on the tensors' device."""
    T, E = logits.shape
    logits = logits.float()
    if router.score == "softmax":
        scores = torch.softmax(logits, dim=-1)
    elif router.score == "sigmoid":
        scores = torch.sigmoid(logits)
    elif router.score == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(logits).sqrt()
    else:
        scores = logits

    choice = scores if correction_bias is None else scores + correction_bias.float()
    choice = choice.masked_fill(logits == -torch.inf, -torch.inf)
    if router.top_groups < router.num_groups:
        groups = choice.view(T, router.num_groups, E // router.num_groups)
        best = _top(groups.topk(2).values.sum(-1), router.top_groups)
        allowed = torch.zeros(T, router.num_groups, dtype=torch.bool, device=logits.device).scatter(1, best, True)
        choice = groups.masked_fill(~allowed[:, :, None], -torch.inf).view(T, E)
    ids = _top(choice, router.top_k)

    weights = scores.gather(1, ids)
    if router.score == "softmax_topk":
        weights = torch.softmax(weights, dim=-1)
    if router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scale, ids.int()


def _top(values: torch.Tensor, k: int) -> torch.Tensor:
    """The places of the k largest of the last dimension, descending: NaN first, the lowest place among equals.

    Each value and its place become one integer, so that torch.topk has no tie to break: 3x faster than a stable sort.
    """
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)  # -0 equals +0
    ordered = torch.where(values.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    n = values.shape[-1]
    return torch.topk(ordered * n - torch.arange(n, device=values.device), k).indices


def permute(
    topk_ids: torch.Tensor, num_experts: int, *, block: int = 1, expert_map: torch.Tensor | None = None
) -> Permutation:
    """Definition of `moetail.permute`: a stable sort by expert."""
    (T, K), E, device = topk_ids.shape, num_experts, topk_ids.device
    S, R = T * K, row_bound(T * K, E, block)
    experts = topk_ids.reshape(-1).long()
    if expert_map is not None:
        inside = (experts >= 0) & (experts < expert_map.numel())
        experts = torch.where(inside, expert_map[torch.where(inside, experts, 0)].long(), -1)
    experts = torch.where((experts >= 0) & (experts < E), experts, E).to(torch.int16)  # absent slots sort last
    order = torch.argsort(experts, stable=True)
    experts = experts[order].long()
    counts = torch.zeros(E + 1, dtype=torch.long, device=device).scatter_add_(0, experts, torch.ones_like(experts))
    padded = (counts[:E] + block - 1) // block * block
    offsets = padded.cumsum(0)
    shift = torch.zeros(E + 1, dtype=torch.long, device=device)  # from a slot's place in the sort to its row
    shift[:E] = (offsets - padded) - (counts.cumsum(0)[:E] - counts[:E])
    absent = experts == E
    rows = torch.where(absent, R, torch.arange(S, device=device) + shift[experts])

    source = torch.full((R + 1,), -1, dtype=torch.int32, device=device)  # the last one takes the absent slots
    source[rows] = torch.where(absent, -1, order).int()
    block_expert = torch.full((R // block + 1,), -1, dtype=torch.int32, device=device)
    block_expert[rows // block] = torch.where(absent, -1, experts).int()
    row_map = torch.empty(S, dtype=torch.int32, device=device)
    row_map[order] = torch.where(absent, -1, rows).int()
    return Permutation(
        row_map.view(T, K), source[:R].clone(), block_expert[: R // block].clone(), counts[:E].int(), offsets.int(),
        offsets[-1:].int(), block,
    )  # fmt: skip


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    permutation: Permutation,
    *,
    gather: bool = False,
    activation: str | None = None,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Definition of `moetail.grouped_gemm`: a loop over the experts. Rows that nobody may read are 0."""
    p = permutation
    return gemm_rows(
        x, weight, bias, p.source, p.block_expert, p.row_map.shape[1], p.block, gather, activation, limit
    )  # fmt: skip


def gemm_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor, block_expert: torch.Tensor,
    K: int, block: int, gather: bool, activation: str | None, limit: float | None,
) -> torch.Tensor:  # fmt: skip
    """`grouped_gemm` of a permutation's parts. A product of two bf16 is exact in fp32."""
    N = weight.shape[1]
    out = x.new_zeros(source.shape[0], N if activation is None else N // 2)
    live = (source >= 0).nonzero().flatten()
    expert_of = block_expert[live // block]
    for e in expert_of.unique().tolist():
        rows = live[expert_of == e]
        y = x[source[rows] // K if gather else rows].float() @ weight[e].float().t()
        if bias is not None:
            y = y + bias[e].float()
        if activation is not None:
            gate, up = y.chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y = torch.nn.functional.silu(gate) * up
        out[rows] = y.to(x.dtype)
    return out


def _routed_sum(
    rows: torch.Tensor,
    index: torch.Tensor,
    present: torch.Tensor,
    weights: torch.Tensor | None,
    n: Numerics,
    order: str,
) -> torch.Tensor:
    """fp32 [T, columns of rows]; a slot that is absent leaves its accumulator untouched."""
    T, K = index.shape
    total = None
    for group in slot_groups(order, K):
        acc = torch.zeros(T, rows.shape[1], dtype=torch.float32, device=rows.device)
        for k in group:
            if rows.shape[0] == 0:
                break
            x = rows[index[:, k]].float()
            added = acc + x if weights is None else _multiply_add(x, weights[:, k, None].float(), acc, n, rows.dtype)
            acc = torch.where(present[:, k, None], added, acc)
        total = acc if total is None else total + acc
    assert total is not None, "K >= 1"
    return total


def _multiply_add(x: torch.Tensor, w: torch.Tensor, acc: torch.Tensor, n: Numerics, dtype: torch.dtype) -> torch.Tensor:
    if n.product == "fma":
        return fma(x, w, acc)
    product = x * w
    return acc + (product.to(dtype).float() if n.product == "round_row" else product)


def _add_shared(
    routed: torch.Tensor, shared: torch.Tensor, shared_gate: torch.Tensor | None, dtype: torch.dtype, rounding: str
) -> torch.Tensor:
    if shared_gate is None:
        return routed + shared.float()
    gate = torch.sigmoid(shared_gate.float())
    if rounding == "one":
        return fma(gate.expand_as(shared), shared.float(), routed)
    gated = (gate.to(dtype).float() * shared.float()).to(dtype)
    return routed + gated.float()


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 a * b + c, rounded once.

    The product of two fp32 is exact in fp64. Rounding the fp64 sum to fp32 would round twice (a=205,
    b=5237765 * 2**-54, c=1 comes out as 1.0 and must be 1.0000001), so the fp64 sum is rounded to odd first: an inexact
    sum takes whichever neighbour has an odd last bit, which no later rounding can mistake for a tie.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    fix = (error != 0) & (bits & 1 == 0) & torch.isfinite(total)
    away_from_zero = (error > 0) == (total > 0)
    odd = torch.where(fix, bits + torch.where(away_from_zero, 1, -1), bits)
    return odd.view(torch.float64).float()
