"""What one MoE layer of vLLM runs, decided from facts known when it is built. Imports no vLLM.

vLLM 0.26 runs the tail as `moe_sum` (or a weighting reduction), a copy out of the experts' workspace, the routed scale,
the shared add and the all-reduce. What follows the experts' opaque op is Inductor's where it compiles, and Inductor
keeps what it fuses in fp32: at one rank its `shared + routed` is not rounded before the residual add (a CPU, torch
2.13: 28924 of 131072 elements differ from the rounded add). So the add is ours only where vLLM rounds it: in eager
mode, and before an all-reduce.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from moetail.plan import Measured

# What `moetail bench serve` measured as slower: (path, GPU name) -> ranges of T, which keep vLLM's own kernels.
SLOWER: dict[tuple[Path, str], tuple[Measured, ...]] = {}


class Path(enum.Enum):
    """What of the tail is one kernel of ours."""

    STOCK = "stock"
    REDUCTION = "reduction without the copy"
    FUSED = "finalize + shared add"
    FUSED_ALL_REDUCE = "finalize + shared add + all-reduce"


class Reason(enum.Enum):
    """Why it is no more than that. The first that holds, from top to bottom, decides."""

    OFF = "switched off by additional_config"
    MISSING = "vLLM does not say"
    DEVICE = "needs a CPU or an NVIDIA GPU of compute capability 8.0 or newer"
    DTYPE = "hidden states that are not bf16 or fp16"
    TOP_K = "more than 64 experts a token"
    EXPERTS = "experts whose reduction is inside their own kernel"
    LORA = "LoRA is added inside the experts' own reduction"
    INPUT_WEIGHTS = "the router weights multiply the experts' input"
    EXPERT_PARALLEL = "expert parallel"
    DATA_PARALLEL = "data parallel"
    CONTEXT_PARALLEL = "context parallel"
    SEQUENCE_PARALLEL = "sequence parallel"
    BATCH_OVERLAP = "dual batch overlap"
    SKIPPED_PADDING = "VLLM_MOE_SKIP_PADDING leaves rows unwritten"
    PADDING = "a padded hidden size"
    NOTHING_TO_SAVE = "vLLM writes the reduction in place, and the add is Inductor's"
    NO_SHARED_EXPERTS = "no shared experts"
    TRANSFORM = "the routed sum is transformed before the add"
    ZERO_EXPERT = "a zero expert is added behind"
    FP16_SCALE = "fp16 with a routed scale: vLLM divides the shared output instead"
    INDUCTOR_ADD = "one rank: Inductor fuses the add onward, in fp32"
    INDUCTOR_SCALE = "Inductor does not round the scaled sum"
    MORE_RANKS = "more than two ranks: vLLM's all-reduce adds in another order"
    RMS_FUSION = "vLLM fuses its all-reduce with the norm"
    REDUCED_LATER = "the model reduces the output itself"
    ALL = "everything the tail has"


@dataclass(frozen=True)
class LayerFacts:
    """One MoE layer as vLLM built it. `experts`: the class's name, None where vLLM does not tell before the weights are
    loaded. `copies`: vLLM copies the reduction's result out of a workspace (0.26)."""

    experts: str | None
    dtype: str
    K: int
    hidden_padding: int = 0
    shared: bool = True
    routed_scale: float = 1.0
    device_ok: bool = True
    eager: bool = False
    copies: bool = True
    off: bool = False
    lora: bool = False
    input_weights: bool = False
    tp: int = 1
    ep: int = 1
    dp: int = 1
    pcp: int = 1
    sequence_parallel: bool = False
    batch_overlap: bool = False
    skips_padding: bool = False
    transform: bool = False
    zero_expert: bool = False
    rms_fusion: bool = False
    reduces: bool = True


@dataclass(frozen=True)
class Decision:
    """`detail`: the fact behind the reason, where the reason alone does not say it."""

    path: Path
    reason: Reason
    detail: str = ""

    @property
    def why(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value

    def __str__(self) -> str:
        return f"{self.path.value} ({self.why})"


# Experts whose reduction can be taken over, by class name; `hooks.py` says how. The two "Or" hold two others.
EXPERTS = (
    "TritonExperts", "MarlinExperts", "DeepGemmExperts", "CutlassExpertsFp8", "HummingIndexedExperts",
    "HummingGroupedExperts", "TritonOrDeepGemmExperts", "TritonOrCutlassExperts",
)  # fmt: skip


def decide(facts: LayerFacts) -> Decision:
    """The path of every call of the layer: a captured graph holds one, and all ranks choose alike."""
    never = (
        (facts.off, Reason.OFF, ""),
        (not facts.device_ok, Reason.DEVICE, ""),
        (facts.dtype not in ("bfloat16", "float16"), Reason.DTYPE, facts.dtype),
        (facts.K > 64, Reason.TOP_K, str(facts.K)),
        (facts.experts not in EXPERTS, Reason.EXPERTS, str(facts.experts)),
        (facts.lora, Reason.LORA, ""),
        (facts.input_weights, Reason.INPUT_WEIGHTS, ""),
        (facts.ep > 1, Reason.EXPERT_PARALLEL, ""),
        (facts.dp > 1, Reason.DATA_PARALLEL, ""),
        (facts.pcp > 1, Reason.CONTEXT_PARALLEL, ""),
        (facts.sequence_parallel, Reason.SEQUENCE_PARALLEL, ""),
        (facts.batch_overlap, Reason.BATCH_OVERLAP, ""),
        (facts.skips_padding, Reason.SKIPPED_PADDING, ""),
        (facts.hidden_padding > 0, Reason.PADDING, ""),
    )
    for holds, reason, detail in never:
        if holds:
            return Decision(Path.STOCK, reason, detail)
    kept = _add_is_vllms(facts)
    if kept is not None:
        if facts.copies:
            return Decision(Path.REDUCTION, kept)
        return Decision(Path.STOCK, Reason.NOTHING_TO_SAVE, kept.value)
    reduced = _all_reduce_is_vllms(facts)
    if reduced is not None:
        return Decision(Path.FUSED, reduced)
    return Decision(Path.FUSED_ALL_REDUCE if facts.tp > 1 else Path.FUSED, Reason.ALL)


def _add_is_vllms(facts: LayerFacts) -> Reason | None:
    scaled = facts.routed_scale != 1.0
    # What reads the sum next decides whether Inductor rounds it: an all-reduce does.
    compiled_onward = not facts.eager and (facts.tp == 1 or not facts.reduces)
    for holds, reason in (
        (not facts.shared, Reason.NO_SHARED_EXPERTS),
        (facts.transform, Reason.TRANSFORM),
        (facts.zero_expert, Reason.ZERO_EXPERT),
        (facts.dtype == "float16" and scaled, Reason.FP16_SCALE),
        (compiled_onward, Reason.INDUCTOR_ADD),
        (not facts.eager and scaled, Reason.INDUCTOR_SCALE),
    ):
        if holds:
            return reason
    return None


def _all_reduce_is_vllms(facts: LayerFacts) -> Reason | None:
    if facts.tp == 1:
        return None
    for holds, reason in (
        (facts.tp > 2, Reason.MORE_RANKS),
        (facts.rms_fusion, Reason.RMS_FUSION),
        (not facts.reduces, Reason.REDUCED_LATER),
    ):
        if holds:
            return reason
    return None


def measured_slower(path: Path, gpu: str, T: int) -> bool:
    """Whether a call of T tokens keeps vLLM's kernels: inside the layer's op, so that no compiled graph changes."""
    return any(part.slower and part.min_T <= T <= part.max_T for part in SLOWER.get((path, gpu), ()))
