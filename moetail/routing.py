"""What a router is, and what the expert-sorted order of its choices is: the facts that `route` and `permute` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

SCORES = ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus")
MAX_EXPERTS = 1024
MAX_TOP_K = 32
_LARGEST_F32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Router:
    """How one family of models turns router logits into experts and weights. Frozen; hashable.

    score:         "softmax"       over all experts
                   "softmax_topk"  the experts are chosen by their logits; softmax over the chosen ones
                   "sigmoid"
                   "sqrtsoftplus"  sqrt(softplus(logit)); softplus(x) = x above 20, log1p(exp(x)) below
    renormalize:   the weights of a token are divided by (their sum + 1e-20)
    num_groups,    experts lie in num_groups groups of equal size, and only those of the best top_groups can be chosen;
    top_groups     the score of a group is the sum of its two best (biased) scores. Equal numbers: no limit
    routed_scale:  multiplies the weights, last

    The presets are the models' own numbers; `dataclasses.replace` gives their relatives.
    Raises: ValueError naming the field, what it was and what it must be.
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    top_groups: int = 1
    routed_scale: float = 1.0

    DEEPSEEK_V3: ClassVar[Router]
    DEEPSEEK_V4: ClassVar[Router]
    ERNIE4_5: ClassVar[Router]
    GLM4_MOE: ClassVar[Router]
    GPT_OSS: ClassVar[Router]
    MIXTRAL: ClassVar[Router]
    QWEN2_MOE: ClassVar[Router]
    QWEN3_MOE: ClassVar[Router]

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not isinstance(self.renormalize, bool):
            raise ValueError(f"renormalize must be True or False, got {self.renormalize!r}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be from 1 to {MAX_TOP_K}, got {self.top_k}")
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {self.score!r}")
        if self.num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {self.num_groups}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be from 1 to num_groups {self.num_groups}, got {self.top_groups}")
        if not isinstance(self.routed_scale, (int, float)) or not abs(self.routed_scale) <= _LARGEST_F32:
            raise ValueError(f"routed_scale must be a number that fp32 holds, got {self.routed_scale!r}")


Router.DEEPSEEK_V3 = Router(8, "sigmoid", renormalize=True, num_groups=8, top_groups=4, routed_scale=2.5)
Router.DEEPSEEK_V4 = Router(6, "sqrtsoftplus", renormalize=True, routed_scale=1.5)
Router.ERNIE4_5 = Router(6, "softmax", renormalize=True)
Router.GLM4_MOE = Router(8, "sigmoid", renormalize=True)
Router.GPT_OSS = Router(4, "softmax_topk")
Router.MIXTRAL = Router(2, "softmax", renormalize=True)
Router.QWEN2_MOE = Router(4, "softmax")
Router.QWEN3_MOE = Router(8, "softmax", renormalize=True)


@dataclass(frozen=True)
class Permutation:
    """Rows sorted by expert, each expert's padded to whole blocks. Every tensor is int32, on the device of the ids.

    `slot` is t*K + k. The rows of one expert are in slot order. The first dimensions are bounds that need no look at
    the ids: R = T*K + min(E, T*K) * (block - 1), rounded up to whole blocks.

    row_map       [T, K]      the row of each slot, -1 where its expert is absent: finalize's `row_map`
    source        [R]         the slot that each row reads (token = slot // K); -1: padding, which the GEMM masks
    block_expert  [R/block]   the expert of each block of rows; -1: past the end
    counts        [E]         slots of each expert, without padding
    offsets       [E]         the row behind each expert's last block; for block 1 what grouped_mm calls `offs`
    num_rows      [1]         rows that are in use, padding included
    """

    row_map: torch.Tensor
    source: torch.Tensor
    block_expert: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    num_rows: torch.Tensor
    block: int


def row_bound(slots: int, num_experts: int, block: int) -> int:
    """The most rows that `slots` slots can need, a whole number of blocks."""
    return -(-(slots + min(num_experts, slots) * (block - 1)) // block) * block
