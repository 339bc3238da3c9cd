"""permute: the expert-sorted, block-padded order of rows that grouped GEMMs read, without a sort.

    rows of expert 0 in slot order, padded to whole blocks; rows of expert 1; ...            slot = t*K + k

The definition is `moetail.reference.permute`, a stable sort; every implementation equals it exactly, every run.
Implementations, chosen by the dispatcher: `permute_triton.py` (CUDA), the definition (CPU).
Source: ours. The job of vLLM's moe_align_block_size.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.routing import MAX_EXPERTS, MAX_TOP_K, Permutation, row_bound

MAX_BLOCK = 256
MAX_SLOTS = 2**30  # int32 numbers the rows, and what the kernel adds to them
_INTS = (torch.int32, torch.int64)


def permute(
    topk_ids: torch.Tensor, num_experts: int, *, block: int = 1, expert_map: torch.Tensor | None = None
) -> Permutation:
    """Sort slots by expert; the result is described at `moetail.Permutation`. No host sync: sizes are static bounds.

    Shape:
        topk_ids    [T, K]      int32 | int64, any strides, 1 <= K <= 32, T*K <= 2**30
        expert_map  [E_global]  int32 | int64, stride 1: from an id to one of the num_experts here, or -1 (expert
                                parallel)

    1 <= num_experts <= 1024; block is a power of two up to 256. A slot is absent when its id (the map's value, with a
    map) is outside [0, num_experts), or outside the map: it gets no row. T == 0 launches no sort: no rows, counts of 0.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched.
    """
    for name, value in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if not isinstance(value, torch.Tensor) and not (name == "expert_map" and value is None):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    for name, count in (("num_experts", num_experts), ("block", block)):
        if not isinstance(count, int) or isinstance(count, bool) or count >= 2**63:
            raise ValueError(f"{name} must be a whole number of int64, got {count!r}")
    row_map, source, block_expert, counts, offsets, num_rows = _op(topk_ids, expert_map, num_experts, block)
    return Permutation(row_map, source, block_expert, counts, offsets, num_rows, block)


def _new(topk_ids: torch.Tensor, num_experts: int, block: int) -> tuple[torch.Tensor, ...]:
    T, K = topk_ids.shape
    R = row_bound(T * K, num_experts, block)
    sizes = ((T, K), (R,), (R // block,), (num_experts,), (num_experts,), (1,))
    return tuple(topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)


def _cpu(topk_ids, expert_map, num_experts, block):  # noqa: ANN001, ANN202
    _check(topk_ids, expert_map, num_experts, block)
    p = reference.permute(topk_ids, num_experts, block=block, expert_map=expert_map)
    return p.row_map, p.source, p.block_expert, p.counts, p.offsets, p.num_rows


def _cuda(topk_ids, expert_map, num_experts, block):  # noqa: ANN001, ANN202
    _check(topk_ids, expert_map, num_experts, block)
    out = _new(topk_ids, num_experts, block)
    if topk_ids.shape[0] > 0:
        from moetail.ops import permute_triton

        permute_triton.launch(topk_ids, expert_map, num_experts, block, *out)
    else:
        for tensor in out[3:]:
            tensor.zero_()
    return out


def _fake(topk_ids, expert_map, num_experts, block):  # noqa: ANN001, ANN202
    _check(topk_ids, expert_map, num_experts, block)
    return _new(topk_ids, num_experts, block)


def _check(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, block: int) -> None:
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids must have two dimensions [T, K], got shape {tuple(topk_ids.shape)}")
    if topk_ids.dtype not in _INTS:
        raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    T, K = topk_ids.shape
    if not 1 <= K <= MAX_TOP_K:
        raise ValueError(f"topk_ids must have 1 <= K <= {MAX_TOP_K} slots, got K={K}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    if not 1 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(f"block must be a power of two from 1 to {MAX_BLOCK}, got {block}")
    if T * K > MAX_SLOTS:
        raise ValueError(f"topk_ids must have at most {MAX_SLOTS} slots, got {T * K}")
    if expert_map is not None:
        if expert_map.dtype not in _INTS:
            raise ValueError(f"expert_map must be int32 or int64, got {expert_map.dtype}")
        if expert_map.dim() != 1 or expert_map.numel() < 1 or expert_map.stride(0) != 1:
            raise ValueError(
                f"expert_map must be a vector of stride 1, got shape {tuple(expert_map.shape)}, "
                f"strides {expert_map.stride()}"
            )
        if expert_map.device != topk_ids.device:
            raise ValueError(f"expert_map must be on topk_ids' device {topk_ids.device}, got {expert_map.device}")


torch.library.define(
    "moetail::permute",
    "(Tensor topk_ids, Tensor? expert_map, int num_experts, int block) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("moetail::permute", "CPU")(_cpu)
torch.library.impl("moetail::permute", "CUDA")(_cuda)
torch.library.register_fake("moetail::permute")(_fake)
_op = torch.ops.moetail.permute.default
