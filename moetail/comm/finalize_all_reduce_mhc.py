"""finalize_all_reduce_mhc: from expert rows to residual streams and the next input on every tensor-parallel rank.

    y_r      = finalize(rows, row_map, weights, shared, ..)              each rank's own, rounded to the rows' dtype
    y        = y_0 + y_1 + .. + y_(W-1)                                  in fp32, in rank order, rounded once
    S'[t,j]  = post_mix[t,j] * y[t] + sum_i res_mix[t,i,j] * S[t,i]      post first, then i ascending, rounded
    c[t]     = sum_i pre_mix[t,i] * S'[t,i]                              of the rounded S', i ascending, rounded
    h        = rms_norm(c, norm_weight)                                  of the rounded c, rounded
    quant_out = quantize(h)                                              where it is given, of the rounded h

Only y crosses the link; what follows runs on every rank on the rows that arrived. `moetail/ops/finalize_mhc.py`
documents the streams and the mixes. The definition is `moetail.reference.finalize_all_reduce_mhc`: the same bits at
every T and on every rank. Implementations as `all_reduce_mhc.py`'s.
"""

from __future__ import annotations

import torch

from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.all_reduce_mhc import alone, epilogue
from moetail.comm.all_reduce_norm import OUTPUTS
from moetail.comm.workspace import Kind, Workspace
from moetail.numerics import Numerics
from moetail.ops import finalize as local
from moetail.ops import finalize_mhc as local_mhc
from moetail.ops import quant_out as quantized
from moetail.ops.finalize_norm import check_number
from moetail.quantization import Quantized


def finalize_all_reduce_mhc(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
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
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finalize this rank's rows, add every rank's result, and mix, collapse and norm: (h [T, H], residual' [T, hc, H]).

    Shape: `moetail.finalize_mhc`'s; the rows' dtype, device and H are the workspace's, and T <= its max_tokens. The
    streams and the mixes are the same on every rank. `out` may be `shared`, `residual_out` may be `residual`. After a
    fault the scales of `quant_out` are NaN (0xFF in E8M0).

    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. A workspace of one
    rank makes this `moetail.finalize_mhc`. No gradients.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("rows", rows, True), ("row_map", row_map, True), ("weights", weights, False),
                        ("shared", shared, False), ("shared_gate", shared_gate, False), ("residual", residual, True),
                        ("num_valid_rows", num_valid_rows, False), ("post_mix", post_mix, True),
                        ("res_mix", res_mix, True), ("pre_mix", pre_mix, True), ("norm_weight", norm_weight, True),
                        ("residual_out", residual_out, False), ("out", out, False))  # fmt: skip
    local._check_rank(rows, row_map)
    check_workspace(workspace, "rows", rows, row_map.shape[0])
    w = workspace
    if w.world_size == 1:
        return local_mhc.finalize_mhc(
            rows, row_map, weights, shared, residual=residual, post_mix=post_mix, res_mix=res_mix, pre_mix=pre_mix,
            norm_weight=norm_weight, eps=eps, residual_out=residual_out, out=out, quant_out=quant_out,
            shared_gate=shared_gate, routed_scale=routed_scale, num_valid_rows=num_valid_rows, numerics=numerics,
        )  # fmt: skip
    local.check_settings(numerics, routed_scale)
    check_number("eps", eps)
    refuse_gradients(rows, weights, shared, shared_gate, residual, post_mix, res_mix, pre_mix, norm_weight,
                     residual_out, out)  # fmt: skip
    out = local._new_out(rows, row_map) if out is None else out
    residual_out = local_mhc.new_residual(residual) if residual_out is None else residual_out
    _op(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, residual, post_mix,
        res_mix, pre_mix, norm_weight, float(eps), w.control, w.group_name, w.rank, w.world_size, w.max_tokens,
        w.one_gpu, out, residual_out, *quantized.schema_args(quant_out))  # fmt: skip
    return out, residual_out


def _checked(*args):  # noqa: ANN002, ANN202
    """finalize's arguments, the streams', the workspace's and the outputs; checked, overlap too."""
    own = (*args[:14], *args[20:])
    local_mhc._check(*own)
    local_mhc._check_no_overlap(*own)
    return args[:8], args[8:14], args[14:20], args[20:]


def _cpu(*args):  # noqa: ANN002, ANN202
    inputs, mhc, (control, group, rank, world_size, _, _), outputs = _checked(*args)
    partial = local._op(*inputs)
    total = torch.empty_like(partial)
    all_reduce_cpu.launch(partial, Kind.FINALIZE_ALL_REDUCE_MHC, control, group, rank, world_size, total)
    alone(total, *mhc, *outputs)


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.comm import finalize_all_reduce_triton as kernel

    (*inputs, numerics), mhc, (control, _, *place), (out, *others) = _checked(*args)
    concrete = local._concrete(numerics, *inputs[:3])
    kernel.launch(*inputs, concrete, control, kernel.Place(*place), out, epilogue(*mhc, *others))


def _fake(*args):  # noqa: ANN002, ANN202
    local_mhc._check(*args[:14], *args[20:])


torch.library.define(
    "moetail::finalize_all_reduce_mhc", f"({local._ARGS}, {local_mhc.MHC_ARGS}, {WORKSPACE_ARGS}, {OUTPUTS}) -> ()"
)
torch.library.impl("moetail::finalize_all_reduce_mhc", "CPU")(_cpu)
torch.library.impl("moetail::finalize_all_reduce_mhc", "CUDA")(_cuda)
torch.library.register_fake("moetail::finalize_all_reduce_mhc")(_fake)
_op = torch.ops.moetail.finalize_all_reduce_mhc.default
