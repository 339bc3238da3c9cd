"""finalize: top-k weighting, un-permutation, reduction and the shared-expert add, in one pass.

    y[t] = sum_k weights[t,k] * rows[row_map[t,k]]      slots that are absent contribute nothing
    y    = y * routed_scale + sigmoid(shared_gate) * shared

Rounding: as `numerics` says (`moetail.numerics`); the definition is `moetail.reference.finalize`.
Implementations, chosen by the dispatcher from the tensors' device: `finalize_triton.py` (CUDA), `finalize_cpu.py`
(CPU, needs the `cpu` extra; without it the reference runs, and a warning says so).
Source: ours. The two-rounding contract is that of vLLM's moe_unpermute followed by the runner's add.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable

import torch

from moetail import reference
from moetail.numerics import Numerics
from moetail.ops import finalize_backward

MAX_K = 64
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_INTS = (torch.int32, torch.int64)
_LARGEST_F32 = torch.finfo(torch.float32).max


def finalize(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    shared_gate: torch.Tensor | None = None,
    routed_scale: float = 1.0,
    num_valid_rows: torch.Tensor | None = None,
    numerics: Numerics = Numerics.TRTLLM,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weight, un-permute and reduce expert rows, and add the shared experts' output: [T, H] in the rows' dtype.

    Shape:
        rows            [R, H]  bf16 | fp16 | fp32; inner stride 1, any row stride (padded GEMM outputs); R*H may
                                exceed 2**31
        row_map         [T, K]  int32 | int64, any strides, 1 <= K <= 64; the row of each slot. A slot is absent when
                                its value is negative, >= R or >= num_valid_rows, and then adds nothing, whatever the
                                memory it would have named holds
        weights         [T, K]  fp32 | bf16 | fp16, any strides; None: the rows are already weighted
        shared          [T, H]  the rows' dtype; inner stride 1
        shared_gate     [T, 1]  bf16 | fp16 | fp32 logits; shared is multiplied by their sigmoid
        num_valid_rows  [1]     int32 | int64, on the device (never read by the host)
        out             [T, H]  the rows' dtype; inner stride 1, row stride >= H. May be `shared` itself; must not
                                overlap any other argument

    `routed_scale` multiplies the routed sum, never `shared`. T == 0 returns an empty result and launches nothing.
    Differentiable in rows, weights, shared and shared_gate, unless `out` is given.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched or written.
    Not checked: the values of row_map beyond absence (that would need a host sync).
    """
    check_settings(numerics, routed_scale)
    check_tensors(("rows", rows, True), ("row_map", row_map, True), ("weights", weights, False),
                  ("shared", shared, False), ("shared_gate", shared_gate, False),
                  ("num_valid_rows", num_valid_rows, False), ("out", out, False))  # fmt: skip
    if out is None:
        return _op(
            rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec
        )  # fmt: skip
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (rows, weights, shared, shared_gate, out)
    ):
        raise ValueError("out must be None where gradients are wanted, got a tensor: use torch.no_grad() or drop out")
    _op_out(
        rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics.spec, out
    )  # fmt: skip
    return out


def check_settings(numerics: object, routed_scale: object) -> None:
    """Raises: ValueError. For every op that finalizes."""
    if not isinstance(numerics, Numerics):
        raise ValueError(f"numerics must be a moetail.Numerics, got {numerics!r}")
    if not isinstance(routed_scale, (int, float)) or not abs(routed_scale) <= _LARGEST_F32:
        raise ValueError(f"routed_scale must be a number that fp32 holds, got {routed_scale!r}")


def check_tensors(*arguments: tuple[str, object, bool]) -> None:
    """(name, value, whether it must be there) of each. Raises: ValueError for one that is no tensor."""
    for name, value, needed in arguments:
        if not isinstance(value, torch.Tensor) and (needed or value is not None):
            raise ValueError(f"{name} must be a tensor{'' if needed else ' or None'}, got {type(value).__name__}")


