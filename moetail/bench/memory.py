"""Peak memory of one program, above what was allocated before it; and what is free before one is begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from moetail.bench.profile import kineto, kineto_events


def peak_bytes(program: Callable[[], object], device: torch.device) -> int:
    """CUDA: the caching allocator's peak. CPU: torch's own allocations, replayed from a profile (resident memory would
    count what the C library keeps for later)."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        program()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    with kineto(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = program()
    del result
    held = peak = 0
    events = [e for e in kineto_events(prof) if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def free_bytes(device: torch.device) -> int:
    """CUDA: what the driver has and what torch's allocator holds unused. CPU: what the system calls available, whatever
    a container's limit; all of it where it does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return available[0] if available else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(what: str, needed: int, device: torch.device, parts: str = "its parameters take") -> None:
    """Before anything of `needed` bytes is allocated. Raises: ValueError naming `what` and both numbers."""
    free = free_bytes(device)
    if needed > free:
        raise ValueError(
            f"{what} must fit in memory: {parts} {needed / 1e9:.1f} GB, got {free / 1e9:.1f} GB free on {device}"
        )
