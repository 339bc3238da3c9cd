"""What every op with a `quant_out` shares: its arguments in a schema, their checks, and their values on a CPU.

A schema carries `quant_out` as three arguments: the format's name, the values as bytes (torch compares and copies those
on every device) and the scales. All three are None where the caller wants no quantized output.
"""

from __future__ import annotations

import functools

import torch

from moetail import reference
from moetail.ops import finalize as local
from moetail.quantization import FORMATS, Quant, Quantized, check_columns

QUANT_ARGS = "str? quant, Tensor(y!)? values, Tensor(z!)? scales"
QuantArgs = tuple[str | None, torch.Tensor | None, torch.Tensor | None]


def schema_args(quant_out: Quantized | None) -> QuantArgs:
    """Raises: ValueError where it is no Quantized, or its parts have not the format's dtypes."""
    if quant_out is None:
        return None, None, None
    if not isinstance(quant_out, Quantized):
        raise ValueError(f"quant_out must be a moetail.Quantized or None, got {type(quant_out).__name__}")
    if not isinstance(quant_out.quant, Quant):
        raise ValueError(f"quant_out must have a moetail.Quant as its quant, got {quant_out.quant!r}")
    wanted = {"values": torch.float8_e4m3fn, "scales": quant_out.quant.scale_dtype}
    for part, dtype in wanted.items():
        tensor = getattr(quant_out, part)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"quant_out must have {dtype} {part} for {quant_out.quant.name}, got {got}")
    return quant_out.quant.name, quant_out.values.view(torch.uint8), quant_out.scales


def check(h: torch.Tensor, T: int, quant: str | None, values: torch.Tensor | None, scales: torch.Tensor | None) -> None:
    """What the outputs of T tokens as wide as `h` must be. Raises: ValueError."""
    if quant is None:
        return
    assert values is not None and scales is not None
    H, form = h.shape[1], FORMATS[quant]
    check_columns(form, H)
    for part, tensor, shape in (("values", values, (T, H)), ("scales", scales, (T, H // form.group))):
        if tensor.shape != shape:
            raise ValueError(f"quant_out must have {part} of shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != h.device:
            raise ValueError(f"quant_out must have its {part} on {h.device}, got {tensor.device}")
        if not _apart(tensor):
            raise ValueError(f"quant_out must have {part} that lie apart, got strides {tensor.stride()}")
    if values.stride(1) != 1:
        raise ValueError(f"quant_out must have values of inner stride 1, got strides {values.stride()}")
    if values.device.type == "cuda" and not _converts(values.device):
        raise ValueError(f"quant_out must be None below compute capability 8.9 (it has no e4m3), got {quant}")


def check_no_overlap(
    values: torch.Tensor | None, scales: torch.Tensor | None, others: tuple[tuple[str, torch.Tensor | None], ...]
) -> None:
    """Neither part may share memory with the other or with any of `others`. Raises: ValueError."""
    if values is None or scales is None:
        return
    for part, tensor in (("values", values), ("scales", scales)):
        for name, other in (*others, *((("scales", scales),) if part == "values" else ())):
            if other is not None and local._overlap(tensor, other):
                raise ValueError(f"quant_out must not overlap {name}, got {part} in its memory")


def write(h: torch.Tensor, quant: str | None, values: torch.Tensor | None, scales: torch.Tensor | None) -> None:
    """Quantize a finished h, by the definition."""
    if quant is None:
        return
    assert values is not None and scales is not None
    made, made_scales = reference.quantize(h, FORMATS[quant])
    values.copy_(made.view(torch.uint8))
    scales.copy_(made_scales)


def _apart(tensor: torch.Tensor) -> bool:
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach = reach + (size - 1) * stride if size > 1 else reach
    return True


@functools.cache
def _converts(device: torch.device) -> bool:
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)
