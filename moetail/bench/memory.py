"""Peak memory of one program, above what was allocated before it."""

from __future__ import annotations

from collections.abc import Callable

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
