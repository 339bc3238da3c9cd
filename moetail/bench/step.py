"""One forward step of a transformers model, ready to be run by any arm: inputs, KV context, outputs.

A fresh prefill (K == Q) runs without a cache. A request with a prefix runs against a StaticCache that holds it; the
step writes its own tokens there, and `restore` makes it forget them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moetail.bench.cases import Case

# The tokens of one context-building call: what bounds its memory.
_CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Step:
    """`restore()`, then `forward()` -> (last-token logits [N, vocab], final hidden states [N, Q, H])."""

    model: Any
    tokens: torch.Tensor
    cache: Any
    prefix_len: int

    def restore(self) -> None:
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.prefix_len)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        with final_hidden_states(self.model) as seen:
            out = self.model(
                self.tokens, past_key_values=self.cache, use_cache=self.cache is not None, logits_to_keep=1
            )
        return out.logits[:, -1], seen[-1]


def check_runnable(case: Case) -> None:
    """Raises: ValueError naming what this version does not run."""
    if len(case.requests) > 1:
        raise ValueError(f"case {case.name}: this version runs one kind of request a step, got {len(case.requests)}")
    request = case.requests[0]
    if request.chunked:
        raise ValueError(f"case {case.name}: this version does not run chunked prefills (c): drop the c")
    if request.num_draft_tokens:
        raise ValueError(f"case {case.name}: this version does not run draft tokens (:D): drop them")


def check_fits(case: Case, model: Any) -> None:
    """Raises: ValueError where the case is longer than the model's positions."""
    limit = model.config.get_text_config().max_position_embeddings
    longest = max(request.kv_len for request in case.requests)
    if longest > limit:
        raise ValueError(f"case {case.name}: KV length must be <= the model's {limit} positions, got {longest}")


def num_input_tokens(case: Case) -> int:
    """How many tokens `build` needs."""
    return case.requests[0].count * case.requests[0].kv_len


def build(model: Any, case: Case, tokens: torch.Tensor) -> Step:
    """`tokens`: at least `num_input_tokens(case)` of them. Fills the KV context with the experts now in use.

    Raises: ValueError where the case needs a cache that the model does not have.
    """
    request = case.requests[0]
    tokens = tokens[: num_input_tokens(case)].view(request.count, request.kv_len)
    query = tokens[:, request.prefix_len :].contiguous()
    if request.prefix_len == 0:
        return Step(model, query, None, 0)
    cache = _context(model, case, tokens[:, : request.prefix_len], request.kv_len)
    return Step(model, query, cache, request.prefix_len)


def _context(model: Any, case: Case, prefix: torch.Tensor, kv_len: int) -> Any:
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    cache = StaticCache(config=model.config, max_cache_len=kv_len)
    other = {type(layer).__name__ for layer in cache.layers if type(layer) is not StaticLayer}
    if other:
        raise ValueError(
            f"case {case.name}: a prefix needs plain StaticCache layers, this model has {', '.join(other)}"
        )
    chunk = max(1, _CONTEXT_TOKENS // prefix.shape[0])
    with torch.no_grad():
        for part in prefix.split(chunk, dim=1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@contextlib.contextmanager
def final_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """The base model's last_hidden_state of each call inside the block."""
    seen: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _m, _a, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


def inner_width(model: Any) -> int:
    """The columns of the first expert GEMM's output."""
    experts = next(m for m in model.modules() if hasattr(m, "_apply_gate"))
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return first.shape[-1] if experts.is_transposed else first.shape[-2]


@contextlib.contextmanager
def routings(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(top_k_index, top_k_weights) of each MoE layer's call inside the block."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, weights = (*args, *kwargs.values())[:3]
        seen.append((index, weights))

    experts = [m for m in model.modules() if hasattr(m, "_apply_gate")]
    handles = [m.register_forward_pre_hook(record, with_kwargs=True) for m in experts]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
