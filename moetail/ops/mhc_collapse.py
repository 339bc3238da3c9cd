"""mhc_collapse: the next input from residual streams that are finished already (hyper-connections).

    c[t]  = sum_i pre_mix[t,i] * S[t,i]        i ascending, rounded
    h     = rms_norm(c, norm_weight)           of the rounded c, rounded

The end of `moetail.mhc` alone, for where something else changed the streams: the first layer, an Engram, a pipeline
stage. `finalize_mhc.py` documents the streams. The definition is `moetail.reference.mhc_collapse`: the same bits from
every implementation at every T, and those of `moetail.mhc` on the same streams.
Implementations, chosen by the dispatcher from the tensors' device: `mhc_collapse_triton.py` (CUDA, one kernel); on a
CPU the reference.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.ops import finalize as local
from moetail.ops.finalize_mhc import MAX_STREAMS
from moetail.ops.finalize_norm import check_constants, check_number, check_weights


def mhc_collapse(
    residual: torch.Tensor, *, pre_mix: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:  # fmt: skip
    """Collapse the streams and norm: h [T, H] in their dtype.

    Shape:
        residual     [T, hc, H]  bf16 | fp16 | fp32, 1 <= hc <= 8, H <= 16384; inner stride 1, any other strides
        pre_mix      [T, hc]     fp32: what h takes of each stream; inner stride 1
        norm_weight  [H]         bf16 | fp16 | fp32, contiguous

    1e-20 <= eps <= 1. T == 0 launches nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched.
    """
    check_constants({"residual": residual, "pre_mix": pre_mix, "norm_weight": norm_weight}, {})
    check_number("eps", eps)
    return _op(residual, pre_mix, norm_weight, float(eps))


def _cpu(residual, pre_mix, norm_weight, eps):  # noqa: ANN001, ANN202
    _fake(residual, pre_mix, norm_weight, eps)
    return reference.mhc_collapse(residual, pre_mix=pre_mix, norm_weight=norm_weight, eps=eps)


def _cuda(residual, pre_mix, norm_weight, eps):  # noqa: ANN001, ANN202
    from moetail.ops import mhc_collapse_triton

    out = _fake(residual, pre_mix, norm_weight, eps)
    if residual.shape[0] > 0:
        mhc_collapse_triton.launch(residual, pre_mix, norm_weight, eps, out)
    return out


def _fake(residual, pre_mix, norm_weight, eps):  # noqa: ANN001, ANN202
    if residual.dim() != 3:
        raise ValueError(f"residual must have three dimensions [T, hc, H], got shape {tuple(residual.shape)}")
    T, hc, H = residual.shape
    if not 1 <= hc <= MAX_STREAMS:
        raise ValueError(f"residual must have 1 <= hc <= {MAX_STREAMS} streams, got {hc}")
    if residual.dtype not in local._FLOATS:
        raise ValueError(f"residual must be float32, bfloat16 or float16, got {residual.dtype}")
    if H > 1 and residual.stride(2) != 1:
        raise ValueError(f"residual must have inner stride 1, got strides {residual.stride()}")
    check_weights("residual", residual[:, 0], eps, ("norm_weight", norm_weight))
    if pre_mix.shape != (T, hc):
        raise ValueError(f"pre_mix must have shape {(T, hc)}, got {tuple(pre_mix.shape)}")
    if pre_mix.dtype != torch.float32:
        raise ValueError(f"pre_mix must be float32, got {pre_mix.dtype}")
    if hc > 1 and pre_mix.stride(1) != 1:
        raise ValueError(f"pre_mix must have inner stride 1, got strides {pre_mix.stride()}")
    if pre_mix.device != residual.device:
        raise ValueError(f"pre_mix must be on the device of residual, {residual.device}, got {pre_mix.device}")
    return residual.new_empty(T, H)


torch.library.define(
    "moetail::mhc_collapse", "(Tensor residual, Tensor pre_mix, Tensor norm_weight, float eps) -> Tensor"
)
torch.library.impl("moetail::mhc_collapse", "CPU")(_cpu)
torch.library.impl("moetail::mhc_collapse", "CUDA")(_cuda)
torch.library.register_fake("moetail::mhc_collapse")(_fake)
_op = torch.ops.moetail.mhc_collapse.default
