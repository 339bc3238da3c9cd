"""Random parameters by name: a name and a seed give the same tensor on every rank and stage.

A tensor is made whole on its device, whose own generator decides (a GPU's numbers are not a CPU's), and then cut to
this rank's part, so that one model is one whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Parameters:
    """`split`: the dimension along which a tensor is cut into `size` equal parts, of which this is number `rank`."""

    device: torch.device
    rank: int = 0
    size: int = 1
    seed: int = 0

    def normal(
        self, name: str, *shape: int, std: float, mean: float = 0.0, dtype: torch.dtype = BF16, split: int | None = None
    ) -> torch.Tensor:
        whole = torch.empty(shape, device=self.device).normal_(mean, std, generator=self._generator(name))
        return self._part(whole, split).to(dtype).contiguous()

    def uniform(self, name: str, *shape: int, low: float, high: float) -> torch.Tensor:
        """fp32, the same on every rank."""
        return torch.rand(shape, generator=self._generator(name), device=self.device) * (high - low) + low

    def linear(self, name: str, out: int, inner: int, split: int | None = None) -> torch.Tensor:
        """A weight [out, inner] that keeps the variance of its input."""
        return self.normal(name, out, inner, std=inner**-0.5, split=split)

    def norm(self, name: str, *shape: int) -> torch.Tensor:
        """Weights about 1."""
        return self.normal(name, *shape, std=0.1, mean=1.0)

    def stacked(self, names: list[str], make: Callable[[Parameters, str], torch.Tensor]) -> torch.Tensor:
        """[len(names), ..]: `make(parameters, name)` of each, on a CPU side by side on all cores."""
        first = make(self, names[0])
        result = torch.empty(len(names), *first.shape, dtype=first.dtype, device=self.device)

        def fill(i: int) -> None:
            result[i].copy_(make(self, names[i]))

        if self.device.type == "cuda":
            for i in range(len(names)):
                fill(i)
        else:
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // self.size)) as pool:
                list(pool.map(fill, range(len(names))))
        return result

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))

    def _part(self, whole: torch.Tensor, split: int | None) -> torch.Tensor:
        if split is None:
            return whole
        length = whole.shape[split] // self.size
        return whole.narrow(split, self.rank * length, length)
