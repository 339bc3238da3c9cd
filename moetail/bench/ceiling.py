"""The most that fusing a tail can give a model's step: a claim above it is wrong before anyone measures.

The seed's first claim (2.1 % of a decode step) exceeded what its own profile allowed (1.4 %).
"""

from __future__ import annotations

from dataclasses import dataclass

from moetail.bench.stats import CEILING_SLACK


@dataclass(frozen=True)
class Ceiling:
    """Times in microseconds: one layer's tail as separate kernels and fused, the layers, and the whole step."""

    separate_us: float
    fused_us: float
    layers: int
    step_us: float

    def __post_init__(self) -> None:
        for name in ("separate_us", "fused_us", "layers", "step_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.separate_us * self.layers > self.step_us:
            total = self.separate_us * self.layers
            raise ValueError(f"step_us must be at least the tails alone ({total:.1f} us), got {self.step_us}")

    @property
    def gain_us(self) -> float:
        return (self.separate_us - self.fused_us) * self.layers

    @property
    def gain(self) -> float:
        """The share of the step that can go, below 0 where the fused tail is slower."""
        return self.gain_us / self.step_us

    def allows(self, claimed_gain: float, slack: float = CEILING_SLACK) -> bool:
        """Whether a claimed share of the step is plausible; `slack` for what a tail alone does not show (cache state,
        launch gaps)."""
        return claimed_gain <= max(self.gain, 0.0) * (1 + slack)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x ({self.separate_us:.2f} - {self.fused_us:.2f}) us = {self.gain_us:.1f} us "
            f"of a step of {self.step_us / 1e3:.3f} ms: at most {self.gain:.2%} less time"
        )


def from_bytes(T: int, K: int, H: int, tb_per_s: float, layers: int, step_us: float, element_size: int = 2) -> Ceiling:
    """The ceiling where both tails run at `tb_per_s`: separate = finalize, then an add; fused = both in one pass.

    Per token the finalize reads K rows and writes one, the add reads two and writes one; fused reads K + 1, writes one.
    """
    if not tb_per_s > 0:
        raise ValueError(f"tb_per_s must be above 0, got {tb_per_s}")
    row = T * H * element_size
    us = row / (tb_per_s * 1e6)
    return Ceiling((K + 4) * us, (K + 2) * us, layers, step_us)
