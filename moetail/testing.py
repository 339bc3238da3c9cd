"""Inputs and comparisons for tests, benches and users' own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moetail.numerics import Numerics

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FinalizeInputs:
    """The arguments of one finalize; memory that no live slot names is NaN."""

    rows: torch.Tensor
    row_map: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor
    shared_gate: torch.Tensor

    def weights_for(self, numerics: Numerics) -> torch.Tensor | None:
        return self.weights if numerics.uses_weights else None


def finalize_inputs(
    T: int,
    K: int,
    H: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weights_dtype: torch.dtype = torch.float32,
    map_dtype: torch.dtype = torch.int32,
    pad: int = 0,
    absent: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
) -> FinalizeInputs:
    """Random inputs: T*K live rows in shuffled order among 5 dead ones, `pad` dead columns behind each row, a fraction
    `absent` of slots that are not there (-1, or beyond R). Magnitudes spread over 2**12: order shows in the bits.
    """
    g = torch.Generator().manual_seed(seed)
    R = T * K + 5
    spread = torch.exp2(torch.randint(-6, 6, (R, 1), generator=g).float())
    rows = torch.full((R, H + pad), float("nan"))
    row_map = torch.randperm(R, generator=g)[: T * K].view(T, K)
    gone = torch.rand(T, K, generator=g) < absent
    live = row_map[~gone]
    rows[live, :H] = (torch.randn(R, H, generator=g) * spread)[live]
    row_map[gone] = torch.tensor([-1, -7, R, R + 1000])[torch.randint(0, 4, (int(gone.sum()),), generator=g)]
    return FinalizeInputs(
        rows.to(dtype).to(device)[:, :H],
        row_map.to(map_dtype).to(device),
        torch.rand(T, K, generator=g).to(weights_dtype).to(device),
        torch.randn(T, H, generator=g).to(dtype).to(device),
        torch.randn(T, 1, generator=g).to(dtype).to(device),
    )


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raw-bit equality, signed zeros included; a NaN equals a NaN, whatever its payload.

    Raises: AssertionError with the count and the first places that differ.
    """
    assert got.shape == want.shape, f"shape {tuple(got.shape)} must be {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"dtype {got.dtype} must be {want.dtype}"
    assert got.device == want.device, f"device {got.device} must be {want.device}"
    bits = _BITS[got.element_size()]
    differs = got.contiguous().view(bits) != want.contiguous().view(bits)
    differs &= ~(torch.isnan(got) & torch.isnan(want))
    if differs.any():
        places = differs.nonzero()[:4].tolist()
        values = [(got[tuple(p)].item(), want[tuple(p)].item()) for p in places]
        raise AssertionError(f"{int(differs.sum())} of {differs.numel()} elements differ, first at {places}: {values}")
