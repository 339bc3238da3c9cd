"""route: which experts a token goes to, and with what weights.

    score  = softmax | sigmoid | sqrt(softplus) of the logits        choice = score + correction_bias
    ids    = the top_k largest choices, from the best top_groups groups
    weight = score[ids] / (their sum + 1e-20) * routed_scale         the bias chooses, and never weighs

Rounding: all of it in fp32, in the order of torch's own softmax and sum on the tensors' device; the definition is
`moetail.reference.route`. Implementations, chosen by the dispatcher: `route_triton.py` (CUDA), the definition (CPU).
Source: ours; the routers of transformers 5.17, with their bits where two things are the same: the slot order (its
sigmoid and sqrtsoftplus routers leave it open, and the last bit of their sum of weights follows it), and the fp32
scores (a 16-bit DeepSeek-V4 router of transformers rounds each step to 16 bits).
"""

from __future__ import annotations

import torch

from moetail import reference
from moetail.routing import MAX_EXPERTS, Router

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def route(
    logits: torch.Tensor, router: Router, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights: (weights [T, K] fp32, ids [T, K] int32), K = router.top_k.

    Shape:
        logits           [T, E]  bf16 | fp16 | fp32, inner stride 1, 1 <= E <= 1024; read as fp32
        correction_bias  [E]     bf16 | fp16 | fp32, inner stride 1; added to the scores for the choice alone

    Slots come in descending order of choice, and among equal choices the lowest id first: ids are distinct, always
    within [0, E), and the same on every device that computes the same scores. An expert whose logit is -inf is masked:
    it is taken only where nothing else is left to choose. A NaN choice sorts above everything, as in torch.topk, so
    that a NaN is seen in the weights. A model whose logits are 16-bit and which rounds its weights (Qwen) gets them by
    `weights.to(logits.dtype)`. T == 0 returns empty results and launches nothing. Not differentiable.

    Raises: ValueError naming the argument, what it was and what it must be, before anything is launched.
    """
    if not isinstance(router, Router):
        raise ValueError(f"router must be a moetail.Router, got {router!r}")
    for name, value in (("logits", logits), ("correction_bias", correction_bias)):
        if not isinstance(value, torch.Tensor) and not (name == "correction_bias" and value is None):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
    if torch.is_grad_enabled() and logits.requires_grad:
        raise ValueError("logits must not require gradients, got some that do: use torch.no_grad() or detach()")
    return _op(
        logits, correction_bias, router.top_k, router.score, router.renormalize, router.num_groups, router.top_groups,
        router.routed_scale,
    )  # fmt: skip


def _new(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    T = logits.shape[0]
    return logits.new_empty(T, top_k, dtype=torch.float32), logits.new_empty(T, top_k, dtype=torch.int32)


def _cpu(logits, correction_bias, *facts):  # noqa: ANN001, ANN002, ANN202
    router = Router(*facts)
    _check(logits, correction_bias, router)
    return reference.route(logits, router, correction_bias)


def _cuda(logits, correction_bias, *facts):  # noqa: ANN001, ANN002, ANN202
    router = Router(*facts)
    _check(logits, correction_bias, router)
    weights, ids = _new(logits, router.top_k)
    if logits.shape[0] > 0:
        from moetail.ops import route_triton

        route_triton.launch(logits, correction_bias, router, weights, ids)
    return weights, ids


def _fake(logits, correction_bias, *facts):  # noqa: ANN001, ANN002, ANN202
    router = Router(*facts)
    _check(logits, correction_bias, router)
    return _new(logits, router.top_k)


def _check(logits: torch.Tensor, correction_bias: torch.Tensor | None, router: Router) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must have two dimensions [T, E], got shape {tuple(logits.shape)}")
    E = logits.shape[1]
    if logits.dtype not in _FLOATS:
        raise ValueError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}")
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"logits must have from 1 to {MAX_EXPERTS} experts, got E={E}")
    if E > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits must have inner stride 1, got strides {logits.stride()}")
    if router.top_k > E:
        raise ValueError(f"top_k must be at most the number of experts {E}, got {router.top_k}")
    if router.top_groups < router.num_groups:
        if E % router.num_groups or 2 * router.num_groups > E:
            raise ValueError(
                f"num_groups must cut {E} experts into equal groups of two or more, got {router.num_groups}"
            )
        if router.top_k > router.top_groups * (E // router.num_groups):
            raise ValueError(
                f"top_k must be at most the experts of {router.top_groups} groups, "
                f"{router.top_groups * (E // router.num_groups)}, got {router.top_k}"
            )
    if correction_bias is not None:
        if correction_bias.dtype not in _FLOATS:
            raise ValueError(f"correction_bias must be bfloat16, float16 or float32, got {correction_bias.dtype}")
        if correction_bias.shape != (E,):
            raise ValueError(f"correction_bias must have shape {(E,)}, got {tuple(correction_bias.shape)}")
        if E > 1 and correction_bias.stride(0) != 1:
            raise ValueError(f"correction_bias must have stride 1, got {correction_bias.stride()}")
        if correction_bias.device != logits.device:
            raise ValueError(
                f"correction_bias must be on logits' device {logits.device}, got {correction_bias.device}"
            )  # fmt: skip


torch.library.define(
    "moetail::route",
    "(Tensor logits, Tensor? correction_bias, int top_k, str score, bool renormalize, int num_groups, int top_groups, "
    "float routed_scale) -> (Tensor, Tensor)",
)
torch.library.impl("moetail::route", "CPU")(_cpu)
torch.library.impl("moetail::route", "CUDA")(_cuda)
torch.library.register_fake("moetail::route")(_fake)
_op = torch.ops.moetail.route.default
