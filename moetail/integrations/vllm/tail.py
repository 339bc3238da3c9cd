"""One layer's tail while its call runs: what the runner's op and the experts' hook share.

A call begins in the runner's op, is finished by the hook at the experts' reduction, and ends in the op. Where the hook
finds that it cannot finish it, vLLM's own reduction runs and the op does the rest as vLLM does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from moetail.comm.finalize_all_reduce import finalize_all_reduce
from moetail.comm.memory import one_shot_tokens
from moetail.comm.workspace import Workspace
from moetail.integrations.vllm import facts
from moetail.integrations.vllm.facts import Decision, Path
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize


@dataclass
class Call:
    """`shared_input` [T, H]: what the shared experts read. `shared_ran`: the hook ran them. `y` [T, H]: the result."""

    shared_input: torch.Tensor | None
    shared_ran: bool = False
    y: torch.Tensor | None = None


class Tail:
    """Of one runner. `calls`: how many Python saw; a replayed graph is seen once, when it is captured. `finished`: how
    many of them one kernel of ours finished as the path says. `summed_by_vllm`: those that a kernel of ours finished
    but for the sum over ranks, which vLLM's own all-reduce made."""

    def __init__(self, runner: Any, decision: Decision) -> None:
        self._runner = runner
        self.decision = decision
        self.call: Call | None = None
        self.calls = 0
        self.finished = 0
        self.summed_by_vllm = 0

    def take(
        self,
        rows: torch.Tensor,
        row_map: torch.Tensor,
        weights: torch.Tensor | None,
        numerics: Numerics,
        num_valid_rows: torch.Tensor | None,
    ) -> bool:
        """Finish the call under way; False where vLLM's own reduction has to."""
        call, path, whole = self.call, self.decision.path, True
        T, H = row_map.shape[0], rows.shape[1]
        if call is None or facts.measured_slower(path, _gpu(rows.device), T):
            return False
        if path is Path.REDUCTION:
            call.y = finalize(rows, row_map, weights, num_valid_rows=num_valid_rows, numerics=numerics)
        else:
            shared = self._shared(call)
            if shared.shape != (T, H) or shared.dtype != rows.dtype or shared.stride(1) != 1:
                return False
            call.y, whole = self._added(rows, row_map, weights, shared, num_valid_rows, numerics)
        if whole:
            self.finished += 1
        else:
            self.summed_by_vllm += 1
        return True

    def _added(
        self, rows: Any, row_map: Any, weights: Any, shared: Any, num_valid_rows: Any, numerics: Numerics
    ) -> tuple[torch.Tensor, bool]:
        """(the call's result, whether one kernel of ours made all of it)"""
        args = (rows, row_map, weights, shared)
        options = {"routed_scale": self._runner.routed_scaling_factor, "num_valid_rows": num_valid_rows,
                   "numerics": numerics}  # fmt: skip
        if self.decision.path is Path.FUSED:
            return finalize(*args, **options), True
        workspace = self._runner.tail_workspace(rows.shape[1], rows.dtype)
        if workspace is not None and row_map.shape[0] <= workspace.max_tokens:
            workspace.check()
            return finalize_all_reduce(*args, workspace=workspace, **options), True
        return self._runner.reduce_over_ranks(finalize(*args, **options)), False

    def _shared(self, call: Call) -> torch.Tensor:
        """The shared experts' output, on the current stream. It stays where the runner will pop it."""
        shared = self._runner._shared_experts
        slot = shared._output_idx
        if shared._output[slot] is None:
            # Up to vLLM 0.28 the side stream's work is launched behind the experts: do it now, and not again.
            self._runner.run_shared_experts(call.shared_input)
            call.shared_ran = True
        elif hasattr(shared, "wait") and self._runner.shared_experts_overlap(call.shared_input):
            shared.wait()
        return shared._output[slot]


@functools.lru_cache(maxsize=16)
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def make_workspace(
    group: Any, cpu_group: Any, hidden: int, dtype: torch.dtype, device: torch.device
) -> Workspace | None:
    """For all layers of one tensor-parallel group, and calls that go in one shot: of more tokens vLLM's all-reduce has
    the sum. Made by all ranks together in their first call. None on every rank where one of them cannot: vLLM's
    all-reduce then serves all."""
    workspace = None
    try:
        max_tokens = one_shot_tokens(device, group.size())
        workspace = Workspace(group, max_tokens, hidden, dtype, device=device)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    made = torch.tensor([workspace is not None], dtype=torch.int32)
    torch.distributed.all_reduce(made, op=torch.distributed.ReduceOp.MIN, group=cpu_group)
    if made.item():
        return workspace
    if workspace is not None:
        workspace.destroy()
        problem = "another rank could not make its workspace"
    from vllm.logger import init_logger

    init_logger("vllm.moetail").warning("moetail: vLLM's own all-reduce stays: %s", problem)
    return None
