"""A transformers causal language model as a `StepModel`: stock `grouped_mm` experts against moetail's.

A fresh prefill (K == Q) runs without a cache. Requests with a prefix run as one batch against a StaticCache that holds
it; the step writes its own tokens there, and `restore` makes it forget them. Rows of different KV lengths are padded on
the left. A prefix of earlier chunks (c) and a prefix-cache hit are the same computation to such a model.

Two things of such a model are held still, for all arms alike. Its masks inside a capture are those of eager mode:
transformers makes one in every captured step, even where none is needed, and runs other attention kernels then. And
cuDNN's attention is off where there is a prefix: its decode kernel does not repeat its bits (H200, torch 2.11, 8 x
2048 keys: 1 to 341 elements of a layer's output differ between replays, and a router may then choose other experts).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import moetail.integrations.transformers  # noqa: F401  registers the "moetail" experts
from moetail.bench import memory, models, tail
from moetail.bench.cases import Case
from moetail.bench.routing import balanced_tables, check_routing, recorded, replaced
from moetail.bench.step import Step, Tails

IMPLEMENTATIONS = {"stock": "grouped_mm", "moetail": "moetail"}
# The tokens of one context-building call: what bounds its memory.
_CONTEXT_TOKENS = 4096
_TAIL_ROUNDS = 10


@dataclass(frozen=True)
class TransformersStep:
    """`restore()`, then `forward()` -> (logits [N, 1 + D, vocab] of each row's last tokens, final hidden states
    [N, Q, H]). `mask` [N, 1, Q, max KV] and `positions` [N, Q] only where rows differ in KV length."""

    model: Any
    tokens: torch.Tensor
    cache: Any
    prefix_len: int
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    logits_to_keep: int
    balanced: dict[Any, torch.Tensor]

    def restore(self) -> None:
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.prefix_len)

    @torch.no_grad()
    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        with (
            replaced(self.balanced),
            _masks_of_eager_mode(),
            _attention_that_repeats(self.cache is not None and self.tokens.is_cuda),
            _final_hidden_states(self.model) as seen,
        ):
            out = self.model(
                self.tokens, attention_mask=self.mask, position_ids=self.positions, past_key_values=self.cache,
                use_cache=self.cache is not None, logits_to_keep=self.logits_to_keep,
            )  # fmt: skip
        return out.logits, seen[-1]


class TransformersModel:
    """`tokens`: int64 [n] on the model's device, the text that every case reads from its start, again and again."""

    arms: tuple[str, ...] = tuple(IMPLEMENTATIONS)

    def __init__(self, name: str, model: Any, tokens: torch.Tensor) -> None:
        self.name = name
        self.model = model
        self.tokens = tokens
        self.device = tokens.device

    def use(self, arm: str) -> None:
        """Raises: ValueError for an arm that is none of `arms`."""
        if arm not in IMPLEMENTATIONS:
            raise ValueError(f"arm must be one of {', '.join(self.arms)}, got {arm!r}")
        self.model.set_experts_implementation(IMPLEMENTATIONS[arm])

    def check(self, case: Case) -> None:
        """Raises: ValueError with the reason why this model cannot run the case."""
        lengths = list(dict.fromkeys(request.query_len for request in case.requests))
        if len(lengths) > 1:
            raise ValueError(
                f"case {case.name}: query lengths must be equal, a transformers model takes one a step "
                f"(a StepModel that packs tokens can run it), got {', '.join(map(str, lengths))}"
            )
        config = self.model.config.get_text_config()
        longest, limit = _max_kv_len(case), getattr(config, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise ValueError(f"case {case.name}: KV length must be <= the model's {limit} positions, got {longest}")
        # Checked and not tried: where a CPU's memory runs out, the system ends the process.
        slots = getattr(config, "num_experts_per_tok", 1)
        rows = case.num_tokens * slots * config.hidden_size * self.model.dtype.itemsize
        memory.check_fits(f"case {case.name}", rows, self.device, "the expert rows of one layer take")
        if not _has_prefix(case):
            return
        if other := _other_cache_layers(self.model.config):
            raise ValueError(
                f"case {case.name}: a prefix needs plain StaticCache layers, this model has {', '.join(other)}"
            )
        attention = config._attn_implementation
        if _is_padded(case) and attention not in ("sdpa", "eager"):
            raise ValueError(
                f"case {case.name}: rows of different KV lengths need the attention sdpa or eager, which take a mask "
                f"made before the step; this model runs {attention}"
            )

    @torch.no_grad()
    def build(self, case: Case, routing: str) -> TransformersStep:
        """The step, its KV context filled by the router's own routing and the arm now in use.

        Raises: ValueError as `check` does, for an unknown routing, and where memory does not suffice.
        """
        self.check(case)
        check_routing(routing)
        with models.fits_in_memory(f"case {case.name}"):
            rows = self._rows(case)
            Q, kv_len = case.requests[0].query_len, _max_kv_len(case)
            query = torch.cat([tokens[:, -Q:] for tokens in rows])
            cache = mask = positions = None
            if _is_padded(case):
                cache = _padded_context(self.model, [tokens[:, :-Q] for tokens in rows], kv_len, Q)
                mask, positions = _mask_and_positions(self.model, case, cache)
            elif _has_prefix(case):
                cache = _context(self.model, torch.cat([tokens[:, :-Q] for tokens in rows]), kv_len)
            logits_to_keep = 1 + max(request.num_draft_tokens for request in case.requests)
            tables = balanced_tables(self.model, case.num_tokens) if routing == "balanced" else {}
            return TransformersStep(self.model, query, cache, kv_len - Q, mask, positions, logits_to_keep, tables)

    @torch.no_grad()
    def tails(self, step: Step) -> Tails:
        """The first MoE layer's tails under the routing of this step. Leaves the step restored.

        Raises: RuntimeError where the two tails differ in a bit.
        """
        step.restore()
        with recorded(self.model) as routed:
            hidden = step.forward()[1]
        step.restore()
        experts, index, weights = routed[0]
        T, K, H, dtype = *index.shape, hidden.shape[-1], hidden.dtype
        samples = tail.measure(index, weights, H, _inner_width(experts), dtype, _TAIL_ROUNDS)
        return Tails(samples, len(routed), T, K, H, _dtype_name(dtype), _dtype_name(weights.dtype))

    def _rows(self, case: Case) -> list[torch.Tensor]:
        """[count, kv_len] of each request: consecutive pieces of the text."""
        sizes = [request.count * request.kv_len for request in case.requests]
        tokens = self.tokens.repeat(-(-sum(sizes) // self.tokens.numel()))[: sum(sizes)]
        return [
            piece.view(request.count, request.kv_len)
            for request, piece in zip(case.requests, tokens.split(sizes), strict=True)
        ]


def _max_kv_len(case: Case) -> int:
    return max(request.kv_len for request in case.requests)


def _has_prefix(case: Case) -> bool:
    return any(request.prefix_len for request in case.requests)


def _is_padded(case: Case) -> bool:
    return len({request.kv_len for request in case.requests}) > 1


def _other_cache_layers(config: Any) -> list[str]:
    """The cache layers that are more than keys and values by position: `restore` could not take a step back."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    layers = StaticCache(config=config, max_cache_len=1).layers
    return sorted({type(layer).__name__ for layer in layers if type(layer) is not StaticLayer})


def _context(model: Any, prefix: torch.Tensor, max_cache_len: int) -> Any:
    """A StaticCache with the prefix [N, prefix_len] in it."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=max_cache_len)
    chunk = max(1, _CONTEXT_TOKENS // prefix.shape[0])
    for part in prefix.split(chunk, dim=1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _padded_context(model: Any, prefixes: list[torch.Tensor], max_cache_len: int, query_len: int) -> Any:
    """One StaticCache for rows of several prefix lengths, each right before its query.

    Each length is filled alone and copied, so a row's keys and values are those of the row run alone, bit for bit, and
    a pad's are zeros: a model run over pads could leave NaN there, which no mask takes out of a sum.
    """
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=max_cache_len)
    num_rows, end, first = sum(prefix.shape[0] for prefix in prefixes), max_cache_len - query_len, 0
    for prefix in prefixes:
        count, length = prefix.shape
        if length:
            filled = _context(model, prefix, length + query_len)
            for layer, source in zip(cache.layers, filled.layers, strict=True):
                if not layer.is_initialized:
                    shapes = ((num_rows, t.shape[1], 0, t.shape[3]) for t in (source.keys, source.values))
                    layer.lazy_initialization(*(source.keys.new_empty(shape) for shape in shapes))
                    layer.cumulative_length.fill_(end)
                layer.keys[first : first + count, :, end - length : end] = source.keys[:, :, :length]
                layer.values[first : first + count, :, end - length : end] = source.values[:, :, :length]
        first += count
    return cache


def _mask_and_positions(model: Any, case: Case, cache: Any) -> tuple[Any, torch.Tensor]:
    """What transformers would make of a 2D mask in each step, made once: [N, 1, Q, max KV] and [N, Q]."""
    from transformers.masking_utils import create_causal_mask

    Q, kv_len, keys = case.requests[0].query_len, _max_kv_len(case), cache.layers[0].keys
    lengths = torch.tensor([r.kv_len for r in case.requests for _ in range(r.count)], device=keys.device)
    mask = create_causal_mask(
        config=model.config.get_text_config(), past_key_values=cache, allow_is_causal_skip=False,
        inputs_embeds=keys.new_empty(len(lengths), Q, 0),  # its shape, dtype and device are all that is read
        attention_mask=torch.arange(kv_len, device=keys.device) >= (kv_len - lengths)[:, None],
    )  # fmt: skip
    return mask, (lengths - Q)[:, None] + torch.arange(Q, device=keys.device)


@contextlib.contextmanager
def _masks_of_eager_mode() -> Iterator[None]:
    """What it would read a tensor for is known: a step's mask is None or finished, and no row packs two texts."""
    from transformers import masking_utils

    with (
        mock.patch.object(masking_utils, "is_tracing", lambda *_: False),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
    ):
        yield


def _attention_that_repeats(wanted: bool) -> contextlib.AbstractContextManager[None]:
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    return sdpa_kernel(list(backends)) if wanted else contextlib.nullcontext()


@contextlib.contextmanager
def _final_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """The base model's last_hidden_state of each call inside the block."""
    seen: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _m, _a, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


def _inner_width(experts: Any) -> int:
    """The columns of the first expert GEMM's output."""
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return first.shape[-1] if experts.is_transposed else first.shape[-2]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
