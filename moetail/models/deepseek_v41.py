"""DeepSeek-V4.1's decoder: MoE-true and attention-plain, with random weights.

True to the original: the residual stream (mHC), the Engrams, the router, the experts, every dense projection, the
order of a layer and where ranks are summed. Plain: attention looks at a window only (`attention.py`), weights are bf16,
the first layer's mixes use the whole `fn`, the embedding is whole on every rank, text only. A stage may start at any
layer: the original's may not, because its layers share a compressed context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from moetail.models import engram, hyper_connections
from moetail.models.attention import AttentionParameters, Rotation, attention, frequencies
from moetail.models.context import Context, Packed, Places
from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.dense import rms_norm
from moetail.models.engram import EngramParameters
from moetail.models.hyper_connections import Mixes, MixParameters, collapse, one_hot, post
from moetail.models.moe_block import MoEParameters, moe, router
from moetail.models.parallel import TensorParallel
from moetail.models.parameters import Parameters
from moetail.models.tails import Tail
from moetail.routing import Router


@dataclass(frozen=True)
class Stream:
    """What one layer, or one stage, hands to the next: S [T, hc, H] bf16, and pre [T, hc] fp32, which the next input is
    collapsed with. Nothing is pending: y is reduced and in S."""

    S: torch.Tensor
    pre: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """The parameters of one decoder layer, and what sets it apart from the others."""

    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    attn_mix: MixParameters
    ffn_mix: MixParameters
    attention: AttentionParameters
    moe: MoEParameters
    engram: EngramParameters | None
    router: Router
    window_only: bool

    @staticmethod
    def random(
        parameters: Parameters, name: str, config: DeepseekV41Config, engram: EngramParameters | None, E: int,
        top_k: int, window_only: bool,
    ) -> Layer:  # fmt: skip
        p, c = parameters, config
        return Layer(
            p.norm(f"{name}.attn_norm", c.hidden_size),
            p.norm(f"{name}.ffn_norm", c.hidden_size),
            MixParameters.random(p, f"{name}.hc_attn", c.hc_mult, c.hidden_size),
            MixParameters.random(p, f"{name}.hc_ffn", c.hc_mult, c.hidden_size),
            AttentionParameters.random(p, f"{name}.attn", c),
            MoEParameters.random(p, f"{name}.ffn", c, E),
            engram,
            router(top_k, c),
            window_only,
        )


class Decoder:
    """The layers `stage` (all of them by default) of one rank; `with_drafter`: and one layer of the drafter's shape.

    engram_on_cpu  Engram tables stay in pinned host memory, which the GPU reads

    Raises: ValueError where the ranks cannot split the model, or the stage is not within it.
    """

    def __init__(
        self, config: DeepseekV41Config, device: torch.device, tp: TensorParallel | None = None,
        stage: range | None = None, seed: int = 0, engram_on_cpu: bool = False, with_drafter: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.device, self.tp = config, device, tp or TensorParallel()
        self.stage = range(config.num_hidden_layers) if stage is None else stage
        config.check_tp(self.tp.size)
        if not 0 <= self.stage.start < self.stage.stop <= config.num_hidden_layers or self.stage.step != 1:
            raise ValueError(f"stage must be a range within {config.num_hidden_layers} layers, got {self.stage}")
        c, p = config, Parameters(device, self.tp.rank, self.tp.size, seed)
        self.embedding = p.normal("embed", c.vocab_size, c.hidden_size, std=1.0) if self.is_first else None
        self.norm = p.norm("norm", c.hidden_size) if self.is_last else None
        self.head = p.linear("head", c.vocab_size, c.hidden_size, split=0) if self.is_last else None
        self.layers = [self._layer(p, index, engram_on_cpu) for index in self.stage]
        self.drafter = self._drafter(p) if with_drafter else None
        self._frequencies = {kind: frequencies(c, kind).to(device) for kind in (True, False)}

    @property
    def is_first(self) -> bool:
        return self.stage.start == 0

    @property
    def is_last(self) -> bool:
        return self.stage.stop == self.config.num_hidden_layers

    def _layer(self, p: Parameters, index: int, engram_on_cpu: bool) -> Layer:
        c, name, memory = self.config, f"layers.{index}", None
        if index in c.engram_layer_ids:
            memory = EngramParameters.random(p, f"{name}.engram", c, index, engram_on_cpu)
        window_only = index in c.window_only_layers
        return Layer.random(p, name, c, memory, c.n_routed_experts, c.num_experts_per_tok, window_only)

    def _drafter(self, p: Parameters) -> Layer:
        c = self.config
        return Layer.random(p, "mtp.0", c, None, c.dspark_n_routed_experts, c.dspark_num_experts_per_tok, True)

    def context(self, max_query_lens: Sequence[int]) -> Context:
        """An empty KV context of requests with at most so many new tokens a step."""
        return Context(self.config, len(self.layers), tuple(max_query_lens), self.device)

    def drafter_context(self, max_query_lens: Sequence[int]) -> Context:
        """The drafter-shaped layer's own."""
        return Context(self.config, 1, tuple(max_query_lens), self.device)

    def forward(self, step: Packed, context: Context, tail: Tail) -> torch.Tensor:
        """[T, H]: the normed hidden states of a model that is one stage. Advances the context."""
        return self.hidden(self.forward_stage(step, context, tail))

    @torch.no_grad()
    def forward_stage(self, step: Packed, context: Context, tail: Tail, entering: Stream | None = None) -> Stream:
        """One step of this stage; `entering`: what the stage before it gave, None on the first. Advances the context.
        No host sync.

        Raises: ValueError for a stream that the stage must not have or lacks, or a query longer than the context's.
        """
        if (entering is None) != self.is_first:
            raise ValueError(f"entering must be {'None' if self.is_first else 'a Stream'} on the stage {self.stage}, "
                             f"got {type(entering).__name__}")  # fmt: skip
        context.check(step)
        places = context.place(step)
        rotations = self._rotations(places)
        stream = self._embedded(step.tokens) if entering is None else entering
        for layer, kv in zip(self.layers, context.kv, strict=True):
            stream = self._run(layer, stream, kv, places, rotations, tail, step.expert_ids)
        context.advance(step)
        return stream

    @torch.no_grad()
    def forward_drafter(self, step: Packed, context: Context, tail: Tail, S: torch.Tensor) -> torch.Tensor:
        """[T, H]: the drafter-shaped layer on a stream S [T, hc, H] that comes without mixes, and the final norm.
        `context` is a `drafter_context`, which it advances.

        Not the whole drafter: its own context projection, its block sampling and its heads are left out.

        Raises: ValueError where this decoder was made without it, or is not the last stage.
        """
        if self.drafter is None or not self.is_last:
            raise ValueError("with_drafter must be True, and the stage the last, to run the drafter")
        context.check(step)
        places = context.place(step)
        stream = self._run(self.drafter, Stream(S, one_hot(S)), context.kv[0], places, self._rotations(places), tail)
        context.advance(step)
        return self.hidden(stream)

    @torch.no_grad()
    def hidden(self, stream: Stream) -> torch.Tensor:
        """[T, H]: the last stage's stream, collapsed and normed."""
        assert self.norm is not None, "only the last stage has the final norm"
        return rms_norm(collapse(stream.S, stream.pre), self.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, H] -> [n, vocab] bf16, on every rank."""
        assert self.head is not None, "only the last stage has the head"
        return self.tp.gather_columns(functional.linear(hidden, self.head))

    def _embedded(self, tokens: torch.Tensor) -> Stream:
        assert self.embedding is not None
        S = functional.embedding(tokens, self.embedding)[:, None].repeat(1, self.config.hc_mult, 1)
        return Stream(S, one_hot(S))

    def _rotations(self, places: Places) -> dict[bool, Rotation]:
        return {kind: Rotation.at(places.positions, f) for kind, f in self._frequencies.items()}

    def _mixes(self, S: torch.Tensor, p: MixParameters) -> Mixes:
        c = self.config
        return hyper_connections.mixes(S, p, c.rms_norm_eps, c.hc_eps, c.hc_sinkhorn_iters)

    def _run(
        self, layer: Layer, stream: Stream, kv: torch.Tensor, places: Places, rotations: dict[bool, Rotation],
        tail: Tail, expert_ids: torch.Tensor | None = None,
    ) -> Stream:  # fmt: skip
        """One layer. Each sublayer's input is collapsed by the mixes of the sublayer before it."""
        c, eps, S = self.config, self.config.rms_norm_eps, stream.S
        if layer.engram is not None:
            S = self._remembered(S, layer.engram, places)
        attn = self._mixes(S, layer.attn_mix)
        x = rms_norm(collapse(S, stream.pre), layer.attn_norm, eps)
        y = attention(x, layer.attention, kv, places, rotations[layer.window_only], eps)
        S = post(self.tp.all_reduce(y), S, attn.post, attn.comb)

        ffn = self._mixes(S, layer.ffn_mix)
        x = rms_norm(collapse(S, attn.pre), layer.ffn_norm, eps)
        routed, shared = moe(x, layer.moe, layer.router, c.swiglu_limit, expert_ids)
        S = post(tail(routed, shared, self.tp), S, ffn.post, ffn.comb)
        return Stream(S, ffn.pre)

    def _remembered(self, S: torch.Tensor, p: EngramParameters, places: Places) -> torch.Tensor:
        c, (first, end) = self.config, self.config.image_tokens
        rows = engram.hash_rows(
            places.history, c.image_tokens, c.engram_pad_token_id, c.engram_compressed_vocab_size, p
        )
        keys, value = engram.keys_and_value(rows, p, c.hc_mult)
        now = places.history[:, 0]
        return engram.gated(S, keys, value, p.q, p.k, (now >= first) & (now < end), c.rms_norm_eps)
