"""finalize_all_reduce_norm: from expert rows to the next layer's input on every tensor-parallel rank, in one pass.

    y_r       = finalize(rows, row_map, weights, shared, ..)    each rank's own, rounded to the rows' dtype
    y         = y_0 + y_1 + .. + y_(W-1)                        in fp32, in rank order, rounded once
    y         = rms_norm(y, post_norm_weight)                   where it is given (the sandwich), rounded
    residual' = residual + y                                    in fp32, rounded
    h         = rms_norm(residual', norm_weight)                of the rounded residual', rounded
    quant_out = quantize(h)                                     where it is given, of the rounded h

Only y crosses the link; what follows runs on every rank on the rows that arrived. The definition is
`moetail.reference.finalize_all_reduce_norm`: the norm of the sum, never the sum of norms; the same bits at every T and
on every rank. Implementations as `all_reduce_norm.py`'s.
"""

from __future__ import annotations

import torch

from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.all_reduce_norm import NORM_ARGS, OUTPUTS, alone, epilogue
from moetail.comm.workspace import Kind, Workspace
from moetail.numerics import Numerics
from moetail.ops import finalize as local
from moetail.ops import finalize_norm as local_norm
from moetail.ops import quant_out as quantized
from moetail.quantization import Quantized


def finalize_all_reduce_norm(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
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
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finalize this rank's rows, add every rank's result and the residual, and norm: (h, residual'), [T, H] each.

    Shape: `moetail.finalize_norm`'s; the rows' dtype, device and H are the workspace's, and T <= its max_tokens. The
    residual is the same on every rank. `out` may be `shared`, `residual_out` may be `residual`. After a fault the
    scales of `quant_out` are NaN (0xFF in E8M0).

    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. A workspace of one
    rank makes this `moetail.finalize_norm`. No gradients.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("rows", rows, True), ("row_map", row_map, True), ("weights", weights, False),
                        ("shared", shared, False), ("shared_gate", shared_gate, False), ("residual", residual, True),
                        ("num_valid_rows", num_valid_rows, False), ("norm_weight", norm_weight, True),
                        ("post_norm_weight", post_norm_weight, False), ("residual_out", residual_out, False),
                        ("out", out, False))  # fmt: skip
    local._check_rank(rows, row_map)
    check_workspace(workspace, "rows", rows, row_map.shape[0])
    w = workspace
    if w.world_size == 1:
        return local_norm.finalize_norm(
            rows, row_map, weights, shared, residual=residual, norm_weight=norm_weight, eps=eps,
            post_norm_weight=post_norm_weight, zero_centred=zero_centred, residual_out=residual_out, out=out,
            quant_out=quant_out, shared_gate=shared_gate, routed_scale=routed_scale, num_valid_rows=num_valid_rows,
            numerics=numerics,
        )  # fmt: skip
    local.check_settings(numerics, routed_scale)
    refuse_gradients(rows, weights, shared, shared_gate, residual, norm_weight, post_norm_weight, residual_out, out)
    out = local._new_out(rows, row_map) if out is None else out
    residual_out = local._new_out(rows, row_map) if residual_out is None else residual_out
    _op(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, residual, norm_weight,
        float(eps), post_norm_weight, zero_centred, w.control, w.group_name, w.rank, w.world_size, w.max_tokens,
        w.one_gpu, out, residual_out, *quantized.schema_args(quant_out))  # fmt: skip
    return out, residual_out


def _checked(*args):  # noqa: ANN002, ANN202
    """finalize's arguments, the norm's, the workspace's and the outputs; checked, overlap too."""
    own = (*args[:13], *args[19:])
    local_norm._check(*own)
    local_norm._check_no_overlap(*own)
    return args[:8], args[8:13], args[13:19], args[19:]


def _cpu(*args):  # noqa: ANN002, ANN202
    inputs, norm, (control, group, rank, world_size, _, _), outputs = _checked(*args)
    partial = local._op(*inputs)
    total = torch.empty_like(partial)
    all_reduce_cpu.launch(partial, Kind.FINALIZE_ALL_REDUCE_NORM, control, group, rank, world_size, total)
    alone(total, *norm, *outputs)


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.comm import finalize_all_reduce_triton as kernel

    (*inputs, numerics), norm, (control, _, *place), (out, *others) = _checked(*args)
    concrete = local._concrete(numerics, *inputs[:3])
    kernel.launch(*inputs, concrete, control, kernel.Place(*place), out, epilogue(*norm, *others))


def _fake(*args):  # noqa: ANN002, ANN202
    local_norm._check(*args[:13], *args[19:])


torch.library.define(
    "moetail::finalize_all_reduce_norm", f"({local._ARGS}, {NORM_ARGS}, {WORKSPACE_ARGS}, {OUTPUTS}) -> ()"
)
torch.library.impl("moetail::finalize_all_reduce_norm", "CPU")(_cpu)
torch.library.impl("moetail::finalize_all_reduce_norm", "CUDA")(_cuda)
torch.library.register_fake("moetail::finalize_all_reduce_norm")(_fake)
_op = torch.ops.moetail.finalize_all_reduce_norm.default
