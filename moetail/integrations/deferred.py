"""A routed sum that has not been computed yet, and that a model's own `routed + shared` computes.

transformers lets a library replace the experts, but the shared experts are added in the model's block. So the experts
return this value instead of a tensor: it carries the expert rows, absorbs reshapes and a scalar factor, and the first
`+ tensor` runs one finalize. Anything else it is asked for computes the routed sum first and asks that tensor, so that
a block this file has never seen still gets the right numbers.

A plain object and not a Tensor subclass: Dynamo traces through it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from moetail.contract import TailSpec, UnfinalizedMoEOutput


class DeferredRoutedSum:
    """sum_k weights[t,k] * rows[row_map[t,k]] of shape `shape`, in the rows' dtype, on demand."""

    def __init__(self, routed: UnfinalizedMoEOutput, tail: TailSpec, shape: tuple[int, ...]) -> None:
        self.routed = routed
        self.tail = tail
        self.shape = torch.Size(shape)
        self._tensor: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.routed.rows.dtype

    @property
    def device(self) -> torch.device:
        return self.routed.rows.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def tensor(self) -> torch.Tensor:
        """The routed sum as a tensor; computed once."""
        if self._tensor is None:
            self._tensor = self.routed.finalize(None, self.tail).view(self.shape)
        return self._tensor

    def view(self, *shape: Any, **kwargs: Any) -> Any:
        wanted = () if kwargs else _resolve(shape, self.shape)
        if self._tensor is not None or not wanted or wanted[-1] != self.shape[-1]:
            return self.tensor().view(*shape, **kwargs)
        return DeferredRoutedSum(self.routed, self.tail, wanted)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        return self.view(*shape) if not kwargs else self.tensor().reshape(*shape, **kwargs)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
        return (
            self if memory_format == torch.contiguous_format else self.tensor().contiguous(memory_format=memory_format)
        )

    def to(self, *args: Any, **kwargs: Any) -> Any:
        targets = [*args, *(v for k, v in kwargs.items() if k in ("dtype", "device") and v is not None)]
        if kwargs.get("copy") or not all(_is_same(target, self) for target in targets):
            return self.tensor().to(*args, **kwargs)
        return self

    def _plus(self, other: Any) -> torch.Tensor:
        fits = (
            isinstance(other, torch.Tensor)
            and self._tensor is None
            and other.shape == self.shape
            and other.dtype == self.dtype
            and other.device == self.device
            and not (torch.is_grad_enabled() and other.requires_grad)
        )
        if not fits:
            return self.tensor() + (other.tensor() if isinstance(other, DeferredRoutedSum) else other)
        shared = other.reshape(self.routed.num_tokens, self.shape[-1])
        if shared.stride(-1) != 1:
            shared = shared.contiguous()
        return self.routed.finalize(shared, self.tail).view(self.shape)

    __add__ = __radd__ = _plus

    def _times(self, other: Any) -> Any:
        if isinstance(other, float) and self._tensor is None and self.tail.routed_scale == 1.0:
            return DeferredRoutedSum(self.routed, replace(self.tail, routed_scale=other), self.shape)
        return self.tensor() * (other.tensor() if isinstance(other, DeferredRoutedSum) else other)

    __mul__ = __rmul__ = _times

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_add = func in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
        if is_add and not kwargs and len(args) == 2:
            deferred, other = args if isinstance(args[0], cls) else args[::-1]
            return deferred._plus(other)
        args, kwargs = tree_map_only(cls, cls.tensor, (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return f"DeferredRoutedSum(shape={tuple(self.shape)}, dtype={self.dtype}, {self.tail})"


def _delegate(name: str) -> Any:
    def method(self: DeferredRoutedSum, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*tree_map_only(DeferredRoutedSum, DeferredRoutedSum.tensor, args))

    return method


# Python looks operators up on the class, never through __getattr__.
for _name in (
    "sub", "rsub", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul",
    "neg", "abs", "pos", "getitem", "setitem", "len", "iter", "bool", "float", "int",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "invert", "array",
):  # fmt: skip
    setattr(DeferredRoutedSum, f"__{_name}__", _delegate(f"__{_name}__"))


def _resolve(shape: tuple[Any, ...], current: torch.Size) -> tuple[int, ...]:
    """The sizes that a view asks for, or () for what only a tensor can answer (a dtype, a shape that does not fit)."""
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
    if any(isinstance(size, torch.dtype) for size in wanted):
        return ()
    count = math.prod(current)
    if wanted.count(-1) == 1:
        known = math.prod(size for size in wanted if size != -1)
        wanted = tuple(count // known if size == -1 and known else size for size in wanted)
    return wanted if wanted.count(-1) == 0 and math.prod(wanted) == count else ()


def _is_same(target: Any, value: DeferredRoutedSum) -> bool:
    if isinstance(target, torch.dtype):
        return target == value.dtype
    if isinstance(target, (str, torch.device)):
        device = torch.device(target)
        return device.type == value.device.type and device.index in (None, value.device.index)
    return isinstance(target, bool)  # non_blocking