def _new_out(rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(row_map.shape[0], rows.shape[1])


def _inputs(*tensors: torch.Tensor | None) -> tuple[tuple[str, torch.Tensor | None], ...]:
    return tuple(zip(("rows", "row_map", "weights", "shared_gate", "num_valid_rows"), tensors, strict=True))


def _check_no_overlap(
    out: torch.Tensor,
    like: torch.Tensor | None,
    others: tuple[tuple[str, torch.Tensor | None], ...],
    names: tuple[str, str] = ("out", "shared"),
) -> None:
    """`out` may be `like`, element for element; nothing else that is read may share memory with it."""
    name, like_name = names
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"{name} must have a row stride of at least {out.shape[1]}, got {out.stride(0)}")
    in_place = like is not None and (out.data_ptr(), out.stride()) == (like.data_ptr(), like.stride())
    for other, tensor in (*others, (like_name, None if in_place else like)):
        if tensor is not None and _overlap(out, tensor):
            raise ValueError(f"{name} must not overlap {other}, got a view of its memory")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of inner stride 1 share memory. Row windows of one buffer may lie side by side."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    first, last = ((t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum(
        (n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))) for t in (a, b))  # fmt: skip
    if first[0] >= last[1] or last[0] >= first[1]:
        return False
    if a.dim() == 3 or b.dim() == 3:  # [T, streams, H]: each stream is rows
        parts = [t.unbind(1) if t.dim() == 3 else (t,) for t in (a, b)]
        return any(_overlap(x, y) for x in parts[0] for y in parts[1])
    pitch = a.stride(0) * a.element_size()
    if b.dim() != 2 or pitch == 0 or b.stride(0) * b.element_size() != pitch:
        return True
    offset = (last[0] - first[0]) % pitch
    return offset < a.shape[1] * a.element_size() or offset + b.shape[1] * b.element_size() > pitch


def _cpu_into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out):  # noqa: ANN001, ANN202
    """Write `out`: the arguments are checked, `numerics` is concrete, T >= 1."""
    kernel = _cpu_kernel()
    if kernel is not None:
        kernel.launch(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out)
        return
    y = reference.finalize(
        rows, row_map, weights, shared, shared_gate=shared_gate, routed_scale=routed_scale,
        num_valid_rows=num_valid_rows, numerics=numerics,
    )  # fmt: skip
    out.copy_(y)


def _cuda_into(*args):  # noqa: ANN002, ANN202
    _cuda_kernel().launch(*args)


def _functional(into: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """The op that returns a new tensor, on one device."""

    def finalize(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics):  # noqa: ANN001, ANN202
        _check_rank(rows, row_map)
        out = _new_out(rows, row_map)
        _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)
        concrete = _concrete(numerics, rows, row_map, weights)
        if out.shape[0] > 0:
            into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, concrete, out)
        return out

    return finalize


def _out_variant(into: Callable[..., None]) -> Callable[..., None]:
    """The op that writes the caller's tensor, on one device."""

    def finalize_out(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out):  # noqa: ANN001, ANN202
        _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)
        concrete = _concrete(numerics, rows, row_map, weights)
        if out.shape[0] > 0:
            _check_no_overlap(out, shared, _inputs(rows, row_map, weights, shared_gate, num_valid_rows))
            into(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, concrete, out)

    return finalize_out


def _fake(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics):  # noqa: ANN001, ANN202
    _check_rank(rows, row_map)
    out = _new_out(rows, row_map)
    _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)
    return out


def _fake_out(rows, row_map, weights, shared, shared_gate, num_valid_rows, routed_scale, numerics, out):  # noqa: ANN001, ANN202
    _check(rows, row_map, weights, shared, shared_gate, num_valid_rows, numerics, out)


