"""Run a C function on torch's own CPU threads.

torch's OpenMP workers spin for about a millisecond after each of its parallel regions. A second thread pool competes
with them for the cores: on two cores the finalize of 512 tokens took 2.2 ms on threads of its own and 1.4 ms where the
workers do not spin. So the function runs on those workers: GOMP_parallel of the OpenMP runtime that torch has loaded
(libgomp, or libiomp5 and libomp, which export it too on Linux). Where there is none, a thread pool.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(function: int, argument: int, threads: int) -> None:
    """Call the C function at address `function` with the pointer `argument`, once on each of `threads` threads.

    The GIL is released meanwhile. The calls share nothing but the argument: the function divides the work itself.
    """
    if threads == 1:
        _FUNCTION(function)(argument)
        return
    parallel = _gomp_parallel()
    if parallel is not None:
        parallel(function, argument, threads, 0)
        return
    others = [_pool(os.getpid(), threads - 1).submit(_FUNCTION(function), argument) for _ in range(threads - 1)]
    _FUNCTION(function)(argument)
    for other in others:
        other.result()


@functools.cache
def _gomp_parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime that torch uses, or None."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    loaded = {line[5] for line in fields if len(line) == 6}  # a path may hold spaces
    runtimes = [path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    for path in sorted(runtimes, key=lambda path: "torch" not in path):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            function.restype = None
            return function
    return None


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """One pool a process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="moetail")
