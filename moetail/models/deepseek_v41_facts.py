"""DeepSeek-V4.1-Flash: the facts of its released config that a plan needs. Every layer is MoE.

The routed scale (1.5) is in the routing weights, the shared expert has no gate, and nothing is padded. A boundary is a
fused all-reduce + mHC post, collapse and norm; at layers 1 and 14 an Engram reads the stream between post and collapse.
The drafter's three layers have the same class; one stands for them.
"""

from __future__ import annotations

from dataclasses import replace

from moetail.models import ExpertsFacts, ModelFacts
from moetail.plan import LayerFacts
from moetail.routing import Router

NAME = "deepseek-v4.1-flash"
LAYERS = 40
H = 5120
E = 384
K = 6
I = 2304  # noqa: E741  intermediate size of one expert, as everywhere here
DRAFTER_E, DRAFTER_K = 128, 3
ENGRAM_LAYERS = (1, 14)
# Layers share their KV and their index with earlier ones, so a stage may start at these only.
STAGE_CUTS = (1, 2, 8, 14, 20)
# What vLLM's fused boundary takes, whose one-shot exchange is made for it. Ours is to be measured.
BOUNDARY_MAX_TOKENS = 16


def facts(boundary_max_tokens: int = BOUNDARY_MAX_TOKENS) -> ModelFacts:
    """The model's layers and one drafter layer; `boundary_max_tokens`: what a boundary without an Engram takes."""
    model = tuple(
        LayerFacts(
            index,
            can_stop=True,
            has_shared_experts=True,
            has_engram=index in ENGRAM_LAYERS,
            boundary_max_tokens=0 if index in ENGRAM_LAYERS else boundary_max_tokens,
        )
        for index in range(LAYERS)
    )
    drafter = LayerFacts(LAYERS, can_stop=True, has_shared_experts=True, is_drafter=True)
    experts = (
        ExpertsFacts(E, K, H, I, Router.DEEPSEEK_V4),
        ExpertsFacts(DRAFTER_E, DRAFTER_K, H, I, replace(Router.DEEPSEEK_V4, top_k=DRAFTER_K), is_drafter=True),
    )
    return ModelFacts(NAME, (*model, drafter), K, H, STAGE_CUTS, experts)
