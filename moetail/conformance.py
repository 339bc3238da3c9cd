"""Which numerics does a finalize have? The named cases, for any implementation.

    moetail conformance --impl mypackage.kernels:finalize --device cuda

The implementation is a function `f(rows [R, H], row_map [T, K] int32, weights [T, K] or None, shared [T, H] or None)`
-> [T, H]. It is fed the cases below; a profile it implements matches its reference on raw bits in every core case. The
other cases say what it can take: absent slots, dead memory, odd sizes, weights of another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetail import module_function, reference
from moetail.numerics import PRESETS, Numerics
from moetail.testing import assert_same_bits, finalize_inputs

Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class ConformanceCase:
    """`core` cases decide the profile; the others are limits. `inputs`: arguments of `testing.finalize_inputs`."""

    name: str
    inputs: dict[str, Any]
    core: bool = True
    shared: bool = True


CASES = (
    # fp32 order and FMA show only where many elements are summed: about 1 in 100,000 bf16 outputs differs.
    ConformanceCase("many-tokens", {"T": 512, "K": 6, "H": 2048}),
    ConformanceCase("many-slots", {"T": 256, "K": 10, "H": 2048}),
    ConformanceCase("two-slots", {"T": 256, "K": 2, "H": 1024}),
    ConformanceCase("small-batch", {"T": 4, "K": 8, "H": 7168}),
    ConformanceCase("one-token", {"T": 1, "K": 6, "H": 5120}),
    ConformanceCase("no-shared", {"T": 64, "K": 6, "H": 2048}, shared=False),
    ConformanceCase("bf16-weights", {"T": 64, "K": 8, "H": 2048, "weights_dtype": torch.bfloat16}, core=False),
    ConformanceCase("odd-top-k", {"T": 16, "K": 7, "H": 1024}, core=False),
    ConformanceCase("odd-hidden", {"T": 16, "K": 6, "H": 1000}, core=False),
    ConformanceCase("hidden-not-a-vector", {"T": 16, "K": 6, "H": 1001}, core=False),
    ConformanceCase("padded-rows", {"T": 16, "K": 6, "H": 1024, "pad": 128}, core=False),
    ConformanceCase("int64-map", {"T": 16, "K": 6, "H": 1024, "map_dtype": torch.int64}, core=False),
    ConformanceCase("no-tokens", {"T": 0, "K": 6, "H": 1024}, core=False),
    # Last: an implementation that reads what an absent slot names may fault, and takes its CUDA context with it.
    ConformanceCase("absent-slots", {"T": 64, "K": 6, "H": 1024, "absent": 0.2}, core=False),
    ConformanceCase("every-slot-absent", {"T": 4, "K": 6, "H": 1024, "absent": 1.0}, core=False),
)


@dataclass(frozen=True)
class ConformanceReport:
    """`outcome[case][preset]`: "same", "differs: ..", "refused: .." or "undefined: .."; `profiles`: the presets whose
    core cases all match."""

    implementation: str
    device: str
    outcome: dict[str, dict[str, str]]
    profiles: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        return {
            "op": "finalize", "implementation": self.implementation, "device": self.device,
            "profiles": list(self.profiles), "outcome": self.outcome,
        }  # fmt: skip


def load(spec: str) -> Implementation:
    """`module:function`. Raises: ValueError saying what was wrong with it."""
    return module_function.load("impl", spec)


def run(name: str, implementation: Implementation, device: str, numerics: tuple[str, ...] = ()) -> ConformanceReport:
    """Feed every case to the implementation. `numerics`: the presets to try, all of them by default.

    Raises: ValueError for a name that is no preset.
    """
    unknown = [n for n in numerics if n not in PRESETS]
    if unknown:
        raise ValueError(f"numerics must be among {', '.join(PRESETS)}, got {', '.join(unknown)}")
    presets = numerics or tuple(PRESETS)
    outcome: dict[str, dict[str, str]] = {case.name: {} for case in CASES}
    lost = ""
    for case in CASES:
        for preset in presets:
            answer = lost or _try(case, PRESETS[preset], implementation, device)
            outcome[case.name][preset] = answer
            if not lost and device.startswith("cuda") and not _context_lives():
                lost = f"not run: {case.name} took the CUDA context with it"
    core = [case.name for case in CASES if case.core]
    profiles = tuple(p for p in presets if all(outcome[c][p] == "same" for c in core))
    return ConformanceReport(name, device, outcome, profiles)


def _try(case: ConformanceCase, numerics: Numerics, implementation: Implementation, device: str) -> str:
    x = finalize_inputs(**case.inputs, device=device)
    shared = x.shared if case.shared else None
    weights = x.weights_for(numerics)
    try:
        want = reference.finalize(x.rows, x.row_map, weights, shared, numerics=numerics)
    except ValueError as error:
        return f"undefined: {error}"
    try:
        got = implementation(x.rows, x.row_map, weights, shared)
        if device.startswith("cuda"):
            torch.zeros(1, device=device)  # a launch that failed is reported by the next one
            torch.cuda.synchronize()
    except Exception as error:  # whatever a foreign implementation raises is its answer
        return f"refused: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return _compare(got, want)


def _context_lives() -> bool:
    try:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _compare(got: torch.Tensor, want: torch.Tensor) -> str:
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        return f"differs: {str(error).partition(', first')[0]}"
    return "same"
