"""mhc: a finished hidden state taken up by the residual streams (hyper-connections), and the next input.

    S'[t,j]  = post_mix[t,j] * y[t] + sum_i res_mix[t,i,j] * S[t,i]            post first, then i ascending, rounded
    c[t]     = sum_i pre_mix[t,i] * S'[t,i]                                    of the rounded S', i ascending, rounded
    h        = rms_norm(c, norm_weight)                                        of the rounded c, rounded

What follows a finalize, an add and an all-reduce that are separate kernels; `finalize_mhc.py` documents the streams and
the mixes. The definition is `moetail.reference.mhc`: the same bits from every implementation at every T.
Implementations, chosen by the dispatcher from the tensors' device: `mhc_triton.py` (CUDA, one kernel); on a CPU the
reference.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.ops import finalize as local
from moetail.ops.finalize_mhc import MHC_ARGS, check_mhc, check_residual_out, new_residual
from moetail.ops.finalize_norm import check_constants, check_number


def mhc(
    y: torch.Tensor,
    *,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix `y` into the residual streams, collapse and norm: (h [T, H], residual' [T, hc, H]).

    Shape: `moetail.finalize_mhc`'s, with
        y             [T, H]      bf16 | fp16 | fp32, H <= 16384; inner stride 1
        residual      [T, hc, H]  y's dtype
        out           [T, H]      where h is written: y's dtype, inner stride 1. May be `y` itself
        residual_out  [T, hc, H]  where residual' is written. May be `residual` itself; no other overlap

    T == 0 returns empty results and launches nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched or written.
    """
    needed = {"y": y, "residual": residual, "post_mix": post_mix, "res_mix": res_mix, "pre_mix": pre_mix,
              "norm_weight": norm_weight}  # fmt: skip
    check_constants(needed, {"residual_out": residual_out, "out": out})
    if y.dim() != 2:
        raise ValueError(f"y must have two dimensions [T, H], got shape {tuple(y.shape)}")
    if y.dtype not in local._FLOATS:
        raise ValueError(f"y must be float32, bfloat16 or float16, got {y.dtype}")
    check_number("eps", eps)
    out = y.new_empty(y.shape) if out is None else out
    residual_out = new_residual(residual) if residual_out is None else residual_out
    _op(y, residual, post_mix, res_mix, pre_mix, norm_weight, float(eps), out, residual_out)
    return out, residual_out


def _cpu(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out):  # noqa: ANN001, ANN202
    _check(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out)
    h, new = reference.mhc(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps)
    out.copy_(h)
    residual_out.copy_(new)


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.ops import mhc_triton

    _check(*args)
    if args[0].shape[0] > 0:
        mhc_triton.launch(*args)


def _check(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out):  # noqa: ANN001, ANN202
    _fake(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out)
    read = (("post_mix", post_mix), ("res_mix", res_mix), ("pre_mix", pre_mix), ("norm_weight", norm_weight))
    local._check_no_overlap(out, y, (*read, ("residual", residual), ("residual_out", residual_out)), ("out", "y"))
    check_residual_out(residual_out, residual, (*read, ("y", y)))


def _fake(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out):  # noqa: ANN001, ANN202
    local._check_rows_like("y", y, y, y.shape[0])
    local._check_rows_like("out", out, y, y.shape[0])
    if out.device != y.device:
        raise ValueError(f"out must be on y's device {y.device}, got {out.device}")
    check_mhc("y", y, y.shape[0], residual, post_mix, res_mix, pre_mix, norm_weight, eps, residual_out)


torch.library.define("moetail::mhc", f"(Tensor y, {MHC_ARGS}, Tensor(a!) out, Tensor(b!) residual_out) -> ()")
torch.library.impl("moetail::mhc", "CPU")(_cpu)
torch.library.impl("moetail::mhc", "CUDA")(_cuda)
torch.library.register_fake("moetail::mhc")(_fake)
_op = torch.ops.moetail.mhc.default
