"""vLLM: the tail of every MoE layer as one kernel, with the bits that vLLM has. Nothing to call: vLLM's plugin loader
does (entry point `vllm.general_plugins`), in every process.

What runs, where and why: docs/vllm.md. Importing this file imports no vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

NAME = "MoERunner"  # vLLM's class that is replaced, by its name


@dataclass(frozen=True)
class LayerReport:
    """What one MoE layer runs and why. `calls`: how many Python saw (a replayed graph counts once, at its capture).
    `finished`: how many of them one kernel of ours finished. `summed_by_vllm`: those of which it made all but the sum
    over ranks, which was vLLM's own all-reduce: more tokens than our workspace holds, or none could be made."""

    layer: str
    path: str
    reason: str
    calls: int
    finished: int
    summed_by_vllm: int = 0

    def __str__(self) -> str:
        summed = f", {self.summed_by_vllm} more but for vLLM's own all-reduce" if self.summed_by_vllm else ""
        return f"{self.layer}: {self.path} ({self.reason}); {self.finished} of {self.calls} calls seen{summed}"


def register() -> None:
    """The entry point. Never raises: whatever does not fit leaves vLLM as it is, and one line says what."""
    log = logging.getLogger("vllm.moetail")
    try:
        why = _register()
    except Exception as error:  # vLLM must start whatever happens here
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning("moetail: vLLM stays as it is: %s", why)


def _register() -> str | None:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from moetail.integrations.vllm import signatures

    already = op_registry_oot.get(NAME)
    if already is not None:
        return None if already.__module__.startswith(__name__) else f"{already.__module__} has replaced {NAME} already"
    problems = signatures.problems()
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"this vLLM is not one that moetail knows: {problems[0]}{more}"
    from moetail.integrations.vllm.runner import MoETailRunner

    PluggableLayer.register_oot(name=NAME)(MoETailRunner)
    return None


def explain(model: Any) -> list[LayerReport]:
    """One row a MoE layer of a loaded vLLM model: `llm.apply_model(moetail.integrations.vllm.explain)`."""
    rows = []
    for name, module in model.named_modules():
        tail = getattr(module, "tail", None)
        if tail is not None and hasattr(module, "routed_experts"):
            path, why = tail.decision.path.value, tail.decision.why
            rows.append(LayerReport(name, path, why, tail.calls, tail.finished, tail.summed_by_vllm))
        elif hasattr(module, "routed_experts") and hasattr(module, "_forward_impl"):
            rows.append(LayerReport(name, "stock", f"its runner is {type(module).__name__}", 0, 0))
    return rows
