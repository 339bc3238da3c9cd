"""Hugging Face transformers: any MoE model's tail as one kernel, with the bits of `grouped_mm`.

    import moetail
    moetail.transformers.enable(model)       # or from_pretrained(..., experts_implementation="moetail")
    print(*moetail.transformers.explain(model), sep="\\n")
    moetail.transformers.disable(model)

Nothing is patched: an experts function is registered under the name "moetail" (importing this file does it), and it
returns a value that the block's own `routed + shared` completes (`deferred.py`). Where that cannot be done with the
same bits the stock `grouped_mm` runs, and `explain` says why.

`enable(model, experts="triton")`, registered as "moetail_triton", also runs the experts by `moetail.TritonExperts`:
gate and up stay fp32 and are rounded once, so that its bits are not `grouped_mm`'s; the tail's are those of its own
experts, then finalize, then add. On a CPU the same rows come from the op's definition, which is slow.
Source: what transformers computes is `grouped_mm_experts_forward` of transformers.integrations.moe, 5.17.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from moetail.contract import TailSpec, UnfinalizedMoEOutput
from moetail.experts import TritonExperts
from moetail.integrations.deferred import DeferredRoutedSum
from moetail.numerics import Numerics

NAME = "moetail"
TRITON = "moetail_triton"
EXPERTS = {"grouped_mm": NAME, "triton": TRITON}
OLDEST, TOO_NEW = Version("5.17"), Version("6")


def check_version(version: str) -> None:
    """Raises: ValueError for a transformers outside the range that this file knows."""
    if not OLDEST <= Version(Version(version).base_version) < TOO_NEW:
        raise ValueError(f"transformers must be >= {OLDEST} and < {TOO_NEW}, got {version}")


check_version(transformers.__version__)

from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS  # noqa: E402
from transformers.integrations.moe import (  # noqa: E402
    ALL_EXPERTS_FUNCTIONS,
    _grouped_linear,
    grouped_mm_experts_forward,
)

TAIL = TailSpec(Numerics.TRANSFORMERS)
_LIMIT = "_moetail_limit"  # of an experts module: `_swiglu_limit`
_OF_CONFIG = "_moetail_of_config"  # the same: `_config_reason`, which asks transformers' slow attributes (47 us a call)
_SHARED_EXPERTS = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert",
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip


class Reason(enum.Enum):
    """Why a block keeps the stock path, or why only its finalize is ours."""

    NOT_REGISTERED = "its experts class is not one of transformers' experts interface"
    QUANTIZED = "its expert weights are not bf16, fp16 or fp32"
    DEVICE = "grouped_mm needs a CPU or a GPU of compute capability 8.0 or newer"
    NO_BITS = "torch.sum's order is not defined by us at this top-k and hidden size on this device"
    GRADIENTS = "training keeps the stock path: use model.eval() and torch.no_grad() for inference"
    AUTOCAST = "autocast is on, which changes how torch.sum rounds"
    MIXED_DTYPES = "hidden states and expert weights differ in dtype"
    NO_SHARED_EXPERTS = "the model has no shared experts to add"
    TRANSFORMED = "the block changes the routed sum before it adds the shared experts"
    WRAPPED = "a hook or a wrapped forward (tensor parallel, offloading) reads the experts' output"
    NO_GATE = "its experts have no gate, which the triton experts need"
    OTHER_GATE = "its gate is not silu(gate) * up, clamped or not, of a gate that lies before up"
    NOT_BF16 = "its expert weights are not bf16, which the triton experts need"
    OLD_GPU = "the triton experts need a GPU of compute capability 9.0 or newer"


@dataclass(frozen=True)
class BlockPlan:
    """What one MoE block runs. `path`: "one kernel" (finalize + shared add), "finalize only", or "stock". `backend`:
    whose experts' GEMMs run, and why it is not the triton ones, where those were asked for."""

    block: str
    experts: str
    path: str
    reason: Reason | None
    backend: str = "grouped_mm"
    backend_reason: Reason | None = None

    def __str__(self) -> str:
        text = f"{self.block}: {self.path}" + (f" ({self.reason.value})" if self.reason else "")
        if self.backend_reason is not None:
            return f"{text}, {self.backend} experts ({self.backend_reason.value})"
        return text if self.backend == "grouped_mm" else f"{text}, {self.backend} experts"


