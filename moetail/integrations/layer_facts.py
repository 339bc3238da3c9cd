"""A transformers config as the facts that a plan needs.

Which layers are MoE is asked of the model's own code, built on the meta device: every family has its own config names
for that. Imports transformers.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moetail.integrations.transformers import has_shared_experts, is_transformed, top_k, triton_reason
from moetail.models import ExpertsFacts, ModelFacts
from moetail.plan import LayerFacts, RoutedScale

_LAYER = re.compile(r"(?P<stack>\D+)\.(?P<index>\d+)\.")  # model.layers.3.mlp.experts


def from_config(name: str, config: Any) -> ModelFacts:
    """The layers of the model that `config` describes, run by moetail's own layers; no weight is allocated.

    A boundary of such a model takes finished input only: its blocks add the residual themselves.

    Raises: ValueError where the config makes no causal language model, or one without MoE layers.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a model class may raise anything at values it does not like
        raise ValueError(f"model must make a causal language model, got {name!r}: {error}") from error
    text = config.get_text_config()
    stack = ""
    experts: dict[int, bool] = {}  # whether a layer's experts are of transformers' experts interface
    kinds: dict[ExpertsFacts, None] = {}
    for path, module in model.named_modules():
        layer = _LAYER.match(path)
        if layer is not None and (hasattr(module, "_apply_gate") or path.endswith(".experts")):
            stack = layer["stack"]
            index = int(layer["index"])
            experts[index] = experts.get(index, False) or hasattr(module, "_apply_gate")
            if hasattr(module, "_apply_gate") and triton_reason(module) is None:
                kinds[_sizes(module, top_k(config))] = None
    if not experts:
        raise ValueError(f"model must have Mixture-of-Experts layers, got {name!r} ({config.model_type}) without any")
    scale = RoutedScale.RUNNER if is_transformed(text) else RoutedScale.WEIGHTS
    layers = tuple(
        LayerFacts(index, can_stop=experts[index], has_shared_experts=has_shared_experts(text), routed_scale=scale)
        if index in experts
        else LayerFacts(index, is_moe=False)
        for index in range(len(model.get_submodule(stack)))
    )
    return ModelFacts(name, layers, top_k(config), text.hidden_size, experts=tuple(kinds))


def _sizes(module: Any, K: int) -> ExpertsFacts:
    E, H, inner = module.down_proj.shape
    if module.is_transposed:
        H, inner = inner, H
    return ExpertsFacts(E, K, H, inner, transposed=module.is_transposed)
