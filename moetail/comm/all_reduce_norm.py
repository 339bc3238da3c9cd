"""all_reduce_norm: the sum over ranks of a finished hidden state, the residual add and the next layer's norm.

    y         = x_0 + x_1 + .. + x_(W-1)          in fp32, in rank order, rounded once
    y         = rms_norm(y, post_norm_weight)     where it is given (the sandwich), rounded
    residual' = residual + y                      in fp32, rounded
    h         = rms_norm(residual', norm_weight)  of the rounded residual', rounded
    quant_out = quantize(h)                       where it is given, of the rounded h

What attention's output needs at its boundary. The definition is `moetail.reference.all_reduce_norm`: the norm of the
sum, never the sum of norms; the same bits at every T and on every rank.
Implementations, chosen by the dispatcher from the tensors' device: `finalize_all_reduce_triton.py` (CUDA, one kernel);
on a CPU `all_reduce_cpu.py` (gloo) and then the reference.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.workspace import Kind, Workspace
from moetail.ops import finalize as local
from moetail.ops import quant_out as quantized
from moetail.ops.finalize_norm import check_norm, check_number
from moetail.quantization import Quantized


def all_reduce_norm(
    x: torch.Tensor,
    *,
    workspace: Workspace,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    post_norm_weight: torch.Tensor | None = None,
    zero_centred: bool = False,
    residual_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    quant_out: Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add every rank's `x`, then the residual, and norm: (h, residual'), each [T, H] in x's dtype.

    Shape:
        x                 [T, H]  bf16 | fp16, the workspace's dtype, H its hidden size (<= 16384), T <= its max_tokens
        residual          [T, H]  x's dtype; inner stride 1, any row stride; the same on every rank
        norm_weight       [H]     bf16 | fp16 | fp32, contiguous, as post_norm_weight
        out               [T, H]  where h is written: x's dtype, inner stride 1. May be `x` itself
        residual_out      [T, H]  where residual' is written. May be `residual` itself; no other overlap
        quant_out                 a `moetail.Quantized` of [T, H], which overlaps no argument: where h quantized is
                                  written too. After a fault its scales are NaN (0xFF in E8M0)

    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. No gradients.
    A workspace of one rank has nothing to fuse with: the definition runs, as several kernels.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("x", x, True), ("residual", residual, True), ("norm_weight", norm_weight, True),
                        ("post_norm_weight", post_norm_weight, False), ("residual_out", residual_out, False),
                        ("out", out, False))  # fmt: skip
    check_number("eps", eps)
    if not isinstance(zero_centred, bool):
        raise ValueError(f"zero_centred must be True or False, got {zero_centred!r}")
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions [T, H], got shape {tuple(x.shape)}")
    check_workspace(workspace, "x", x, x.shape[0])
    refuse_gradients(x, residual, norm_weight, post_norm_weight, residual_out, out)
    out = x.new_empty(x.shape) if out is None else out
    residual_out = x.new_empty(x.shape) if residual_out is None else residual_out
    w = workspace
    args = (x, residual, norm_weight, float(eps), post_norm_weight, zero_centred)
    outputs = (out, residual_out, *quantized.schema_args(quant_out))
    if w.world_size == 1:
        _check(*args, *outputs)
        alone(x, *args[1:], *outputs)
    else:
        _op(*args, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu, *outputs)
    return out, residual_out


def alone(x, residual, norm_weight, eps, post_norm_weight, zero_centred, out, residual_out, *quant):  # noqa: ANN001, ANN002, ANN201
    """The norm behind a finished sum, by its definition."""
    h, new = reference.all_reduce_norm(
        [x], residual=residual, norm_weight=norm_weight, eps=eps, post_norm_weight=post_norm_weight,
        zero_centred=zero_centred,
    )  # fmt: skip
    out.copy_(h)
    residual_out.copy_(new)
    quantized.write(h, *quant)


def _check(x, residual, norm_weight, eps, post_norm_weight, zero_centred, out, residual_out, quant, values, scales):  # noqa: ANN001, ANN202
    local._check_rows_like("x", x, x, x.shape[0])
    local._check_rows_like("out", out, x, x.shape[0])
    if out.device != x.device:
        raise ValueError(f"out must be on x's device {x.device}, got {out.device}")
    check_norm("x", x, x.shape[0], residual, norm_weight, eps, post_norm_weight, residual_out)
    weights = (("norm_weight", norm_weight), ("post_norm_weight", post_norm_weight))
    local._check_no_overlap(out, x, (*weights, ("residual", residual), ("residual_out", residual_out)))
    local._check_no_overlap(residual_out, residual, (*weights, ("x", x)), ("residual_out", "residual"))
    quantized.check(x, x.shape[0], quant, values, scales)
    written = (("out", out), ("residual_out", residual_out))
    quantized.check_no_overlap(values, scales, (*weights, *written, ("x", x), ("residual", residual)))


def _cpu(*args):  # noqa: ANN002, ANN202
    (x, *norm), (control, group, rank, world_size, _, _), outputs = args[:6], args[6:12], args[12:]
    _check(x, *norm, *outputs)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    all_reduce_cpu.launch(x, Kind.ALL_REDUCE_NORM, control, group, rank, world_size, total)
    alone(total, *norm, *outputs)


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.comm import finalize_all_reduce_triton as kernel

    (x, *norm), (control, _, *place), outputs = args[:6], args[6:12], args[12:]
    _check(x, *norm, *outputs)
    kernel.launch_all_reduce(x, control, kernel.Place(*place), outputs[0], epilogue(*norm, *outputs[1:]))


def epilogue(residual, norm_weight, eps, post_norm_weight, zero_centred, residual_out, quant, values, scales):  # noqa: ANN001, ANN201
    """What follows a sum on a GPU."""
    from moetail.comm.finalize_all_reduce_triton import Epilogue

    return Epilogue("norm", residual, residual_out, norm_weight, eps, post_norm_weight, zero_centred, quant=quant,
                    values=values, scales=scales)  # fmt: skip


def _fake(x, residual, norm_weight, eps, post_norm_weight, zero_centred, *rest):  # noqa: ANN001, ANN002, ANN202
    _, residual_out, *quant = rest[6:]
    local._check_rows_like("x", x, x, x.shape[0])
    check_norm("x", x, x.shape[0], residual, norm_weight, eps, post_norm_weight, residual_out)
    quantized.check(x, x.shape[0], *quant)


OUTPUTS = f"Tensor(b!) out, Tensor(c!) residual_out, {quantized.QUANT_ARGS}"
NORM_ARGS = "Tensor residual, Tensor norm_weight, float eps, Tensor? post_norm_weight, bool zero_centred"
torch.library.define(
    "moetail::all_reduce_norm",
    f"(Tensor x, {NORM_ARGS}, {WORKSPACE_ARGS}, {OUTPUTS}) -> ()",
)
torch.library.impl("moetail::all_reduce_norm", "CPU")(_cpu)
torch.library.impl("moetail::all_reduce_norm", "CUDA")(_cuda)
torch.library.register_fake("moetail::all_reduce_norm")(_fake)
_op = torch.ops.moetail.all_reduce_norm.default
