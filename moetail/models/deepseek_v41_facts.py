"""DeepSeek-V4.1-Flash: the facts of its released config that a plan needs. Every layer is MoE.

The routed scale (1.5) is in the routing weights, the shared expert has no gate, and nothing is padded. A boundary is a
fused all-reduce + mHC post, collapse and norm; at layers 1 and 14 an Engram reads the stream between post and collapse.
The drafter's three layers have the same class; one stands for them.
"""

from __future__ import annotations

from dataclasses import replace

from moetail.models import ExpertsFacts, ModelFacts
from moetail.models.deepseek_v41_config import FLASH, DeepseekV41Config
from moetail.plan import LayerFacts
from moetail.routing import Router

NAME = "deepseek-v4.1-flash"
# Layers share their KV and their index with earlier ones, so a stage may start at these only.
STAGE_CUTS = (1, 2, 8, 14, 20)
# What a boundary takes unfinalized. Across ranks, what one push carries well: above, the link's bytes decide, and the
# layer's own all-reduce overlaps them. On one rank nothing is sent, so any number is taken.
BOUNDARY_MAX_TOKENS = 256
ALONE_MAX_TOKENS = 2**20


def facts() -> ModelFacts:
    """The released model's."""
    E, K, H, I = FLASH.n_routed_experts, FLASH.num_experts_per_tok, FLASH.hidden_size, FLASH.moe_intermediate_size  # noqa: E741
    drafter_E, drafter_K = FLASH.dspark_n_routed_experts, FLASH.dspark_num_experts_per_tok
    experts = (
        ExpertsFacts(E, K, H, I, Router.DEEPSEEK_V4),
        ExpertsFacts(drafter_E, drafter_K, H, I, replace(Router.DEEPSEEK_V4, top_k=drafter_K), is_drafter=True),
    )
    return ModelFacts(NAME, layers(FLASH), K, H, STAGE_CUTS, experts, FLASH.hc_mult)


def layers(
    config: DeepseekV41Config, boundary_max_tokens: int = BOUNDARY_MAX_TOKENS, alone_max_tokens: int = ALONE_MAX_TOKENS
) -> tuple[LayerFacts, ...]:
    """A model's layers and one drafter layer. The limits are those of a boundary without an Engram."""
    model = tuple(
        LayerFacts(
            index,
            can_stop=True,
            has_shared_experts=True,
            has_engram=index in config.engram_layer_ids,
            boundary_max_tokens=0 if index in config.engram_layer_ids else boundary_max_tokens,
            alone_max_tokens=0 if index in config.engram_layer_ids else alone_max_tokens,
        )
        for index in range(config.num_hidden_layers)
    )
    return (*model, LayerFacts(len(model), can_stop=True, has_shared_experts=True, is_drafter=True))
