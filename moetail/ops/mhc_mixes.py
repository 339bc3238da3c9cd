"""mhc_mixes: what a sublayer takes of the residual streams and gives to them, computed from the streams (mHC).

    f     = the token's streams, one after the other, in fp32
    m     = (fn @ f) * rsqrt(mean(f * f) + rms_eps)                            one statistic a token
    pre   = sigmoid(m[:hc] * scale[0] + base[:hc]) + hc_eps
    post  = 2 * sigmoid(m[hc:2*hc] * scale[1] + base[hc:2*hc])
    comb  = sinkhorn(m[2*hc:] * scale[2] + base[2*hc:])                        [source, target]

A sinkhorn iteration is a row and a column step; the first row step is the softmax over the targets.

All in fp32; only the streams are bf16. The definition is `moetail.reference.mhc_mixes`, which implementations equal
within `torch.testing.assert_close`'s default: a GPU adds in the order of its tensor cores. Each gives a token the same
bits in every batch.
Implementations, chosen by the dispatcher from the tensors' device: `mhc_mixes_triton.py` (CUDA, two kernels for about
137 of torch's); on a CPU the reference.
Source: ours. The formulas are DeepSeek-V4.1's.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.ops.finalize_mhc import MAX_STREAMS
from moetail.ops.finalize_norm import check_constants, check_number

_LEAST_EPS, _MOST_ITERATIONS = 1e-30, 1000


def mhc_mixes(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    rms_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 (pre [T, hc], post [T, hc], comb [T, hc source, hc target]), parts of one tensor.

    Shape:
        streams  [T, hc, H]            bf16, 1 <= hc <= 8; a token's streams contiguous, any token stride
        fn       [hc*(hc+2), hc*H]     fp32, contiguous; rows: pre (hc), post (hc), comb (hc*hc, source major)
        base     [hc*(hc+2)]           fp32, contiguous
        scale    [3]                   fp32, contiguous: of pre, post and comb

    1e-30 <= rms_eps and hc_eps <= 1; 1 <= iterations <= 1000, the softmax is half of the first. T == 0 launches
    nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched.
    """
    check_constants({"streams": streams, "fn": fn, "base": base, "scale": scale}, {})
    check_number("rms_eps", rms_eps)
    check_number("hc_eps", hc_eps)
    if not isinstance(iterations, int):
        raise ValueError(f"iterations must be an int, got {iterations!r}")
    packed = _op(streams, fn, base, scale, float(rms_eps), float(hc_eps), iterations)
    hc = streams.shape[1]
    return packed[:, :hc], packed[:, hc : 2 * hc], packed[:, 2 * hc :].unflatten(1, (hc, hc))


def _cpu(streams, fn, base, scale, rms_eps, hc_eps, iterations):  # noqa: ANN001, ANN202
    out = _fake(streams, fn, base, scale, rms_eps, hc_eps, iterations)
    parts = reference.mhc_mixes(streams, fn, base, scale, rms_eps=rms_eps, hc_eps=hc_eps, iterations=iterations)
    return torch.cat([part.flatten(1) for part in parts], dim=1, out=out)


def _cuda(streams, fn, base, scale, rms_eps, hc_eps, iterations):  # noqa: ANN001, ANN202
    from moetail.ops import mhc_mixes_triton

    out = _fake(streams, fn, base, scale, rms_eps, hc_eps, iterations)
    if streams.shape[0] > 0:
        mhc_mixes_triton.launch(streams, fn, base, scale, rms_eps, hc_eps, iterations, out)
    return out


def _fake(streams, fn, base, scale, rms_eps, hc_eps, iterations):  # noqa: ANN001, ANN202
    if streams.dim() != 3:
        raise ValueError(f"streams must have three dimensions [T, hc, H], got shape {tuple(streams.shape)}")
    T, hc, H = streams.shape
    rows = hc * (hc + 2)
    if not 1 <= hc <= MAX_STREAMS:
        raise ValueError(f"streams must have 1 <= hc <= {MAX_STREAMS} streams, got {hc}")
    if streams.dtype != torch.bfloat16:
        raise ValueError(f"streams must be bfloat16, got {streams.dtype}")
    if T > 0 and not streams[0].is_contiguous():
        raise ValueError(f"streams must be contiguous within a token, got strides {streams.stride()}")
    for name, tensor, shape in (("fn", fn, (rows, hc * H)), ("base", base, (rows,)), ("scale", scale, (3,))):
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != streams.device:
            raise ValueError(f"{name} must be on the device of streams, {streams.device}, got {tensor.device}")
    for name, eps in (("rms_eps", rms_eps), ("hc_eps", hc_eps)):
        if not _LEAST_EPS <= eps <= 1:
            raise ValueError(f"{name} must be between {_LEAST_EPS} and 1, got {eps!r}")
    if not 1 <= iterations <= _MOST_ITERATIONS:
        raise ValueError(f"iterations must be from 1 to {_MOST_ITERATIONS}, got {iterations}")
    return fn.new_empty(T, rows)


torch.library.define(
    "moetail::mhc_mixes",
    "(Tensor streams, Tensor fn, Tensor base, Tensor scale, float rms_eps, float hc_eps, int iterations) -> Tensor",
)
torch.library.impl("moetail::mhc_mixes", "CPU")(_cpu)
torch.library.impl("moetail::mhc_mixes", "CUDA")(_cuda)
torch.library.register_fake("moetail::mhc_mixes")(_fake)
_op = torch.ops.moetail.mhc_mixes.default
