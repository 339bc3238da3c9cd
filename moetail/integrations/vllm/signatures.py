"""What the plugin overrides, calls or replaces in vLLM, and the parameters it was written for.

Checked when vLLM loads the plugin: anything that moved leaves vLLM as it is. `scripts/vllm_signatures.py` prints what a
vLLM has; 0.26.0 to 0.33.0 were read.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

_FM = "vllm.model_executor.layers.fused_moe"
_RUNNER = f"{_FM}.runner.moe_runner:MoERunner"
_SHARED = f"{_FM}.runner.shared_experts:SharedExperts"

# module:name -> the leading parameters of a call that the plugin makes or answers. What follows must have defaults.
REQUIRED: dict[str, tuple[str, ...]] = {
    "vllm.model_executor.custom_op:PluggableLayer.register_oot": ("_decorated_layer_cls", "name"),
    "vllm.utils.torch_utils:direct_register_custom_op": ("op_name", "op_func", "mutates_args", "fake_impl"),
    f"{_FM}.runner.moe_runner:get_layer_from_name": ("layer_name",),
    f"{_FM}.runner.moe_runner:_resolve_layer_name": ("layer_name",),
    f"{_FM}.runner.moe_runner:tensor_model_parallel_all_reduce": ("input_",),
    f"{_RUNNER}._select_forward": ("self",),
    f"{_RUNNER}._forward_impl": ("self", "hidden_states", "router_logits", "shared_experts_input", "input_ids"),
    f"{_RUNNER}._maybe_apply_shared_experts": ("self", "shared_experts_input", "order"),
    f"{_RUNNER}._maybe_apply_routed_scale_to_output": ("self", "shared_output", "fused_output"),
    f"{_RUNNER}._maybe_reduce_final_output": ("self", "states", "trunc_size"),
    f"{_SHARED}.forward": ("self", "shared_experts_input", "order"),
    f"{_SHARED}._determine_shared_experts_order": ("self", "hidden_states"),
    f"{_FM}.modular_kernel:TopKWeightAndReduce.apply": (
        "self", "output", "fused_expert_output", "topk_weights", "topk_ids", "apply_router_weight_on_input"
    ),
    f"{_FM}.experts.triton_moe:TritonExperts.moe_sum": ("self", "input", "output"),
    f"{_FM}.experts.marlin_moe:MarlinExperts.moe_sum": ("self", "input", "output", "topk_ids", "expert_map"),
    f"{_FM}.deep_gemm_utils:deepgemm_unpermute_and_reduce": (
        "a", "topk_ids", "topk_weights", "inv_perm", "expert_map", "output"
    ),
    f"{_FM}.moe_permute_unpermute:moe_unpermute": (
        "out", "permuted_hidden_states", "topk_weights", "inv_permuted_idx", "expert_first_token_offset"
    ),
    f"{_FM}.moe_fused_mul_sum:moe_fused_mul_sum": ("inputs", "topk_weights", "outputs", "topk_ids", "expert_map"),
}  # fmt: skip

# Functions whose body the plugin runs with one global replaced: the body must name it.
NAMED: dict[str, str] = {
    f"{_FM}.experts.deep_gemm_moe:DeepGemmExperts.apply": "deepgemm_unpermute_and_reduce",
    f"{_FM}.experts.cutlass_moe:CutlassExpertsFp8Base.apply": "run_cutlass_moe_fp8",
    f"{_FM}.experts.cutlass_moe:run_cutlass_moe_fp8": "moe_unpermute",
    f"{_FM}.experts.fused_humming_moe:HummingIndexedExperts.apply": "moe_fused_mul_sum",
    f"{_FM}.experts.fused_humming_moe:HummingGroupedExperts.apply": "moe_unpermute",
}

# Attributes of a class that the runner's own code reads or writes, each named in the body of that function.
BODIES: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}.__init__": ("_select_forward", "_shared_experts", "routed_scaling_factor"),
    f"{_RUNNER}.forward": (
        "_forward_entry", "_maybe_apply_routed_scale_to_output", "_maybe_reduce_final_output", "_unpack"
    ),
    f"{_RUNNER}._apply_quant_method": ("forward_modular", "_maybe_apply_shared_experts", "output"),
    f"{_SHARED}.__init__": ("_output",),
    f"{_FM}.modular_kernel:FusedMoEKernelModularImpl._finalize": ("finalize_weight_and_reduce_impl",),
}  # fmt: skip


def find(name: str) -> Any:
    """The object of "module:a.b". Raises: ImportError, AttributeError."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def problems() -> list[str]:
    """A sentence for each thing that is not as the plugin knows it; empty where it can stand in."""
    wrong = []
    for name, known in REQUIRED.items():
        wrong += _checked(name, lambda found, want=known: moved(parameters(found), want))
    for name, word in NAMED.items():
        wrong += _checked(name, lambda found, want=(word,): _unnamed(found, want))
    for name, words in BODIES.items():
        wrong += _checked(name, lambda found, want=words: _unnamed(found, want))
    return wrong


def _checked(name: str, test: Any) -> list[str]:
    short = name.removeprefix(_FM + ".")
    try:
        wrong = test(find(name))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return [f"{short} is not there ({error})"]
    return [f"{short} {wrong}"] if wrong else []


def parameters(found: Any) -> list[tuple[str, bool]]:
    """(name, whether a call must pass it) of each parameter."""
    wanted = inspect.signature(found).parameters.values()
    return [(p.name, p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)) for p in wanted]


def moved(have: list[tuple[str, bool]], want: tuple[str, ...]) -> str:
    """What is wrong with parameters that must begin with `want`, and need no others; empty where nothing is."""
    names = tuple(name for name, _ in have)
    if names[: len(want)] != want or any(needed for _, needed in have[len(want) :]):
        return f"takes ({', '.join(names)}), known is ({', '.join(want)})"
    return ""


def _unnamed(found: Any, want: tuple[str, ...]) -> str:
    code = inspect.unwrap(found).__code__
    named = {*code.co_names, *(n for c in code.co_consts if hasattr(c, "co_names") for n in c.co_names)}
    missing = [word for word in want if word not in named]
    return f"does not use {', '.join(missing)}" if missing else ""
