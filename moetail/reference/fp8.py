"""A finished row in fp8, with its scales."""

from __future__ import annotations

import torch

from moetail.quantization import Quant, check_columns


def quantize(h: torch.Tensor, quant: Quant) -> tuple[torch.Tensor, torch.Tensor]:
    """Definition of an op's `quant_out`: (values [T, H] float8_e4m3fn, scales [T, H / group]) of a finished h [T, H].

    `moetail.Quant` says what each format is. To nearest even; a quotient above 448 (by a rounding) becomes 448.
    Raises: ValueError where H is no multiple of the format's group.
    """
    T, H = h.shape
    check_columns(quant, H)
    x = h.float().reshape(T, H // quant.group, quant.group)
    one = torch.ones((), device=h.device)  # rms_norm says why a divisor is a tensor
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    finite = largest < 0x7F800000
    largest = largest.view(torch.float32).clamp(min=quant.least).view(torch.int32)
    if quant.power_of_two:
        # 448 is 1.75 * 2**8: a fraction above .75 (0x600000) carries into the exponent.
        exponent = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=0)
        scaled = x * ((254 - exponent) << 23).view(torch.float32)[..., None]
        scales = exponent.to(torch.uint8) if quant.scale_dtype == torch.uint8 else (exponent << 23).view(torch.float32)
    else:
        scales = largest.view(torch.float32) / (one * 448)
        scaled = x / scales[..., None]
    values = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    values = torch.where(finite[..., None], values, 0x7F).view(torch.float8_e4m3fn)
    nan = 0xFF if quant.scale_dtype == torch.uint8 else float("nan")
    return values.reshape(T, H), torch.where(finite, scales, nan)
