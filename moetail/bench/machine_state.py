"""What the machine was doing around a case: clocks, heat and throttling, read and never set."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import torch

_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
# Bits of clocks_event_reasons.active that mean slower than the clock asked for: software power cap, hardware slowdown,
# software thermal, hardware thermal, power brake. Idle (1) and application clocks (2) are no throttling.
_THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def read(device: torch.device) -> dict[str, Any]:
    """CUDA: nvidia-smi's numbers of this GPU (MHz, degrees C, W), and whether it is throttled. CPU: the load average
    over the last minute. A machine that does not tell gives an empty dict."""
    if device.type != "cuda":
        return {"load_1min": round(os.getloadavg()[0], 2)}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return {}
    return parse(done.stdout) if done.returncode == 0 else {}


def parse(line: str) -> dict[str, Any]:
    """One csv line of nvidia-smi; a field that it does not know ([N/A]) is None."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(_FIELDS):
        return {}
    *numbers, reasons = values
    state: dict[str, Any] = {
        name.replace(".", "_"): _number(value) for name, value in zip(_FIELDS[:-1], numbers, strict=True)
    }
    state["throttled"] = bool(int(reasons, 16) & _THROTTLED) if reasons.startswith("0x") else None
    return state


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
