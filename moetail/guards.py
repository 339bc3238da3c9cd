"""Guards: no kernel compiled, and no host that waits for a GPU, where neither may be.

Context managers, for tests, benches and integrations alike.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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
    _check_mode(mode)
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
def no_host_sync(mode: str = "error") -> Iterator[list[HostCopy]]:
    """Watch for a host that waits for a GPU. Yields the list of copies that made it wait.

    Two watches. Torch's sync-debug mode: `.item()`, a blocking copy, a data-dependent shape. And copies between a GPU
    and unpinned host memory, which that mode does not see when they are called non-blocking. mode "error": what would
    wait raises RuntimeError and does not run. mode "warn": a warning each, torch's own of category UserWarning.

    Torch's mode belongs to the process: while any thread is inside, the syncs of all threads are reported, in the
    strictest mode of the blocks that are entered and of the mode that was set before. The last block to be left puts
    that one back, in whatever order they are left. Copies are watched in the thread that entered.
    Not watched: what torch's mode does not know (torch.distributed, torch.sparse), and copies inside compiled code.
    Without a GPU nothing is watched.

    Raises: ValueError for another mode.
    """
    _check_mode(mode)
    seen: list[HostCopy] = []

    def report(copy: HostCopy) -> None:
        seen.append(copy)
        if mode == "error":
            raise RuntimeError(f"no_host_sync: {copy}")
        warnings.warn(f"no_host_sync: {copy}", RuntimeWarning, stacklevel=4)

    if not torch.cuda.is_available():
        yield seen
        return
    with _sync_debug_mode(("default", "warn", "error").index(mode)), _CopyWatch(report):
        yield seen


@dataclass(frozen=True)
class HostCopy:
    """One copy between a GPU and host memory that is not pinned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    destination: str

    def __str__(self) -> str:
        return (
            f"a copy of {self.dtype} {self.shape} from {self.source} to {self.destination} makes the host wait: "
            f"pin the host memory"
        )


def _check_mode(mode: str) -> None:
    if mode not in ("error", "warn"):
        raise ValueError(f"mode must be 'error' or 'warn', got {mode!r}")


# The process's sync-debug mode before the first block was entered, then one entry for each block that is; or empty.
_sync_levels: list[int] = []
_sync_lock = threading.Lock()


@contextlib.contextmanager
def _sync_debug_mode(level: int) -> Iterator[None]:
    with _sync_lock:
        if not _sync_levels:
            _sync_levels.append(torch.cuda.get_sync_debug_mode())
        _sync_levels.append(level)
        torch.cuda.set_sync_debug_mode(max(_sync_levels))
    try:
        yield
    finally:
        with _sync_lock:
            _sync_levels.remove(level)
            torch.cuda.set_sync_debug_mode(max(_sync_levels))
            if len(_sync_levels) == 1:
                _sync_levels.clear()


class _CopyWatch(TorchDispatchMode):
    """Reports the copies of this thread that make the host wait, before they run."""

    def __init__(self, report: Callable[[HostCopy], None]) -> None:
        super().__init__()
        self.report = report

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or a function that torch.compile has compiled would run uncompiled in here."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for copy in _waiting_copies(func, args, kwargs):
            self.report(copy)
        return func(*args, **kwargs)


def _waiting_copies(func: Any, args: Any, kwargs: Any) -> list[HostCopy]:
    """The copies that an operator would make with the host waiting."""
    return [
        HostCopy(tuple(source.shape), source.dtype, str(source.device), str(device))
        for source, device, pinned in _copies(func, args, kwargs)
        if source.numel() and _host_waits(source.device.type, source.is_pinned(), device.type, pinned)
    ]


def _copies(func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, torch.device, bool]]:
    """(source, the destination's device, whether the destination is pinned) of each copy that an operator makes."""
    aten = torch.ops.aten
    if func is aten._to_copy.default:
        device = kwargs.get("device") or args[0].device
        # torch pins what it allocates for a non-blocking copy to the host.
        return [(args[0], torch.device(device), bool(kwargs.get("non_blocking") or kwargs.get("pin_memory")))]
    if func is aten.copy_.default:
        return [(args[1], args[0].device, args[0].is_pinned())]
    if func is aten._foreach_copy_.default:
        return [(source, into.device, into.is_pinned()) for into, source in zip(args[0], args[1], strict=True)]
    return []


def _host_waits(source: str, source_pinned: bool, destination: str, destination_pinned: bool) -> bool:
    """A GPU's copy engine reaches pinned memory only: otherwise the driver stages the copy, and the host waits."""
    if (source, destination) == ("cpu", "cuda"):
        return not source_pinned
    return (source, destination) == ("cuda", "cpu") and not destination_pinned


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
