"""Where the experts' reduction is taken over: on the experts object, never on a vLLM class or module.

`take(rows, row_map, weights, numerics, num_valid_rows) -> bool` runs the tail and says whether it did; where it did
not, vLLM's own reduction runs. Rows: TritonExperts and MarlinExperts hand over weighted ones (`PREWEIGHTED`, as
`moe_sum`), the others unweighted ones (`TRTLLM`: fp32 fused multiply-adds in slot order).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from moetail.numerics import Numerics

Take = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", Numerics, "torch.Tensor | None"], bool]


def attach(experts: Any, take: Take) -> bool:
    """Put the hooks on this experts object; False where its class has none. Attaching again changes nothing."""
    kind = type(experts).__name__
    if kind in ("TritonOrDeepGemmExperts", "TritonOrCutlassExperts"):
        return attach(experts.experts, take) and attach(experts.fallback_experts, take)
    if kind in ("TritonExperts", "MarlinExperts"):
        experts.moe_sum = _moe_sum(type(experts).moe_sum.__get__(experts), take)
    elif kind == "DeepGemmExperts":
        _replace_apply(experts, deepgemm_unpermute_and_reduce=lambda stock: _deepgemm(stock, take))
    elif kind == "CutlassExpertsFp8":
        _replace_apply(experts, run_cutlass_moe_fp8=lambda run: rebound(
            run, moe_unpermute=lambda stock: _moe_unpermute(stock, take)))  # fmt: skip
    elif kind == "HummingGroupedExperts":
        _replace_apply(experts, moe_unpermute=lambda stock: _moe_unpermute(stock, take))
    elif kind == "HummingIndexedExperts":
        _replace_apply(experts, moe_fused_mul_sum=lambda stock: _moe_fused_mul_sum(stock, take))
    else:
        return False
    return True


def rebound(function: Any, **replaced: Callable[[Any], Any]) -> Any:
    """The same code with other globals: `replaced[name](what that global was)`. The module keeps its own."""
    names = {name: make(function.__globals__[name]) for name, make in replaced.items()}
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.lru_cache(maxsize=64)
def _slots(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def route_major(T: int, K: int, device: torch.device) -> torch.Tensor:
    """[T, K] int32: row t * K + k is slot k of token t. A view of one tensor a size class, which lives on: a captured
    graph may hold it."""
    most = max(1024, 1 << (T * K - 1).bit_length())
    return _slots(most, device)[: T * K].view(T, K)


def _replace_apply(experts: Any, **replaced: Callable[[Any], Any]) -> None:
    experts.apply = types.MethodType(rebound(type(experts).apply, **replaced), experts)


def _moe_sum(stock: Any, take: Take) -> Any:
    def moe_sum(
        input: torch.Tensor,  # noqa: A002  vLLM's name
        output: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> Any:
        T, K, H = input.shape
        if expert_map is None and take(
            input.view(T * K, H), route_major(T, K, input.device), None, Numerics.PREWEIGHTED, None
        ):
            return output
        rest = {"topk_ids": topk_ids, "expert_map": expert_map}
        return stock(input, output, **{name: t for name, t in rest.items() if _takes(stock, name)})

    return moe_sum


def _takes(function: Any, name: str) -> bool:
    return name in function.__func__.__code__.co_varnames[: function.__func__.__code__.co_argcount]


def _deepgemm(stock: Any, take: Take) -> Any:
    def deepgemm_unpermute_and_reduce(
        a: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        inv_perm: torch.Tensor,
        expert_map: torch.Tensor | None,
        output: torch.Tensor,
    ) -> Any:
        if expert_map is None and take(a, inv_perm.view(topk_ids.shape), topk_weights, Numerics.TRTLLM, None):
            return None
        return stock(
            a=a, topk_ids=topk_ids, topk_weights=topk_weights, inv_perm=inv_perm, expert_map=expert_map, output=output
        )

    return deepgemm_unpermute_and_reduce


def _moe_unpermute(stock: Any, take: Take) -> Any:
    def moe_unpermute(
        out: torch.Tensor,
        permuted_hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        inv_permuted_idx: torch.Tensor,
        expert_first_token_offset: torch.Tensor | None = None,
    ) -> Any:
        rows = permuted_hidden_states.view(-1, permuted_hidden_states.shape[-1])
        valid = None if expert_first_token_offset is None else expert_first_token_offset[-1:]
        if take(rows, inv_permuted_idx.view(topk_weights.shape), topk_weights, Numerics.TRTLLM, valid):
            return None
        return stock(out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset)

    return moe_unpermute


def _moe_fused_mul_sum(stock: Any, take: Take) -> Any:
    def moe_fused_mul_sum(
        inputs: torch.Tensor,
        topk_weights: torch.Tensor,
        outputs: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        expert_map: torch.Tensor | None = None,
        **rest: Any,
    ) -> Any:
        T, K, H = inputs.shape
        plain = expert_map is None and all(value is None for value in rest.values())
        if plain and take(inputs.view(T * K, H), route_major(T, K, inputs.device), topk_weights, Numerics.TRTLLM, None):
            return outputs
        return stock(
            inputs=inputs, topk_weights=topk_weights, outputs=outputs, topk_ids=topk_ids, expert_map=expert_map, **rest
        )

    return moe_fused_mul_sum
