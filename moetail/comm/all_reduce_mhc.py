"""all_reduce_mhc: the sum over ranks of a finished hidden state, taken up by the residual streams, and the next input.

    y        = x_0 + x_1 + .. + x_(W-1)                                  in fp32, in rank order, rounded once
    S'[t,j]  = post_mix[t,j] * y[t] + sum_i res_mix[t,i,j] * S[t,i]      post first, then i ascending, rounded
    c[t]     = sum_i pre_mix[t,i] * S'[t,i]                              of the rounded S', i ascending, rounded
    h        = rms_norm(c, norm_weight)                                  of the rounded c, rounded
    quant_out = quantize(h)                                              where it is given, of the rounded h

What attention's output needs at its boundary. `moetail/ops/finalize_mhc.py` documents the streams and the mixes. The
definition is `moetail.reference.all_reduce_mhc`: the same bits at every T and on every rank.
Implementations, chosen by the dispatcher from the tensors' device: `finalize_all_reduce_triton.py` (CUDA, one kernel);
on a CPU `all_reduce_cpu.py` (gloo) and then the reference.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.all_reduce_norm import OUTPUTS
from moetail.comm.workspace import Kind, Workspace
from moetail.ops import finalize as local
from moetail.ops import quant_out as quantized
from moetail.ops.finalize_mhc import MHC_ARGS, check_mhc, check_residual_out, new_residual
from moetail.ops.finalize_norm import check_number
from moetail.quantization import Quantized


def all_reduce_mhc(
    x: torch.Tensor,
    *,
    workspace: Workspace,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    res_mix: torch.Tensor,
    pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    quant_out: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add every rank's `x`, mix it into the residual streams, collapse and norm: (h [T, H], residual' [T, hc, H]).

    Shape: `moetail.finalize_mhc`'s, the same values on every rank, with
        x             [T, H]      bf16 | fp16, the workspace's dtype, H its hidden size (<= 16384), T <= its max_tokens
        residual      [T, hc, H]  x's dtype
        out           [T, H]      where h is written: x's dtype, inner stride 1. May be `x` itself
        residual_out  [T, hc, H]  where residual' is written. May be `residual` itself; no other overlap
        quant_out                 `moetail.all_reduce_norm`'s: where h quantized is written too

    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. No gradients.
    A workspace of one rank has nothing to fuse with: the definition runs, as several kernels.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("x", x, True), ("residual", residual, True), ("post_mix", post_mix, True),
                        ("res_mix", res_mix, True), ("pre_mix", pre_mix, True), ("norm_weight", norm_weight, True),
                        ("residual_out", residual_out, False), ("out", out, False))  # fmt: skip
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions [T, H], got shape {tuple(x.shape)}")
    check_number("eps", eps)
    check_workspace(workspace, "x", x, x.shape[0])
    refuse_gradients(x, residual, post_mix, res_mix, pre_mix, norm_weight, residual_out, out)
    out = x.new_empty(x.shape) if out is None else out
    residual_out = new_residual(residual) if residual_out is None else residual_out
    w = workspace
    mhc = (residual, post_mix, res_mix, pre_mix, norm_weight, float(eps))
    outputs = (out, residual_out, *quantized.schema_args(quant_out))
    if w.world_size == 1:
        _check(x, *mhc, *outputs)
        alone(x, *mhc, *outputs)
    else:
        _op(x, *mhc, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu, *outputs)
    return out, residual_out


def alone(y, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out, *quant):  # noqa: ANN001, ANN002, ANN201
    """What follows a finished sum y, by its definition."""
    h, new = reference.all_reduce_mhc(
        [y], residual=residual, post_mix=post_mix, res_mix=res_mix, pre_mix=pre_mix, norm_weight=norm_weight, eps=eps
    )
    out.copy_(h)
    residual_out.copy_(new)
    quantized.write(h, *quant)


def _check(x, residual, post_mix, res_mix, pre_mix, norm_weight, eps, out, residual_out, quant, values, scales):  # noqa: ANN001, ANN202
    local._check_rows_like("x", x, x, x.shape[0])
    local._check_rows_like("out", out, x, x.shape[0])
    if out.device != x.device:
        raise ValueError(f"out must be on x's device {x.device}, got {out.device}")
    check_mhc("x", x, x.shape[0], residual, post_mix, res_mix, pre_mix, norm_weight, eps, residual_out)
    read = (("post_mix", post_mix), ("res_mix", res_mix), ("pre_mix", pre_mix), ("norm_weight", norm_weight))
    local._check_no_overlap(out, x, (*read, ("residual", residual), ("residual_out", residual_out)), ("out", "x"))
    check_residual_out(residual_out, residual, (*read, ("x", x)))
    quantized.check(x, x.shape[0], quant, values, scales)
    written = (("out", out), ("residual_out", residual_out))
    quantized.check_no_overlap(values, scales, (*read, *written, ("x", x), ("residual", residual)))


def _cpu(*args):  # noqa: ANN002, ANN202
    (x, *mhc), (control, group, rank, world_size, _, _), outputs = args[:7], args[7:13], args[13:]
    _check(x, *mhc, *outputs)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    all_reduce_cpu.launch(x, Kind.ALL_REDUCE_MHC, control, group, rank, world_size, total)
    alone(total, *mhc, *outputs)


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.comm import finalize_all_reduce_triton as kernel

    (x, *mhc), (control, _, *place), outputs = args[:7], args[7:13], args[13:]
    _check(x, *mhc, *outputs)
    kernel.launch_all_reduce(x, control, kernel.Place(*place), outputs[0], epilogue(*mhc, *outputs[1:]))


def epilogue(residual, post_mix, res_mix, pre_mix, norm_weight, eps, residual_out, quant, values, scales):  # noqa: ANN001, ANN201
    """What follows a sum on a GPU."""
    from moetail.comm.finalize_all_reduce_triton import Epilogue

    mixes = {"post_mix": post_mix, "res_mix": res_mix, "pre_mix": pre_mix}
    return Epilogue("mhc", residual, residual_out, norm_weight, eps, **mixes, quant=quant, values=values, scales=scales)


def _fake(*args):  # noqa: ANN002, ANN202
    x, *mhc = args[:7]
    _, residual_out, *quant = args[13:]
    local._check_rows_like("x", x, x, x.shape[0])
    check_mhc("x", x, x.shape[0], *mhc, residual_out)
    quantized.check(x, x.shape[0], *quant)


torch.library.define(
    "moetail::all_reduce_mhc",
    f"(Tensor x, {MHC_ARGS}, {WORKSPACE_ARGS}, {OUTPUTS}) -> ()",
)
torch.library.impl("moetail::all_reduce_mhc", "CPU")(_cpu)
torch.library.impl("moetail::all_reduce_mhc", "CUDA")(_cuda)
torch.library.register_fake("moetail::all_reduce_mhc")(_fake)
_op = torch.ops.moetail.all_reduce_mhc.default
