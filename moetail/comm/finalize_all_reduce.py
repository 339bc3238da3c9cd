"""finalize_all_reduce: from expert rows to the hidden state that every tensor-parallel rank holds, in one pass.

    y_r = finalize(rows, row_map, weights, shared, ..)      each rank's own, rounded to the rows' dtype
    y   = y_0 + y_1 + .. + y_(W-1)                          in fp32, in rank order, rounded once

The definition is `moetail.reference.finalize_all_reduce`: the same bits at every T and on every rank; at two ranks they
are NCCL's. Implementations, chosen by the dispatcher from the tensors' device: `finalize_all_reduce_triton.py` (CUDA,
one kernel), on a CPU finalize and then `all_reduce_cpu.py` (gloo).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.workspace import Kind, Workspace
from moetail.numerics import Numerics
from moetail.ops import finalize as local


def finalize_all_reduce(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    workspace: Workspace,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Finalize this rank's expert rows and add every rank's result: [T, H] in the rows' dtype.

    Shape: `moetail.finalize`'s; the rows' dtype, device and H are the workspace's, and T <= its max_tokens.
        out  [T, H]  the rows' dtype; inner stride 1, row stride >= H. May be `shared` itself; must not overlap any
                     other argument

    `shared` is this rank's part of the shared experts' output, as `rows` is its part of the routed experts'.
    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. A workspace of one
    rank makes this `moetail.finalize`, gradients included; with more there are none.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("rows", rows, True), ("row_map", row_map, True), ("weights", weights, False),
                        ("shared", shared, False), ("shared_gate", shared_gate, False),
                        ("num_valid_rows", num_valid_rows, False), ("out", out, False))  # fmt: skip
    local._check_rank(rows, row_map)
    check_workspace(workspace, "rows", rows, row_map.shape[0])
    w = workspace
    if w.world_size == 1:
        return local.finalize(
            rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
            num_valid_rows=num_valid_rows, numerics=numerics, out=out,
        )  # fmt: skip
    local.check_settings(numerics, routed_scale)
    refuse_gradients(rows, weights, shared, shared_gate, out)
    args = (rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec,
            w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu)  # fmt: skip
    if out is None:
        return _op(*args)
    _op_out(*args, out)
    return out


def _cpu_into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics,  # noqa: ANN001, ANN202
              control, group, rank, world_size, max_tokens, one_gpu, out):  # fmt: skip # noqa: ANN001
    partial = local._op(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics)
    all_reduce_cpu.launch(partial, Kind.FINALIZE_ALL_REDUCE, control, group, rank, world_size, out)


def _cuda_into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics,  # noqa: ANN001, ANN202
               control, group, rank, world_size, max_tokens, one_gpu, out):  # fmt: skip # noqa: ANN001
    from moetail.comm import finalize_all_reduce_triton

    concrete = local._concrete(numerics, rows, row_map, weights)
    place = finalize_all_reduce_triton.Place(rank, world_size, max_tokens, one_gpu)
    finalize_all_reduce_triton.launch(
        rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, concrete, control, place, out
    )


def _functional(into: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """The op that returns a new tensor, on one device."""

    def finalize_all_reduce(*args):  # noqa: ANN002, ANN202
        out = _fake(*args)
        into(*args, out)
        return out

    return finalize_all_reduce


def _out_variant(into: Callable[..., None]) -> Callable[..., None]:
    """The op that writes the caller's tensor, on one device."""

    def finalize_all_reduce_out(*args):  # noqa: ANN002, ANN202
        _fake_out(*args)
        rows, row_map, weights, shared, shared_gate, num_valid_rows, *_, out = args
        inputs = local._inputs(rows, row_map, weights, shared_gate, num_valid_rows)
        local._check_no_overlap(out, shared, inputs)
        into(*args)

    return finalize_all_reduce_out


def _fake(*args):  # noqa: ANN002, ANN202
    rows, row_map, *_ = args
    local._check_rank(rows, row_map)
    out = local._new_out(rows, row_map)
    _fake_out(*args, out)
    return out


def _fake_out(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, *workspace_and_out):  # noqa: ANN001, ANN002, ANN202
    local._check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, workspace_and_out[-1])


_ARGS = f"{local._ARGS}, {WORKSPACE_ARGS}"
torch.library.define("moetail::finalize_all_reduce", f"({_ARGS}) -> Tensor")
torch.library.define("moetail::finalize_all_reduce_out", f"({_ARGS}, Tensor(b!) out) -> ()")
for _device, _into in (("CPU", _cpu_into), ("CUDA", _cuda_into)):
    torch.library.impl("moetail::finalize_all_reduce", _device)(_functional(_into))
    torch.library.impl("moetail::finalize_all_reduce_out", _device)(_out_variant(_into))
torch.library.register_fake("moetail::finalize_all_reduce")(_fake)
torch.library.register_fake("moetail::finalize_all_reduce_out")(_fake_out)
_op = torch.ops.moetail.finalize_all_reduce.default
_op_out = torch.ops.moetail.finalize_all_reduce_out.default