@functools.cache
def _cpu_kernel() -> types.ModuleType | None:
    try:
        import numba  # noqa: F401
    except ImportError:
        warnings.warn(
            "moetail: numba is not installed, so finalize on a CPU runs its torch reference, which is several times "
            "slower; pip install 'moetail[cpu]'",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    from moetail.ops import finalize_cpu

    return finalize_cpu


@functools.cache
def _cuda_kernel() -> types.ModuleType:
    from moetail.ops import finalize_triton

    return finalize_triton


def _concrete(spec: str, rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None) -> Numerics:
    T = row_map.shape[0] if Numerics.parse(spec).order == "flashinfer" else 0
    dtype = None if weights is None else weights.dtype
    return _resolve(spec, T, row_map.shape[1], rows.shape[1], rows.device.type, rows.dtype, dtype)


@functools.lru_cache(maxsize=4096)
def _resolve(spec: str, *facts: object) -> Numerics:
    return Numerics.parse(spec).resolve(*facts)  # type: ignore[arg-type]


def _check_rank(rows: torch.Tensor, row_map: torch.Tensor) -> None:
    if rows.dim() != 2:
        raise ValueError(f"rows must have two dimensions [R, H], got shape {tuple(rows.shape)}")
    if row_map.dim() != 2:
        raise ValueError(f"row_map must have two dimensions [T, K], got shape {tuple(row_map.shape)}")


def _check(
    rows: torch.Tensor,
    row_map: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    num_valid_rows: torch.Tensor | None,
    numerics: str,
    out: torch.Tensor,
) -> None:
    _check_rank(rows, row_map)
    (T, K), H = row_map.shape, rows.shape[1]
    if rows.dtype not in _FLOATS:
        raise ValueError(f"rows must be bfloat16, float16 or float32, got {rows.dtype}")
    if H < 1:
        raise ValueError("rows must have H >= 1 columns, got 0")
    if row_map.dtype not in _INTS:
        raise ValueError(f"row_map must be int32 or int64, got {row_map.dtype}")
    if not 1 <= K <= MAX_K:
        raise ValueError(f"row_map must have 1 <= K <= {MAX_K} slots, got K={K}")
    _check_rows_like("rows", rows, rows, rows.shape[0])
    _check_rows_like("out", out, rows, T)
    n = Numerics.parse(numerics)
    if weights is None:
        if n.uses_weights:
            raise ValueError(
                f"weights must be a [T, K] tensor for numerics {n.name}, got None; rows that are already weighted "
                f"take numerics=Numerics.PREWEIGHTED"
            )
    else:
        if not n.uses_weights:
            raise ValueError(f"weights must be None for numerics {n.name} (rows already weighted), got a tensor")
        if weights.dtype not in _FLOATS:
            raise ValueError(f"weights must be float32, bfloat16 or float16, got {weights.dtype}")
        if weights.shape != row_map.shape:
            raise ValueError(f"weights must have row_map's shape {(T, K)}, got {tuple(weights.shape)}")
    if shared is not None:
        _check_rows_like("shared", shared, rows, T)
    if shared_gate is not None:
        if shared is None:
            raise ValueError("shared_gate must be None where shared is None, got a tensor")
        if shared_gate.dtype not in _FLOATS:
            raise ValueError(f"shared_gate must be float32, bfloat16 or float16, got {shared_gate.dtype}")
        if shared_gate.shape != (T, 1):
            raise ValueError(f"shared_gate must have shape {(T, 1)}, got {tuple(shared_gate.shape)}")
    if num_valid_rows is not None:
        if num_valid_rows.dtype not in _INTS:
            raise ValueError(f"num_valid_rows must be int32 or int64, got {num_valid_rows.dtype}")
        if num_valid_rows.numel() != 1:
            raise ValueError(f"num_valid_rows must have one element, got {num_valid_rows.numel()}")
    for name, tensor in (
        ("row_map", row_map), ("weights", weights), ("shared", shared), ("shared_gate", shared_gate),
        ("num_valid_rows", num_valid_rows), ("out", out),
    ):  # fmt: skip
        if tensor is not None and tensor.device != rows.device:
            raise ValueError(f"{name} must be on rows' device {rows.device}, got {tensor.device}")


def _check_rows_like(name: str, tensor: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    H = rows.shape[1]
    if tensor.dim() != 2 or tensor.shape[0] != count or tensor.shape[1] != H:
        raise ValueError(f"{name} must have shape {(count, H)}, got {tuple(tensor.shape)}")
    if tensor.dtype != rows.dtype:
        raise ValueError(f"{name} must have the rows' dtype {rows.dtype}, got {tensor.dtype}")
    if H > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} must have inner stride 1, got strides {tensor.stride()}")


_ARGS = (
    "Tensor rows, Tensor row_map, Tensor? weights, Tensor? shared, Tensor? shared_gate, Tensor? num_valid_rows, "
    "float routed_scale, str numerics"
)
torch.library.define("moetail::finalize", f"({_ARGS}) -> Tensor")
torch.library.define("moetail::finalize_out", f"({_ARGS}, Tensor(a!) out) -> ()")
for _device, _into in (("CPU", _cpu_into), ("CUDA", _cuda_into)):
    torch.library.impl("moetail::finalize", _device)(_functional(_into))
    torch.library.impl("moetail::finalize_out", _device)(_out_variant(_into))
torch.library.register_fake("moetail::finalize")(_fake)
torch.library.register_fake("moetail::finalize_out")(_fake_out)
torch.library.register_autograd(
    "moetail::finalize", finalize_backward.backward, setup_context=finalize_backward.setup_context
)
_op = torch.ops.moetail.finalize.default
_op_out = torch.ops.moetail.finalize_out.default
