"""Named numerics: which bits a finalize produces.

    y[t] = sum_k weights[t,k] * rows[row_map[t,k]]     routed sum, fp32 accumulators that start at +0.0
    y    = y * routed_scale + shared                   shared-expert add

A `Numerics` says how each product is rounded, in which order the slots are added, where the routed scale is
rounded, and whether the routed sum is rounded before the add. Two kernels with the same `Numerics` have the same bits.

Source of each preset: measured on the named system, see the table in docs/numerics.md.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

_PRODUCTS = ("fma", "round_f32", "round_row", "none", "promote")
_ORDERS = re.compile(r"sequential|interleaved4|split\((2|4|8|16)\)|torch_cpu|torch_sum|flashinfer")
_HALF = (torch.bfloat16, torch.float16)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True)
class Numerics:
    """The rounding points of a finalize. Frozen; hashable; prints itself.

    product:   "fma"       fp32 fused multiply-add into the accumulator
               "round_f32" fp32 multiply, rounded to fp32, then added
               "round_row" fp32 multiply, rounded to the rows' dtype, then added
               "none"      the rows are already weighted (`weights=None`)
               "promote"   a family: torch's type promotion of rows * weights ("round_row" when both have the same
                           16-bit dtype, else "round_f32")
    order:     "sequential"    one accumulator, slot order
               "split(n)"      n accumulators, slot k goes to k % n, then ((a0+a1)+a2)+...
               "interleaved4"  another name of "split(4)"
               "torch_cpu"     torch.sum(dim=1) on x86: slot order, except that the last H % 32 columns (H % 4 where
                               H < 8) use four accumulators whose leftover slots all go to the first; K <= 16
               "torch_sum"     a family: torch.sum(dim=1) on the tensor's device
               "flashinfer"    a family: FlashInfer >= 0.7.2, a function of (T, H, K)
    rounding:  "two"  routed sum rounded to the rows' dtype, then the shared add rounded again
               "one"  routed sum + shared rounded once
    zero:      "keep" | "positive" (an output of -0 becomes +0)
    scale:     "round_row"  the routed sum is rounded to the rows' dtype, scaled, and rounded again
               "f32"        the scale multiplies the fp32 sum

    A sigmoid gate follows `rounding`: with "two", sigmoid and sigmoid * shared are each rounded to the rows' dtype;
    with "one", shared enters the fp32 sum by one FMA with the fp32 sigmoid.
    """

    product: str
    order: str = "sequential"
    rounding: str = "two"
    zero: str = "keep"
    scale: str = "round_row"
    # The five fields in one string: how an op's schema carries a Numerics. Made once; Dynamo reads it as a constant.
    spec: str = field(init=False, repr=False, compare=False)

    TRTLLM: ClassVar[Numerics]
    PREWEIGHTED: ClassVar[Numerics]
    TRANSFORMERS: ClassVar[Numerics]
    FLASHINFER: ClassVar[Numerics]
    SINGLE_ROUNDING: ClassVar[Numerics]

    def __post_init__(self) -> None:
        fields = (self.product, self.order, self.rounding, self.zero, self.scale)
        for name, value in zip(("product", "order", "rounding", "zero", "scale"), fields, strict=True):
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a word (see the class), got {value!r}")
        object.__setattr__(self, "spec", "/".join(fields))
        _one_of("product", self.product, _PRODUCTS)
        _one_of("rounding", self.rounding, ("two", "one"))
        _one_of("zero", self.zero, ("keep", "positive"))
        _one_of("scale", self.scale, ("round_row", "f32"))
        if not _ORDERS.fullmatch(self.order):
            raise ValueError(
                f"order must be sequential, interleaved4, split(2|4|8|16), torch_cpu, torch_sum or flashinfer, "
                f"got {self.order!r}"
            )

    @property
    def name(self) -> str:
        """The preset's name, or the five fields where it is none."""
        return _NAMES.get(self, self.spec)

    @staticmethod
    @functools.cache
    def parse(spec: str) -> Numerics:
        """The Numerics of a spec string or a preset's name."""
        fields = spec.split("/")
        if spec not in PRESETS and len(fields) != 5:
            raise ValueError(
                f"numerics must be one of {', '.join(PRESETS)} or product/order/rounding/zero/scale, got {spec!r}"
            )
        return PRESETS[spec] if spec in PRESETS else Numerics(*fields)

    @property
    def uses_weights(self) -> bool:
        return self.product != "none"

    def resolve(
        self, T: int, K: int, H: int, device_type: str, rows_dtype: torch.dtype, weights_dtype: torch.dtype | None
    ) -> Numerics:
        """The concrete Numerics of one call: families replaced by what they mean at these static facts.

        Raises: ValueError where the family defines no bits (torch_sum on CUDA with K > 48; on a CPU with K > 16, H == 1
        or, off x86, H % 32 != 0).
        """
        product, order = self.product, self.order
        if product == "promote":
            product = "round_row" if rows_dtype in _HALF and weights_dtype == rows_dtype else "round_f32"
        if order == "torch_sum":
            order = _torch_sum_order(K, H, device_type)
        elif order == "flashinfer":
            order = _flashinfer_order(T, K, H)
        elif order == "interleaved4":
            order = "split(4)"
        return replace(self, product=product, order=order)