def enable(model: PreTrainedModel, experts: str = "grouped_mm") -> PreTrainedModel:
    """Run this model's MoE blocks through moetail; returns the model. Nothing is written to its saved config.

    experts  "grouped_mm", with stock's bits, or "triton": ours, where a block can run them

    Raises: ValueError where no block of the model has MoE experts, or none of them can be served (with the reasons).
    """
    _check(model, experts)
    plans = explain(model, experts)
    if all(plan.path == "stock" for plan in plans):
        raise ValueError("model must have a MoE block that moetail can serve, got: " + "; ".join(map(str, plans)))
    if experts == "triton" and all(plan.backend != "triton" for plan in plans):
        raise ValueError("experts must be grouped_mm for this model, got triton: " + "; ".join(map(str, plans)))
    current = model.get_experts_implementation()
    if not set(EXPERTS.values()) & set(current.values()):
        model.__dict__["_moetail_stock"] = current
    if EXPERTS[experts] not in current.values():
        model.set_experts_implementation(EXPERTS[experts])
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model its previous experts implementation back; returns the model."""
    _check(model)
    stock = model.__dict__.pop("_moetail_stock", "grouped_mm")
    if set(EXPERTS.values()) & set(model.get_experts_implementation().values()):
        model.set_experts_implementation(stock)
    for module in model.modules():
        for name in (_LIMIT, _OF_CONFIG):
            module.__dict__.pop(name, None)
    return model


def explain(model: PreTrainedModel, experts: str | None = None) -> list[BlockPlan]:
    """What each MoE block of the model would run under `enable(model, experts)`, and why, one row a block; None: the
    experts that are enabled now, grouped_mm where none are.

    States that belong to a call (gradients, autocast) are reported as they are now; eval mode and no_grad are assumed
    where the model is in eval mode.

    Raises: ValueError where the model has no MoE block.
    """
    _check(model, experts)
    if experts is None:
        experts = "triton" if TRITON in model.get_experts_implementation().values() else "grouped_mm"
    plans = []
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "has_gate"):
            plan = _plan(name, module, model)
            if experts == "triton" and plan.path != "stock":
                why = triton_reason(module)
                plan = replace(plan, backend="grouped_mm" if why else "triton", backend_reason=why)
            plans.append(plan)
        elif name.rpartition(".")[2] == "experts" and sum(1 for _ in module.parameters()) > 0:
            plans.append(BlockPlan(name, type(module).__name__, "stock", Reason.NOT_REGISTERED))
    if not plans:
        raise ValueError(f"model must have Mixture-of-Experts blocks, got {type(model).__name__} without any")
    return plans


def _check(model: object, experts: str | None = None) -> None:
    """A compiled or otherwise wrapped model is none of its class, and has its methods. Raises: ValueError."""
    if isinstance(model, type) or not all(hasattr(model, m) for m in ("get_experts_implementation", "named_modules")):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(f"model must be a transformers PreTrainedModel, got {what}")
    if experts is not None and experts not in EXPERTS:
        raise ValueError(f"experts must be one of {', '.join(EXPERTS)}, got {experts!r}")


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | DeferredRoutedSum:
    """The experts function: hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H] or its promise."""
    return _forward(self, hidden_states, top_k_index, top_k_weights, expert_rows)


def triton_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor | DeferredRoutedSum:
    """As `experts_forward`, with the rows of `moetail.TritonExperts` where the block can run them."""
    make_rows = expert_rows if triton_reason(self) is not None else triton_rows
    return _forward(self, hidden_states, top_k_index, top_k_weights, make_rows)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    make_rows: Callable[..., UnfinalizedMoEOutput],
) -> torch.Tensor | DeferredRoutedSum:  # fmt: skip
    weight = self.down_proj
    wants_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (hidden_states, top_k_weights, *self.parameters())
    )
    if (
        self.training  # a checkpointed forward of a training step runs without gradients
        or wants_grad
        or torch.is_autocast_enabled(hidden_states.device.type)
        or hidden_states.dtype != weight.dtype
        or _static_reason(weight.dtype, weight.device, top_k_index.shape[-1], hidden_states.shape[-1]) is not None
    ):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    routed = make_rows(self, hidden_states, top_k_index, top_k_weights)
    if _finalize_only_reason(self) is None:
        return DeferredRoutedSum(routed, TAIL, tuple(hidden_states.shape))
    return routed.finalize(None, TAIL)


def expert_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> UnfinalizedMoEOutput:
    """The experts up to their second GEMM: the rows that stock `grouped_mm` computes, bit for bit, and their map.

    Under expert parallelism the slots of other ranks have an id >= num_experts and sort to the end; the rows behind
    the last group are never written, which `num_valid_rows` says (stock masks them three times instead).
    """
    num_slots, K = top_k_index.numel(), top_k_index.shape[-1]
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    # histc and not bincount, which a CUDA graph cannot hold; its CPU version takes floats only.
    ids = expert_ids.float() if expert_ids.device.type == "cpu" else expert_ids.int()
    counts = torch.histc(ids, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    bias_of = expert_ids.clamp(max=self.num_experts - 1) if self.has_bias else None

    first = "gate_up_proj" if self.has_gate else "up_proj"
    x = hidden_states[order // K]
    x = _linear(self, first, x, offsets, bias_of)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    rows = _linear(self, "down_proj", x, offsets, bias_of)
    row_map = torch.empty_like(order)
    row_map[order] = torch.arange(num_slots, device=order.device)
    return UnfinalizedMoEOutput(rows, row_map.view(-1, K), top_k_weights, offsets[-1:])


def triton_rows(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> UnfinalizedMoEOutput:
    """The experts up to their second GEMM by ours. Under expert parallelism an id >= num_experts is an absent slot."""
    up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    experts = TritonExperts(
        up, down, self.gate_up_proj_bias if self.has_bias else None, self.down_proj_bias if self.has_bias else None,
        limit=_swiglu_limit(self),
    )  # fmt: skip
    return experts(hidden_states, top_k_index, top_k_weights)


def triton_reason(experts: Any) -> Reason | None:
    """Why the triton experts cannot run this module; None: they can. No call's state is asked."""
    weight = experts.down_proj
    if not experts.has_gate:
        return Reason.NO_GATE
    if weight.dtype != torch.bfloat16 and weight.device.type != "meta":  # on meta: a config's, cast when it is loaded
        return Reason.NOT_BF16
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (9, 0):
        return Reason.OLD_GPU
    return Reason.OTHER_GATE if _swiglu_limit(experts) == math.inf else None


