"""The deferral contract: what experts hand over when they stop after their second GEMM, and who completes it.

Leaf: imports torch and the numerics only. Completion goes through the registered ops, of one rank and of several, so
that a value that nobody fused can always be finished by whoever holds it.

Memory: an output refers to its tensors until it dies, and whoever completes or takes it on a stream other than the one
they were allocated on keeps their memory from being given away until that stream has read them. That stream must
already wait for the streams that wrote them: the contract orders lifetimes, not work.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

import torch
from torch.utils._pytree import tree_map

from moetail.numerics import Numerics

_LARGEST_F32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, eq=False)
class UnfinalizedMoEOutput:
    """Expert rows that still have to be weighted, un-permuted and reduced.

    Shape:
        rows            [R, H]  bf16 | fp16 | fp32, inner stride 1; one row per (token, expert)
        row_map         [T, K]  int32 | int64; the row of each slot. A slot is absent when its value is negative,
                                >= R or >= num_valid_rows
        weights         [T, K]  fp32 | bf16 | fp16, or None where the rows are already weighted
        num_valid_rows  [1]     int32 | int64 on the same device, or None

    Raises: ValueError naming the field, what it was and what it must be.
    """

    rows: torch.Tensor
    row_map: torch.Tensor
    weights: torch.Tensor | None
    num_valid_rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_tensors(("rows", self.rows, True), ("row_map", self.row_map, True), ("weights", self.weights, False),
                       ("num_valid_rows", self.num_valid_rows, False))  # fmt: skip
        if self.rows.dim() != 2:
            raise ValueError(f"rows must have two dimensions [R, H], got shape {tuple(self.rows.shape)}")
        if self.row_map.dim() != 2:
            raise ValueError(f"row_map must have two dimensions [T, K], got shape {tuple(self.row_map.shape)}")
        if self.weights is not None and self.weights.shape != self.row_map.shape:
            raise ValueError(
                f"weights must have row_map's shape {tuple(self.row_map.shape)}, got {tuple(self.weights.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        return self.row_map.shape[0]

    def finalize(self, shared: torch.Tensor | None, tail: TailSpec) -> torch.Tensor:
        """[T, H]: `moetail.finalize` of this output's tensors, or `moetail.finalize_all_reduce` where the tail has a
        workspace of several ranks; they document it."""
        inputs = (self.rows, self.row_map, self.weights, shared, None, self.num_valid_rows, tail.routed_scale,
                  tail.numerics.spec)  # fmt: skip
        w = tail.workspace
        if w is not None:
            w.admit("rows", self.rows, self.num_tokens)
        if w is None or w.world_size == 1:
            return torch.ops.moetail.finalize.default(*inputs)
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (self.rows, self.weights, shared)
        ):
            raise ValueError("gradients must not be wanted across ranks, got a tensor that requires them")
        return torch.ops.moetail.finalize_all_reduce.default(
            *inputs, w.control, w.group_name, w.rank, w.world_size, w.max_tokens, w.one_gpu
        )


@runtime_checkable
class TensorParallel(Protocol):
    """What a tail needs of a `moetail.Workspace`, which this leaf does not import."""

    control: torch.Tensor
    group_name: str
    rank: int
    world_size: int
    max_tokens: int
    one_gpu: bool

    def admit(self, name: str, x: torch.Tensor, T: int) -> None: ...


@dataclass(frozen=True)
class TailSpec:
    """How a tail is computed, whoever computes it; `workspace`: of the ranks that it is summed over.

    Raises: ValueError naming the field, what it was and what it must be.
    """

    numerics: Numerics = Numerics.TRTLLM
    routed_scale: float = 1.0
    workspace: TensorParallel | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.numerics, Numerics):
            raise ValueError(f"numerics must be a moetail.Numerics, got {self.numerics!r}")
        if not isinstance(self.routed_scale, (int, float)) or not abs(self.routed_scale) <= _LARGEST_F32:
            raise ValueError(f"routed_scale must be a number that fp32 holds, got {self.routed_scale!r}")
        if self.workspace is not None and not isinstance(self.workspace, TensorParallel):
            raise ValueError(f"workspace must be a moetail.Workspace or None, got {type(self.workspace).__name__}")


@dataclass(frozen=True, eq=False)
class MoEOutput:
    """A MoE layer's output whose tail has not run: routed rows, shared experts' output [T, H] or None, and the tail.

    It is not a tensor and refuses to be used, copied or pickled as one, so that an unfinalized value cannot be read by
    mistake. It ends in one of two ways: `complete()` by a consumer that wants a tensor, or `take()` by a fused one. An
    output that dies without either is a layer's result lost: a RuntimeWarning says so. The warning touches no device,
    so it may come inside a CUDA graph capture; code that torch.compile traced makes no object and cannot warn.

    Raises: ValueError where a field is of another type, or `shared` has not the routed output's shape.
    """

    routed: UnfinalizedMoEOutput
    shared: torch.Tensor | None
    tail: TailSpec = TailSpec()

    def __post_init__(self) -> None:
        if not isinstance(self.routed, UnfinalizedMoEOutput):
            raise ValueError(f"routed must be a moetail.UnfinalizedMoEOutput, got {type(self.routed).__name__}")
        if not isinstance(self.tail, TailSpec):
            raise ValueError(f"tail must be a moetail.TailSpec, got {type(self.tail).__name__}")
        _check_tensors(("shared", self.shared, False))
        want = (self.routed.num_tokens, self.routed.rows.shape[1])
        if self.shared is not None and self.shared.shape != want:
            raise ValueError(f"shared must have shape {want}, got {tuple(self.shared.shape)}")
        self._set("_pending", True)

    def complete(self) -> torch.Tensor:
        """[T, H] in the rows' dtype: what the layer would have returned, summed over the ranks.

        Runs once, so that no collective runs twice: a second call returns the same tensor, which nobody should write.

        Raises: RuntimeError where the output was taken; otherwise as `moetail.finalize_all_reduce`.
        """
        finished = self._finished
        if finished is None:
            self._spend()
            finished = self.routed.finalize(self.shared, self.tail)
            self._set("_finished", finished)
        return finished

    def take(self) -> tuple[UnfinalizedMoEOutput, torch.Tensor | None, TailSpec]:
        """(routed, shared, tail) for a consumer that finalizes them itself, which it must do exactly once.

        Raises: RuntimeError where the output was taken or completed: a second consumer would add and reduce again.
        """
        if self._finished is not None:
            raise RuntimeError("MoEOutput was completed already: read the tensor that complete() returns")
        self._spend()
        self._set("_taken", True)
        return self.routed, self.shared, self.tail

    # Not fields: what has become of it. Here and not in __init__, so that an output that was refused has them too.
    _pending: ClassVar[bool] = False
    _taken: ClassVar[bool] = False
    _finished: ClassVar[torch.Tensor | None] = None

    def _spend(self) -> None:
        if self._taken:
            raise RuntimeError("MoEOutput was taken already: its consumer has finalized it")
        self._set("_pending", False)
        r = self.routed
        _outlive_current_stream(r.rows, r.row_map, r.weights, r.num_valid_rows, self.shared)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __del__(self) -> None:
        if self._pending and not sys.is_finalizing():
            warnings.warn(
                f"moetail: a MoEOutput of {self.routed.num_tokens} tokens was dropped unfinalized: its layer's result "
                "is lost; complete() it, or take() it in the consumer that finalizes",
                RuntimeWarning,
                stacklevel=2,
            )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("MoEOutput is not finalized yet: call .complete() for the tensor")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __setitem__ = __getitem__ = _refuse
    __array__ = __float__ = __int__ = __index__ = __complex__ = __bool__ = __len__ = __iter__ = __contains__ = _refuse
    __reduce_ex__ = _refuse

    def __eq__(self, other: object) -> bool:
        return self._refuse() if isinstance(other, (torch.Tensor, int, float)) else NotImplemented

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"MoEOutput has no {name}: it is not finalized yet, call .complete() for the tensor")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(f"MoEOutput is not finalized yet: call .complete() before {getattr(func, '__name__', func)}")


def completed(value: Any) -> Any:
    """`value` with every MoEOutput in its tuples, lists and dicts completed: what leaves a pipeline stage, and what a
    consumer that reads tensors only begins with. Tensors, numbers, strings and None stay as they are.

    Raises: TypeError for an UnfinalizedMoEOutput, whose shared part and tail are not there, and for anything else,
    which might hold an output.
    """
    return tree_map(_completed, value)


def _completed(leaf: Any) -> Any:
    if isinstance(leaf, MoEOutput):
        return leaf.complete()
    if leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str)):
        return leaf
    raise TypeError(
        f"value must consist of tensors, numbers, strings, None and MoEOutput in tuples, lists and dicts, "
        f"got {type(leaf).__name__}"
    )


def _check_tensors(*fields: tuple[str, object, bool]) -> None:
    """(name, value, whether it must be there) of each. Raises: ValueError for one that is no tensor."""
    for name, value, needed in fields:
        if not isinstance(value, torch.Tensor) and (needed or value is not None):
            raise ValueError(f"{name} must be a tensor{'' if needed else ' or None'}, got {type(value).__name__}")


def _outlive_current_stream(*tensors: torch.Tensor | None) -> None:
    """No-op for what was allocated on this stream. A traced graph has one stream of its own."""
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
