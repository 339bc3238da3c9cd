"""Named 8-bit formats of a hidden state, and where an op writes one beside its bf16 output.

Every format is e4m3 with one scale for each group of neighbouring columns. `moetail.reference.quantize` is the
definition. An op's `quant_out` holds what that function makes of the op's own rounded h: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Quant:
    """A format: e4m3 elements, and a scale for each `group` columns. x is about element * scale.

    FP8_GROUP128        scale = max(largest |x|, 1e-10) / 448, fp32; element = x / scale. Both divisions are correctly
                        rounded. As vLLM's per_token_group_quant_fp8 and SGLang's per_token_group_quant_8bit
    FP8_GROUP128_UE8M0  that scale rounded up to a power of two, still fp32. As theirs with use_ue8m0 (DeepGEMM)
    MXFP8               groups of 32; scale is the least power of two with largest |x| / scale <= 448, as its exponent
                        byte (E8M0). This rule is torchao's RCEIL and that of cuBLAS and FlashInfer. The OCP
                        specification's own (torchao's FLOOR) saturates what lies above 1.75 times a power of two

    In a group with an infinity or a NaN the scale is NaN (0xFF in E8M0), and so are the elements (0x7F). A group of
    zeros has zeros and, in MXFP8, the scale byte 0.
    """

    name: str
    group: int
    scale_dtype: torch.dtype
    power_of_two: bool
    least: float  # of the largest |x| that makes a scale

    FP8_GROUP128: ClassVar[Quant]
    FP8_GROUP128_UE8M0: ClassVar[Quant]
    MXFP8: ClassVar[Quant]


Quant.FP8_GROUP128 = Quant("fp8_group128", 128, torch.float32, power_of_two=False, least=1e-10)
Quant.FP8_GROUP128_UE8M0 = Quant("fp8_group128_ue8m0", 128, torch.float32, power_of_two=True, least=1e-10)
# Bytes: what vLLM's and FlashInfer's GEMMs take. torch's take `scales.view(torch.float8_e8m0fnu)`.
Quant.MXFP8 = Quant("mxfp8", 32, torch.uint8, power_of_two=True, least=0.0)

FORMATS = {quant.name: quant for quant in (Quant.FP8_GROUP128, Quant.FP8_GROUP128_UE8M0, Quant.MXFP8)}


@dataclass(frozen=True)
class Quantized:
    """A quantized [T, H], as an op's `quant_out`.

    values  [T, H]          float8_e4m3fn; inner stride 1, row stride >= H
    scales  [T, H / group]  the format's scale dtype; any strides that keep its elements apart (column-major for
                            DeepGEMM and CUTLASS on Hopper)
    """

    quant: Quant
    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def empty(quant: Quant, T: int, H: int, device: torch.device | str) -> Quantized:
        """Row-major and contiguous. Raises: ValueError for no Quant, and where H is no multiple of its group."""
        for name, size in (("T", T), ("H", H)):
            if not isinstance(size, int) or not 0 <= size < 2**31:
                raise ValueError(f"{name} must be from 0 to 2**31 - 1, got {size!r}")
        check_columns(quant, H)
        values = torch.empty(T, H, dtype=torch.float8_e4m3fn, device=device)
        return Quantized(quant, values, torch.empty(T, H // quant.group, dtype=quant.scale_dtype, device=device))


def check_columns(quant: Quant, H: int) -> None:
    """Raises: ValueError."""
    if not isinstance(quant, Quant):
        raise ValueError(f"quant must be a moetail.Quant, got {quant!r}")
    if H % quant.group:
        raise ValueError(f"quant_out must have H % {quant.group} == 0 columns for {quant.name}, got H={H}")
