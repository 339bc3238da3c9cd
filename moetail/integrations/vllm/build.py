"""A vLLM layer under construction as facts, and the mark in vLLM's compile cache key."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
from typing import Any

import torch

from moetail.integrations.vllm import facts
from moetail.integrations.vllm.facts import Decision, LayerFacts, Path, Reason

KEY = "moetail"  # in vLLM's additional_config: {"moetail": "off"} leaves this engine as it is
UNMARKED = Decision(Path.STOCK, Reason.MISSING, "an additional_config to mark the compile cache with")


def decide_for(runner: Any, config: Any) -> Decision:
    """The decision of a runner that vLLM has built up to its `_select_forward`; stock where a fact is missing."""
    try:
        found = layer_facts(runner, config)
    except Exception as error:  # vLLM must build its layer whatever is missing; the reason is logged
        return Decision(Path.STOCK, Reason.MISSING, str(error))
    return facts.decide(found)


def layer_facts(runner: Any, config: Any) -> LayerFacts:
    """Raises: AttributeError naming what vLLM does not have."""
    moe, method = runner.moe_config, runner.routed_experts.quant_method
    parallel = moe.moe_parallel_config
    return LayerFacts(
        experts=experts_name(runner),
        dtype=str(moe.in_dtype).removeprefix("torch."),
        K=moe.experts_per_token,
        hidden_padding=moe.hidden_dim - moe.hidden_dim_unpadded or int(bool(method.has_unpadded_output)),
        shared=runner._shared_experts is not None,
        routed_scale=runner.routed_scaling_factor,
        device_ok=_device_ok(torch.device(moe.device)),
        eager=int(config.compilation_config.mode) == 0,
        copies=_copies(),
        off=_is_off(config),
        lora=moe.is_lora_enabled,
        input_weights=bool(runner.routed_experts.apply_router_weight_on_input),
        tp=parallel.tp_size,
        ep=parallel.ep_size,
        dp=parallel.dp_size,
        pcp=parallel.pcp_size,
        sequence_parallel=bool(moe.is_sequence_parallel),
        batch_overlap=bool(runner.enable_dbo),
        skips_padding=os.environ.get("VLLM_MOE_SKIP_PADDING", "0") not in ("", "0"),
        transform=runner.routed_input_transform is not None or runner.routed_output_transform is not None,
        zero_expert=type(runner.router).__name__ == "ZeroExpertRouter",
        rms_fusion=bool(config.compilation_config.pass_config.fuse_allreduce_rms),
        reduces=not moe.skip_final_all_reduce,
    )


def experts_name(runner: Any) -> str | None:
    """The experts' class, which the quantization method chooses before there are weights."""
    cls = getattr(runner.routed_experts.quant_method, "experts_cls", None)
    return None if cls is None else cls.__name__


def mark(config: Any) -> bool:
    """Put the plugin into the key of vLLM's compile cache: a graph that holds our op is another graph. False where
    the key cannot be changed."""
    extra = config.additional_config
    if not isinstance(extra, dict):
        return False
    extra[KEY] = _fingerprint()
    return True


@functools.cache
def _fingerprint() -> str:
    """Of the plugin's own files."""
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _is_off(config: Any) -> bool:
    extra = config.additional_config
    return isinstance(extra, dict) and extra.get(KEY) in ("off", False, 0)


def _device_ok(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu"


def _copies() -> bool:
    """vLLM 0.27 and newer hand the experts the caller's output tensor; 0.26 copies out of the workspace."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernelModularImpl

    return "use_output_alias" not in FusedMoEKernelModularImpl._fused_experts.__code__.co_varnames
