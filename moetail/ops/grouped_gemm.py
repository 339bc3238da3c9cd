"""grouped_gemm: one GEMM over expert blocks of permuted rows, with the gather, the bias and SwiGLU inside.

    y[r] = x[row r] @ weight[expert of r].T + bias[expert of r]            fp32 sums of exact bf16 products
    swiglu:  gate, up = y[r, :I], y[r, I:]                                 fp32, not rounded to bf16
             gate, up = min(gate, limit), clamp(up, -limit, limit)         where there is a limit
             y[r] = silu(gate) * up
    out[r] = bf16(y[r])                                                    rounded once

The definition is `moetail.reference.grouped_gemm`; an implementation is within a bound of its fp64 value that follows
from Kd and the formats (derived in tests/test_grouped_gemm.py). Routing weights are the tail's: rows are unweighted.
Implementations, chosen by the dispatcher: `grouped_gemm_triton.py` (CUDA; one order of addition, so that a row has the
same bits in every batch and block), the definition (CPU).
Source: ours.
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.routing import Permutation

BLOCKS = (16, 64, 128)  # rows of a block that the CUDA kernel has schedules for
ACTIVATIONS = ("swiglu",)
_LARGEST_F32 = torch.finfo(torch.float32).max


def block_for(T: int, K: int, E: int) -> int:
    """The block to permute T tokens' K choices among E experts with, from static facts.

    The smallest block that the mean expert fills to two thirds at most: most experts then are one block, and their
    weights are read once.
    """
    for name, count, least in (("T", T, 0), ("K", K, 1), ("E", E, 1)):
        if not isinstance(count, (int, torch.SymInt)) or count < least:
            raise ValueError(f"{name} must be a whole number from {least} on, got {count!r}")
    slots = T * K
    return next((block for block in BLOCKS if 3 * slots <= 2 * block * E), BLOCKS[-1])


def block_ranges(K: int, E: int, max_T: int) -> tuple[tuple[int, int, int], ...]:
    """(block, min_T, max_T) for every block that `block_for` gives calls of 1 to max_T tokens."""
    ranges, first = [], 1
    for block in BLOCKS:
        last = max_T if block == BLOCKS[-1] else min(2 * block * E // (3 * K), max_T)
        if first <= last:
            ranges.append((block, first, last))
            first = last + 1
    return tuple(ranges)


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    permutation: Permutation,
    *,
    gather: bool = False,
    activation: str | None = None,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each permuted row by its expert's weight: [R, N] bf16, or [R, I] with "swiglu", where N is 2*I.

    Shape:
        x       [T, Kd]     bf16 with gather: row r reads token source[r] // K
                [R, Kd]     bf16 without: in permuted order. Inner stride 1, any row stride
        weight  [E, N, Kd]  bf16; stride 1 in N or in Kd, so that [E, Kd, N].transpose(1, 2) needs no copy. With
                            "swiglu" the first I rows are the gate's, the others up's (not interleaved)
        bias    [E, N]      bf16 | fp32, inner stride 1
        permutation         of T tokens among E experts, on x's device; on CUDA with block 16, 64 or 128: `block_for`

    `limit` clamps SwiGLU: the gate from above only, up on both sides (DeepSeek-V4). Padding rows and those past the end
    are not read, and their outputs may hold anything. T == 0 returns an empty result and launches nothing.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched.
    Not checked: the permutation's values, which `moetail.permute` made.
    """
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if torch.is_grad_enabled() and value is not None and value.requires_grad:
            raise ValueError(f"{name} must not want gradients, got one that does: use torch.no_grad()")
    if not isinstance(permutation, Permutation):
        raise ValueError(f"permutation must be a moetail.Permutation, got {type(permutation).__name__}")
    if not isinstance(gather, bool):
        raise ValueError(f"gather must be True or False, got {gather!r}")
    _check_activation(activation)
    check_limit(limit)
    (T, K), E = permutation.row_map.shape, permutation.counts.shape[0]
    if gather and x.dim() == 2 and x.shape[0] != T:
        raise ValueError(f"x must have the permutation's T={T} rows, got shape {tuple(x.shape)}")
    if weight.dim() == 3 and weight.shape[0] != E:
        raise ValueError(f"weight must have the permutation's E={E} experts, got shape {tuple(weight.shape)}")
    return _op(
        x, weight, bias, permutation.source, permutation.block_expert, T, K, permutation.block, gather, activation,
        limit,
    )  # fmt: skip


