"""all_reduce: the sum over ranks of a hidden state that is finalized already.

    y = x_0 + x_1 + .. + x_(W-1)      in fp32, in rank order, rounded once

The definition is `moetail.reference.all_reduce`: the same bits at every T and on every rank.
Implementations, chosen by the dispatcher from the tensor's device: `finalize_all_reduce_triton.py` (CUDA),
`all_reduce_cpu.py` (CPU, through gloo).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moetail.comm import all_reduce_cpu
from moetail.comm.workspace import Kind, Workspace
from moetail.ops import finalize as local


def all_reduce(x: torch.Tensor, *, workspace: Workspace, out: torch.Tensor | None = None) -> torch.Tensor:
    """Add every rank's `x`: [T, H] in x's dtype.

    Shape:
        x    [T, H]  bf16 | fp16, the workspace's dtype, H its hidden size, T <= its max_tokens; inner stride 1
        out  [T, H]  x's dtype; inner stride 1, row stride >= H. May be `x` itself; must not overlap it otherwise

    Every rank must make the same calls with the same T, T == 0 included, which sends a header only. A workspace of one
    rank gives a copy. No gradients.

    Raises: ValueError naming the argument, before anything is sent; RuntimeError where the workspace is destroyed and,
    on a CPU, where it has a fault (`Workspace.check` on a GPU).
    """
    local.check_tensors(("x", x, True), ("out", out, False))
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions [T, H], got shape {tuple(x.shape)}")
    check_workspace(workspace, "x", x, x.shape[0])
    refuse_gradients(x, out)
    w = workspace
    if w.world_size == 1:
        return x.clone(memory_format=torch.contiguous_format) if out is None else _copied(x, out)
    if out is None:
        return _op(x, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu)
    _op_out(x, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu, out)
    return out


def check_workspace(workspace: Workspace, name: str, x: torch.Tensor, T: int) -> None:
    if not isinstance(workspace, Workspace):
        raise ValueError(f"workspace must be a moetail.Workspace, got {type(workspace).__name__}")
    workspace.admit(name, x, T)


def refuse_gradients(*tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError("gradients must not be wanted, got a tensor that requires them: use torch.no_grad()")


def _copied(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _check(x, out)
    return out.copy_(x)


def _check(x: torch.Tensor, out: torch.Tensor) -> None:
    local._check_rows_like("x", x, x, x.shape[0])
    local._check_rows_like("out", out, x, x.shape[0])
    if out.device != x.device:
        raise ValueError(f"out must be on x's device {x.device}, got {out.device}")


def _cpu_into(x, control, group, rank, world_size, max_tokens, one_gpu, out):  # noqa: ANN001, ANN202
    all_reduce_cpu.launch(x, Kind.ALL_REDUCE, control, group, rank, world_size, out)


def _cuda_into(x, control, group, rank, world_size, max_tokens, one_gpu, out):  # noqa: ANN001, ANN202
    from moetail.comm import finalize_all_reduce_triton

    place = finalize_all_reduce_triton.Place(rank, world_size, max_tokens, one_gpu)
    finalize_all_reduce_triton.launch_all_reduce(x, control, place, out)


def _functional(into: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def all_reduce(x, control, group, rank, world_size, max_tokens, one_gpu):  # noqa: ANN001, ANN202
        out = _fake(x)
        into(x, control, group, rank, world_size, max_tokens, one_gpu, out)
        return out

    return all_reduce


def _out_variant(into: Callable[..., None]) -> Callable[..., None]:
    def all_reduce_out(x, control, group, rank, world_size, max_tokens, one_gpu, out):  # noqa: ANN001, ANN202
        _check(x, out)
        in_place = (out.data_ptr(), out.stride()) == (x.data_ptr(), x.stride())
        local._check_no_overlap(out, None, () if in_place else (("x", x),))
        into(x, control, group, rank, world_size, max_tokens, one_gpu, out)

    return all_reduce_out


def _fake(x, *_):  # noqa: ANN001, ANN002, ANN202
    out = x.new_empty(x.shape)
    _check(x, out)
    return out


def _fake_out(x, control, group, rank, world_size, max_tokens, one_gpu, out):  # noqa: ANN001, ANN202
    _check(x, out)


WORKSPACE_ARGS = "Tensor(a!) control, str group, int rank, int world_size, int max_tokens, bool one_gpu"
torch.library.define("moetail::all_reduce", f"(Tensor x, {WORKSPACE_ARGS}) -> Tensor")
torch.library.define("moetail::all_reduce_out", f"(Tensor x, {WORKSPACE_ARGS}, Tensor(b!) out) -> ()")
for _device, _into in (("CPU", _cpu_into), ("CUDA", _cuda_into)):
    torch.library.impl("moetail::all_reduce", _device)(_functional(_into))
    torch.library.impl("moetail::all_reduce_out", _device)(_out_variant(_into))
torch.library.register_fake("moetail::all_reduce")(_fake)
torch.library.register_fake("moetail::all_reduce_out")(_fake_out)
_op = torch.ops.moetail.all_reduce.default
_op_out = torch.ops.moetail.all_reduce_out.default
