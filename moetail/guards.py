"""Guards: no kernel compiled where none may be. Context managers, for tests, benches and integrations alike."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compilation:
    """One kernel compiled inside the block, and the specialization that asked for it."""

    compiler: str
    kernel: str
    specialization: str

    def __str__(self) -> str:
        return f"{self.compiler} compiled {self.kernel}: {self.specialization}"


@contextlib.contextmanager
def no_jit(mode: str = "error") -> Iterator[list[Compilation]]:
    """Watch for just-in-time compilation: enter it after warm-up. Yields the list of what was compiled.

    mode "error": the launch that compiled raises RuntimeError naming the kernel and its specialization (Triton calls
    its hook after the compilation, so the kernel is then in the cache). mode "warn": a RuntimeWarning each.
    Watched: Triton (its post-compile hook; a hook that was there before still runs, and is put back) and numba, if
    imported. Triton's explicit warm-ups count: a first call of ours compiles that way. A kernel that numba loads from
    its disk cache is not compiled. Not watched: torch.compile's own codegen.

    Raises: ValueError for another mode.
    """
    if mode not in ("error", "warn"):
        raise ValueError(f"mode must be 'error' or 'warn', got {mode!r}")
    seen: list[Compilation] = []

    def report(event: Compilation) -> None:
        seen.append(event)
        if mode == "error":
            raise RuntimeError(f"no_jit: {event}")
        warnings.warn(f"no_jit: {event}", RuntimeWarning, stacklevel=3)

    with contextlib.ExitStack() as stack:
        if "triton" in sys.modules:
            stack.enter_context(_triton(report))
        if "numba" in sys.modules:
            stack.enter_context(_numba(report))
        yield seen


@contextlib.contextmanager
def _triton(report: Callable[[Compilation], None]) -> Iterator[None]:
    from triton import knobs

    previous = knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> Any:
        result = previous(**event) if previous is not None else None
        report(Compilation("triton", event["fn"].name, event["repr"]))
        return result

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = previous


@contextlib.contextmanager
def _numba(report: Callable[[Compilation], None]) -> Iterator[None]:
    from numba.core import event

    class Listener(event.Listener):
        """A compilation is many passes over one function: its first is reported."""

        def __init__(self) -> None:
            self.reported: set[str] = set()

        def on_start(self, event: Any) -> None:
            name = event.data["qualname"]
            if name not in self.reported:
                self.reported.add(name)
                report(Compilation("numba", name, str(event.data.get("args", ""))))

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:run_pass", Listener()):
        yield