def _swiglu_limit(experts: Any) -> float | None:
    """What clamps the module's SwiGLU, None for nothing, inf where its gate is another function.

    Asked of the module's own code, once: what it makes of a few numbers is compared with ours.
    """
    if _LIMIT not in experts.__dict__:
        experts.__dict__[_LIMIT] = _probed_limit(experts)
    return experts.__dict__[_LIMIT]


def _probed_limit(experts: Any) -> float | None:
    numbers = torch.linspace(-30, 30, 61)
    gate_up = torch.cat([numbers, numbers.flip(0) * 0.7])[None]
    try:
        got = experts._apply_gate(gate_up)
    except Exception:  # a gate with tensors of its own, elsewhere: not ours, whatever it is
        return math.inf
    for limit in (None, getattr(experts, "limit", None)):
        gate, up = gate_up.chunk(2, -1)
        if isinstance(limit, (int, float)):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        want = torch.nn.functional.silu(gate) * up
        if got.shape == want.shape and torch.allclose(got, want):
            return None if limit is None else float(limit)
    return math.inf


def _linear(self: Any, name: str, x: torch.Tensor, offsets: torch.Tensor, bias_of: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias_of is None else getattr(self, name + "_bias")[bias_of]
    return _grouped_linear(x, getattr(self, name), offsets, bias=bias, is_transposed=self.is_transposed)


def _plan(name: str, experts: Any, model: PreTrainedModel) -> BlockPlan:
    weight = experts.down_proj
    H = weight.shape[-1] if experts.is_transposed else weight.shape[-2]
    device = weight.device
    if device.type == "meta":  # offloaded by accelerate: where its hook will put it
        device = torch.device(getattr(getattr(experts, "_hf_hook", None), "execution_device", device))
    stock = _static_reason(weight.dtype, device, top_k(experts.config), H)
    if stock is None and experts.training:
        stock = Reason.GRADIENTS
    if stock is None and torch.is_autocast_enabled(device.type):
        stock = Reason.AUTOCAST
    if stock is None and model.get_input_embeddings().weight.dtype != weight.dtype:
        stock = Reason.MIXED_DTYPES
    if stock is not None:
        return BlockPlan(name, type(experts).__name__, "stock", stock)
    partly = _finalize_only_reason(experts)
    return BlockPlan(name, type(experts).__name__, "finalize only" if partly else "one kernel", partly)


@functools.cache
def _static_reason(dtype: torch.dtype, device: torch.device, K: int, H: int) -> Reason | None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return Reason.QUANTIZED
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return Reason.DEVICE
    if device.type not in ("cpu", "cuda"):
        return Reason.DEVICE
    try:
        Numerics.TRANSFORMERS.resolve(0, K, H, device.type, dtype, dtype)
    except ValueError:
        return Reason.NO_BITS
    return None


def _finalize_only_reason(experts: Any) -> Reason | None:
    if "forward" in vars(experts) or experts._forward_hooks or torch.nn.modules.module._global_forward_hooks:
        return Reason.WRAPPED
    known: tuple[Reason | None] | None = vars(experts).get(_OF_CONFIG)
    if known is None:
        known = (_config_reason(experts.config),)
        if not torch.compiler.is_compiling():
            vars(experts)[_OF_CONFIG] = known
    return known[0]


def _config_reason(config: Any) -> Reason | None:
    if is_transformed(config):
        return Reason.TRANSFORMED
    return None if has_shared_experts(config) else Reason.NO_SHARED_EXPERTS


def is_transformed(config: Any) -> bool:
    """Whether the block changes the routed sum before the add: hy_v3 adds in fp32; nemotron_h projects the sum back
    from a latent size."""
    return bool(getattr(config, "enable_moe_fp32_combine", False) or getattr(config, "moe_latent_size", None))


def has_shared_experts(config: Any) -> bool:
    """Whether the block adds a shared expert's output: each family has its own name for how many there are."""
    return any(getattr(config, name, None) for name in _SHARED_EXPERTS)


def top_k(config: Any) -> int:
    """K, whatever the family calls it; the largest where the layers differ."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_top_k"):
        value = getattr(text, name, None)
        if value is not None:
            return max(value) if isinstance(value, list) else value
    return 1


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
ALL_EXPERTS_FUNCTIONS.register(TRITON, triton_experts_forward)
# Quantized experts look the same name up in a registry of their own: they keep their stock path.
for name in EXPERTS.values():
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"])
