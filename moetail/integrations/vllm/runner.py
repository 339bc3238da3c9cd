"""The out-of-tree MoERunner: vLLM's own, with the tail of a call finished at the experts' reduction.

What it changes of `MoERunner.forward`, and no more: the opaque op returns one tensor where the add is ours, so vLLM's
add has nothing to add; the routed scale and the all-reduce are skipped where that tensor already holds them.
Imports vLLM, and is imported by `register` only after `signatures.problems()` found nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.runner import moe_runner as stock
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.utils.torch_utils import direct_register_custom_op

from moetail.comm.workspace import Workspace
from moetail.integrations.vllm import build, hooks
from moetail.integrations.vllm.facts import Path
from moetail.integrations.vllm.tail import Call, Tail, make_workspace

logger = init_logger("vllm.moetail")
_lib = torch.library.Library("moetail", "FRAGMENT")


def _moe_forward(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: stock._layer_name_type,
) -> torch.Tensor:
    layer = stock.get_layer_from_name(stock._resolve_layer_name(layer_name))
    return layer.forward_with_tail(hidden_states, router_logits, shared_experts_input, input_ids)


def _moe_forward_fake(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: stock._layer_name_type,
) -> torch.Tensor:
    return torch.empty_like(hidden_states)


# The annotations above are strings, of which torch makes no schema.
for _function in (_moe_forward, _moe_forward_fake):
    _function.__annotations__.update(
        dict.fromkeys(("hidden_states", "router_logits", "return"), torch.Tensor),
        shared_experts_input=torch.Tensor | None, input_ids=torch.Tensor | None, layer_name=stock._layer_name_type,
    )  # fmt: skip
direct_register_custom_op(
    op_name="vllm_moe_forward", op_func=_moe_forward, mutates_args=[], fake_impl=_moe_forward_fake,
    target_lib=_lib, tags=(torch.Tag.needs_fixed_stride_order,),
)  # fmt: skip


class MoETailRunner(stock.MoERunner):
    """`tail.decision`: what this layer runs. Everything is decided when the layer is built."""

    tail: Tail
    _hooked: Any  # the kernel that carries the hooks
    _adds: bool
    _reduces: bool

    def _select_forward(self) -> Any:
        entry = super()._select_forward()
        config = get_current_vllm_config()
        decision = build.decide_for(self, config)
        if decision.path is not Path.STOCK and not build.mark(config):
            decision = build.UNMARKED
        # Not through nn.Module: none of these is a submodule. The two flags are what Dynamo reads, as constants.
        object.__setattr__(self, "tail", Tail(self, decision))
        object.__setattr__(self, "_hooked", None)
        object.__setattr__(self, "_adds", decision.path in (Path.FUSED, Path.FUSED_ALL_REDUCE))
        object.__setattr__(self, "_reduces", decision.path is Path.FUSED_ALL_REDUCE)
        logger.info_once("moetail: MoE layers with %s: %s", build.experts_name(self), str(decision))
        return _with_tail if self._adds else entry

    def forward_with_tail(self, *args: Any) -> torch.Tensor:
        """[T, H]: the routed sum, scaled, with the shared experts' output, and reduced where that is ours."""
        out, call = self._run(*args)
        if call.y is not None:
            return call.y
        shared, routed = out
        shared, routed = super()._maybe_apply_routed_scale_to_output(shared, routed)
        y = shared + routed
        return self.reduce_over_ranks(y) if self._reduces else y

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's op calls this: on the paths where the add is not ours."""
        if self.tail.decision.path is not Path.REDUCTION:
            return super()._forward_impl(*args, **kwargs)
        out, call = self._run(*args, **kwargs)
        if call.y is None:
            return out
        return (out[0], call.y) if isinstance(out, tuple) else call.y

    def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, Call]:
        tail = self.tail
        self._attach()
        call = Call(args[2] if len(args) > 2 else kwargs.get("shared_experts_input"))
        tail.call = call
        tail.calls += 1
        try:
            return super()._forward_impl(*args, **kwargs), call
        finally:
            tail.call = None

    def _attach(self) -> None:
        """Again for every new kernel: a weight reload may build one."""
        kernel = self.routed_experts.quant_method.moe_kernel
        if kernel is None or kernel is self._hooked:
            return
        experts = kernel.fused_experts
        if type(kernel.prepare_finalize).__name__ != "MoEPrepareAndFinalizeNoDPEPModular" or not hooks.attach(
            experts, self.tail.take
        ):
            logger.warning_once(
                "moetail: %s: vLLM's own reduction stays: it built %s with %s", self.layer_name,
                type(experts).__name__, type(kernel.prepare_finalize).__name__,
            )  # fmt: skip
        else:
            experts.finalize_weight_and_reduce_impl = functools.partial(
                _Unless, self.tail, type(experts).finalize_weight_and_reduce_impl.__get__(experts)
            )
        object.__setattr__(self, "_hooked", kernel)

    def _maybe_apply_shared_experts(self, shared_experts_input: Any, order: Any) -> None:
        call = self.tail.call
        if call is not None and call.shared_ran:
            return
        super()._maybe_apply_shared_experts(shared_experts_input, order)

    def _maybe_apply_routed_scale_to_output(self, shared_output: Any, fused_output: Any) -> Any:
        if self._adds:
            return shared_output, fused_output
        return super()._maybe_apply_routed_scale_to_output(shared_output, fused_output)

    def _maybe_reduce_final_output(self, states: torch.Tensor, trunc_size: Any, *reduced: Any, **kwargs: Any) -> Any:
        if self._reduces:
            return states
        return super()._maybe_reduce_final_output(states, trunc_size, *reduced, **kwargs)

    # What the tail asks of its runner.

    def run_shared_experts(self, shared_experts_input: Any) -> None:
        super()._maybe_apply_shared_experts(shared_experts_input, SharedExpertsOrder.MULTI_STREAM_OVERLAPPED)

    def shared_experts_overlap(self, shared_experts_input: Any) -> bool:
        order = self._shared_experts._determine_shared_experts_order(shared_experts_input)
        return order == SharedExpertsOrder.MULTI_STREAM_OVERLAPPED

    def tail_workspace(self, hidden: int, dtype: torch.dtype) -> Workspace | None:
        return _workspace(get_tp_group(), hidden, dtype)

    def reduce_over_ranks(self, y: torch.Tensor) -> torch.Tensor:
        return stock.tensor_model_parallel_all_reduce(y)


@functools.lru_cache(maxsize=8)
def _workspace(group: Any, hidden: int, dtype: torch.dtype) -> Workspace | None:
    return make_workspace(group.device_group, group.cpu_group, hidden, dtype, group.device)


def _with_tail(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    layer_name: Any,
    hidden_dim_unpadded: int,
) -> torch.Tensor:
    return torch.ops.moetail.vllm_moe_forward(hidden_states, router_logits, shared_experts_input, input_ids, layer_name)


class _Unless(modular_kernel.TopKWeightAndReduce):
    """vLLM's weight-and-reduce step, unless the call is finished: then there is nothing to weight, reduce or copy."""

    def __init__(self, tail: Tail, stock_impl: Any) -> None:
        self._tail, self._stock = tail, stock_impl()

    def apply(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._tail.call
        if call is not None and call.y is not None:
            return output
        return self._stock.apply(output, *args, **kwargs)
