"""finalize_reduce_scatter: from expert rows to this rank's share of the tokens of the hidden state, in one pass.

    y_r = finalize(rows, row_map, weights, shared, ..)      each rank's own, all T tokens, rounded to the rows' dtype
    y   = y_0 + y_1 + .. + y_(W-1)                          in fp32, in rank order, rounded once
    out = y[rank * T/W : (rank + 1) * T/W]

What sequence parallelism wants behind its experts. The definition is `moetail.reference.finalize_reduce_scatter`: rows
of `finalize_all_reduce`, bit for bit. Implementations, chosen by the dispatcher from the tensors' device:
`two_shot_triton.py` (CUDA, one kernel: the first two of its stages), on a CPU finalize and then `all_reduce_cpu.py`
(gloo: every rank gets the whole sum and keeps its share).
"""

from __future__ import annotations

import torch

from moetail.comm import all_reduce_cpu
from moetail.comm.all_reduce import WORKSPACE_ARGS, check_workspace, refuse_gradients
from moetail.comm.workspace import Kind, Workspace
from moetail.numerics import Numerics
from moetail.ops import finalize as local


def finalize_reduce_scatter(
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
) -> torch.Tensor:
    """Finalize this rank's expert rows, add every rank's result, and keep this rank's share of the tokens.

    Shape: `moetail.finalize`'s; the rows' dtype, device and H are the workspace's, T <= its max_tokens and divisible by
    its world size W. Returns a new [T / W, H] in the rows' dtype.

    `shared` is this rank's part of the shared experts' output of all T tokens, as `rows` is of the routed experts'.
    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. A workspace of one
    rank makes this `moetail.finalize`, gradients included; with more there are none.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("rows", rows, True), ("row_map", row_map, True), ("weights", weights, False),
                        ("shared", shared, False), ("shared_gate", shared_gate, False),
                        ("num_valid_rows", num_valid_rows, False))  # fmt: skip
    local._check_rank(rows, row_map)
    check_workspace(workspace, "rows", rows, row_map.shape[0])
    w = workspace
    if w.world_size == 1:
        return local.finalize(
            rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
            num_valid_rows=num_valid_rows, numerics=numerics,
        )  # fmt: skip
    local.check_settings(numerics, routed_scale)
    refuse_gradients(rows, weights, shared, shared_gate)
    return _op(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, w.control,
               w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu)  # fmt: skip


def _cpu(*args):  # noqa: ANN002, ANN202
    inputs, (control, group, rank, world_size, _, _) = args[:8], args[8:]
    out = _fake(*args)
    partial = local._op(*inputs)
    total = torch.empty_like(partial)
    all_reduce_cpu.launch(partial, Kind.FINALIZE_REDUCE_SCATTER, control, group, rank, world_size, total)
    return out.copy_(total[rank * out.shape[0] : (rank + 1) * out.shape[0]])


def _cuda(*args):  # noqa: ANN002, ANN202
    from moetail.comm import two_shot_triton as kernel

    (*inputs, numerics), (control, _, *place) = args[:8], args[8:]
    out = _fake(*args)
    concrete = local._concrete(numerics, *inputs[:3])
    kernel.launch_reduce_scatter(*inputs, concrete, control, kernel.Place(*place), out)
    return out


def _fake(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, control, group, rank,  # noqa: ANN001, ANN202
          world_size, max_tokens, one_gpu):  # fmt: skip # noqa: ANN001
    local._check_rank(rows, row_map)
    T, H = row_map.shape[0], rows.shape[1]
    like_all = rows.new_empty(1, H).expand(T, H)  # the check is of an output of every token
    local._check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, like_all)
    if T % world_size != 0:
        raise ValueError(f"row_map must have a number of tokens that {world_size} ranks can share, got T={T}")
    return rows.new_empty(T // world_size, H)


torch.library.define("moetail::finalize_reduce_scatter", f"({local._ARGS}, {WORKSPACE_ARGS}) -> Tensor")
torch.library.impl("moetail::finalize_reduce_scatter", "CPU")(_cpu)
torch.library.impl("moetail::finalize_reduce_scatter", "CUDA")(_cuda)
torch.library.register_fake("moetail::finalize_reduce_scatter")(_fake)
_op = torch.ops.moetail.finalize_reduce_scatter.default