Numerics.TRTLLM = Numerics("fma")
Numerics.PREWEIGHTED = Numerics("none")
Numerics.TRANSFORMERS = Numerics("promote", order="torch_sum")
Numerics.FLASHINFER = Numerics("fma", order="flashinfer")
Numerics.SINGLE_ROUNDING = Numerics("fma", rounding="one", scale="f32")

PRESETS = {n: getattr(Numerics, n) for n in ("TRTLLM", "PREWEIGHTED", "TRANSFORMERS", "FLASHINFER", "SINGLE_ROUNDING")}
_NAMES = {value: name for name, value in PRESETS.items()}


def slot_groups(order: str, K: int) -> tuple[tuple[int, ...], ...]:
    """The slots of each accumulator, in the order they are added; the accumulators are then added left to right.

    `order` is concrete. For "torch_cpu" these are the groups of the last columns (`torch_cpu_main_columns`); the
    others are sequential.
    """
    if order == "sequential":
        return (tuple(range(K)),)
    if order == "torch_cpu":
        full = K // 4 * 4
        groups = [tuple(range(g, full, 4)) for g in range(4)]
        groups[0] += tuple(range(full, K))
        return tuple(g for g in groups if g)
    n = int(order.removeprefix("split(").removesuffix(")"))
    return tuple(tuple(range(g, K, n)) for g in range(min(n, K)))


def torch_cpu_main_columns(H: int) -> int:
    """How many leading columns torch.sum(dim=1) adds in plain slot order on x86.

    Four vectors of eight floats at a time; narrower than one vector, four scalars at a time. Checked on raw bits with
    torch 2.13 for H from 2 to 5120, fp32, bf16 and fp16 (tests/test_numerics.py).
    """
    return H - H % (32 if H >= 8 else 4)


def _torch_sum_order(K: int, H: int, device_type: str) -> str:
    """CUDA: four accumulators for fp32, bf16 and fp16 alike (an H200, torch 2.11, values spread over 2**20: no
    differing bit at K 1 to 48, H 2 to 5120, T 1 to 1000; at K 64 torch splits the sum over threads)."""
    if device_type == "cuda":
        if K > 48:
            raise ValueError(f"numerics TRANSFORMERS is defined on cuda for K <= 48, got K={K}: torch.sum splits above")
        return "split(4)"
    if device_type != "cpu":
        raise ValueError(f"numerics TRANSFORMERS is defined on cpu and cuda, not on {device_type}")
    if K > 16:
        raise ValueError(f"numerics TRANSFORMERS is defined on cpu for K <= 16, got K={K}: torch.sum cascades above")
    if H == 1:
        raise ValueError("numerics TRANSFORMERS is defined on cpu for H >= 2, got H=1: torch.sum reduces another axis")
    if H % 32 == 0:
        return "sequential"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        raise ValueError(f"numerics TRANSFORMERS is defined on this cpu for H % 32 == 0, got H={H}")
    return "torch_cpu"


def _flashinfer_order(T: int, K: int, H: int) -> str:
    """FlashInfer >= 0.7.2, finalizeKernelSmallBatch: its launch condition and its kSplit."""
    small_batch = -(-H // 256) * min(8192, T) < 1184 and 4 < K <= 64 and H % 8 == 0
    if not small_batch:
        return "sequential"
    return f"split({next(n for n, most in ((2, 8), (4, 16), (8, 32), (16, 64)) if most >= K)})"