def _check_activation(activation: object) -> None:
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f'activation must be "swiglu" or None, got {activation!r}')


def check_limit(limit: object) -> None:
    """Of SwiGLU's clamp. Raises: ValueError."""
    if limit is not None and (not isinstance(limit, (int, float)) or not 0 < limit <= _LARGEST_F32):
        raise ValueError(f"limit must be a positive number that fp32 holds, or None, got {limit!r}")


def _new(x: torch.Tensor, weight: torch.Tensor, source: torch.Tensor, activation: str | None) -> torch.Tensor:
    N = weight.shape[1]
    return x.new_empty(source.shape[0], N if activation is None else N // 2)


def _cpu(x, weight, bias, source, block_expert, T, K, block, gather, activation, limit):  # noqa: ANN001, ANN202
    _check(x, weight, bias, source, block_expert, block, gather, activation, limit)
    return reference.gemm_rows(x, weight, bias, source, block_expert, K, block, gather, activation, limit)


def _cuda(x, weight, bias, source, block_expert, T, K, block, gather, activation, limit):  # noqa: ANN001, ANN202
    _check(x, weight, bias, source, block_expert, block, gather, activation, limit)
    if block not in BLOCKS:
        raise ValueError(f"permutation must have block 16, 64 or 128 on CUDA, got block {block}")
    out = _new(x, weight, source, activation)
    if source.shape[0] > 0:
        from moetail.ops import grouped_gemm_triton

        grouped_gemm_triton.launch(x, weight, bias, source, block_expert, T, K, block, gather, activation, limit, out)
    return out


def _fake(x, weight, bias, source, block_expert, T, K, block, gather, activation, limit):  # noqa: ANN001, ANN202
    _check(x, weight, bias, source, block_expert, block, gather, activation, limit)
    return _new(x, weight, source, activation)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    source: torch.Tensor,
    block_expert: torch.Tensor,
    block: int,
    gather: bool,
    activation: str | None,
    limit: float | None,
) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must have two dimensions, got shape {tuple(x.shape)}")
    if weight.dim() != 3:
        raise ValueError(f"weight must have three dimensions [E, N, Kd], got shape {tuple(weight.shape)}")
    R, (E, N, Kd) = source.shape[0], weight.shape
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be bfloat16, got {tensor.dtype}")
    if N < 1 or Kd < 1:
        raise ValueError(f"weight must have N >= 1 and Kd >= 1, got shape {tuple(weight.shape)}")
    if weight.stride(2) != 1 and weight.stride(1) != 1 and Kd > 1 and N > 1:
        raise ValueError(f"weight must have stride 1 in N or in Kd, got strides {weight.stride()}")
    if (N - 1) * weight.stride(1) + (Kd - 1) * weight.stride(2) >= 2**31:
        raise ValueError(f"weight must have an expert within 2**31 elements, got strides {weight.stride()}")
    if x.shape[1] != Kd:
        raise ValueError(f"x must have weight's Kd={Kd} columns, got shape {tuple(x.shape)}")
    if not gather and x.shape[0] != R:
        raise ValueError(f"x must have the permutation's R={R} rows, got shape {tuple(x.shape)}")
    if Kd > 1 and x.stride(1) != 1:
        raise ValueError(f"x must have inner stride 1, got strides {x.stride()}")
    _check_activation(activation)
    if activation is not None and N % 2:
        raise ValueError(f"weight must have an even N (gate and up) for swiglu, got N={N}")
    if limit is not None and activation is None:
        raise ValueError(f"limit must be None without an activation, got {limit}")
    check_limit(limit)
    if bias is not None:
        if bias.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"bias must be bfloat16 or float32, got {bias.dtype}")
        if bias.shape != (E, N):
            raise ValueError(f"bias must have shape {(E, N)}, got {tuple(bias.shape)}")
        if N > 1 and bias.stride(1) != 1:
            raise ValueError(f"bias must have inner stride 1, got strides {bias.stride()}")
    for name, other in (("weight", weight), ("bias", bias), ("permutation", source)):
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}")


torch.library.define(
    "moetail::grouped_gemm",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor source, Tensor block_expert, SymInt T, int K, int block, "
    "bool gather, str? activation, float? limit) -> Tensor",
)
torch.library.impl("moetail::grouped_gemm", "CPU")(_cpu)
torch.library.impl("moetail::grouped_gemm", "CUDA")(_cuda)
torch.library.register_fake("moetail::grouped_gemm")(_fake)
_op = torch.ops.moetail.grouped_gemm.default
