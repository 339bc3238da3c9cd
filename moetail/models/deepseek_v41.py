"""DeepSeek-V4.1's decoder: MoE-true and attention-plain, with random weights.

A sublayer hands its output on as it is; the boundary in front of the next one finalizes it, sums it over the ranks and
mixes it into the streams, in one op where the arm (`tails.py`) fuses and the plan has the call finalized there.

True to the original: the residual stream (mHC), the Engrams, the router, the experts, every dense projection, the
order of a layer and where ranks are summed. Plain: attention looks at a window only (`attention.py`), weights are bf16,
the first layer's mixes use the whole `fn`, the embedding is whole on every rank, text only. A stage may start at any
layer: the original's may not, because its layers share a compressed context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from moetail.contract import TailSpec
from moetail.models import deepseek_v41_facts, engram, hyper_connections
from moetail.models.attention import AttentionParameters, Rotation, attention, frequencies
from moetail.models.context import Context, Packed, Places
from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.engram import EngramParameters
from moetail.models.hyper_connections import Mixes, MixParameters, one_hot, post
from moetail.models.moe_block import MoEParameters, moe_layer, router
from moetail.models.parallel import TensorParallel
from moetail.models.parameters import Parameters
from moetail.models.tails import Arm, Output, Partial
from moetail.ops.mhc_collapse import mhc_collapse
from moetail.plan import LayerFacts, Plan, WorldFacts, plan_tails
from moetail.routing import Router

# Shared experts beside the routed ones: above, either fills the GPU alone. vLLM's number.
_SIDE_STREAM_MAX_TOKENS = 256


@dataclass(frozen=True)
class Stream:
    """What one stage hands to the next: S [T, hc, H] bf16, and pre [T, hc] fp32, which the next input is collapsed
    with. Nothing is pending: the last output is summed over the ranks and in S."""

    S: torch.Tensor
    pre: torch.Tensor


@dataclass(frozen=True)
class Pending:
    """What one sublayer hands to the next: its output, the streams S that it has to be mixed into, and their mixes."""

    output: Output
    S: torch.Tensor
    mixes: Mixes


@dataclass(frozen=True)
class Layer:
    """The parameters of one decoder layer, and what sets it apart from the others; `index` as in the plan."""

    index: int
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
        parameters: Parameters, name: str, index: int, config: DeepseekV41Config, engram: EngramParameters | None,
        E: int, top_k: int, window_only: bool,
    ) -> Layer:  # fmt: skip
        p, c = parameters, config
        return Layer(
            index,
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
    facts          of the layers and the drafter's, for the plan; None: `deepseek_v41_facts.layers`

    Raises: ValueError where the ranks cannot split the model, or the stage is not within it.
    """

    def __init__(
        self, config: DeepseekV41Config, device: torch.device, tp: TensorParallel | None = None,
        stage: range | None = None, seed: int = 0, engram_on_cpu: bool = False, with_drafter: bool = False,
        facts: tuple[LayerFacts, ...] | None = None,
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
        self.plan = self._plan(deepseek_v41_facts.layers(c) if facts is None else facts)
        layers = self.plan.layers
        self._separate = self._plan(tuple(replace(layer, can_stop=False) for layer in layers))
        self._here = self._plan(tuple(replace(x, boundary_max_tokens=0, alone_max_tokens=0) for x in layers))
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
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
        return Layer.random(p, name, index, c, memory, c.n_routed_experts, c.num_experts_per_tok, window_only)

    def _drafter(self, p: Parameters) -> Layer:
        c = self.config
        E, K = c.dspark_n_routed_experts, c.dspark_num_experts_per_tok
        return Layer.random(p, "mtp.0", c.num_hidden_layers, c, None, E, K, True)

    def _plan(self, facts: tuple[LayerFacts, ...]) -> Plan:
        """Of the whole model, as far as this stage's layers depend on it."""
        workspace, count = self.tp.workspace, self.config.num_hidden_layers
        max_tokens = deepseek_v41_facts.ALONE_MAX_TOKENS if workspace is None else workspace.max_tokens
        starts = tuple(sorted({0, self.stage.start, self.stage.stop} - {count}))
        return plan_tails(facts, WorldFacts(max_tokens, self.tp.size, starts))

    def context(self, max_query_lens: Sequence[int]) -> Context:
        """An empty KV context of requests with at most so many new tokens a step."""
        return Context(self.config, len(self.layers), tuple(max_query_lens), self.device)

    def drafter_context(self, max_query_lens: Sequence[int]) -> Context:
        """The drafter-shaped layer's own."""
        return Context(self.config, 1, tuple(max_query_lens), self.device)

    @torch.no_grad()
    def forward(self, step: Packed, context: Context, arm: Arm, entering: Stream | None = None) -> torch.Tensor:
        """[T, H]: the normed hidden states, on the last stage. As `forward_stage` else."""
        return self._normed(self._layers(step, context, arm, entering), arm)

    @torch.no_grad()
    def forward_stage(self, step: Packed, context: Context, arm: Arm, entering: Stream | None = None) -> Stream:
        """One step of this stage; `entering`: what the stage before it gave, None on the first. Advances the context.
        No host sync.

        Raises: ValueError for a stream that the stage must not have or lacks, or a query longer than the context's.
        """
        return self._finished(self._layers(step, context, arm, entering), arm)

    def _layers(self, step: Packed, context: Context, arm: Arm, entering: Stream | None) -> Pending:
        if (entering is None) != self.is_first:
            raise ValueError(f"entering must be {'None' if self.is_first else 'a Stream'} on the stage {self.stage}, "
                             f"got {type(entering).__name__}")  # fmt: skip
        context.check(step)
        places = context.place(step)
        rotations = self._rotations(places)
        handed: Stream | Pending = self._embedded(step.tokens) if entering is None else entering
        for layer, kv in zip(self.layers, context.kv, strict=True):
            handed = self._run(layer, handed, kv, places, rotations, arm, step.expert_ids)
        context.advance(step)
        assert isinstance(handed, Pending), "a stage has a layer"
        return handed

    @torch.no_grad()
    def forward_drafter(self, step: Packed, context: Context, arm: Arm, S: torch.Tensor) -> torch.Tensor:
        """[T, H]: the drafter-shaped layer on a stream S [T, hc, H] that comes without mixes, and the final norm.
        `context` is a `drafter_context`, which it advances.

        Not the whole drafter: its own context projection, its block sampling and its heads are left out.

        Raises: ValueError where this decoder was made without it, or is not the last stage.
        """
        if self.drafter is None or not self.is_last:
            raise ValueError("with_drafter must be True, and the stage the last, to run the drafter")
        context.check(step)
        places = context.place(step)
        handed = self._run(self.drafter, Stream(S, one_hot(S)), context.kv[0], places, self._rotations(places), arm)
        context.advance(step)
        return self._normed(handed, arm)

    @torch.no_grad()
    def hidden(self, stream: Stream) -> torch.Tensor:
        """[T, H]: the last stage's stream, collapsed and normed."""
        assert self.norm is not None, "only the last stage has the final norm"
        return self._collapsed(stream, self.norm)

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
        self, layer: Layer, handed: Stream | Pending, kv: torch.Tensor, places: Places,
        rotations: dict[bool, Rotation], arm: Arm, expert_ids: torch.Tensor | None = None,
    ) -> Pending:  # fmt: skip
        """One layer. Each sublayer's input is collapsed by the mixes of the sublayer before it."""
        x, S = self._entered(layer, handed, places, arm)
        mixes = self._mixes(S, layer.attn_mix)
        rotation, eps = rotations[layer.window_only], self.config.rms_norm_eps
        y = attention(x, layer.attention, kv, places, rotation, eps, out=arm.collective.buffer)

        x, S = self._boundary(Pending(Partial(y), S, mixes), layer.ffn_norm, arm)
        mixes = self._mixes(S, layer.ffn_mix)
        return Pending(self._moe(layer, x, arm, expert_ids), S, mixes)

    def _entered(
        self, layer: Layer, handed: Stream | Pending, places: Places, arm: Arm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention's input and the streams. An Engram parts what is one op elsewhere."""
        if isinstance(handed, Pending):
            if layer.engram is None:
                return self._boundary(handed, layer.attn_norm, arm)
            handed = self._finished(handed, arm)
        if layer.engram is not None:
            handed = Stream(self._remembered(handed.S, layer.engram, places), handed.pre)
        return self._collapsed(handed, layer.attn_norm), handed.S

    def _boundary(self, p: Pending, norm_weight: torch.Tensor, arm: Arm) -> tuple[torch.Tensor, torch.Tensor]:
        """The next sublayer's input and the streams, which `p` has been mixed into."""
        return arm.boundary(
            p.output, self.tp, residual=p.S, post_mix=p.mixes.post, res_mix=p.mixes.comb, pre_mix=p.mixes.pre,
            norm_weight=norm_weight, eps=self.config.rms_norm_eps,
        )  # fmt: skip

    def _finished(self, p: Pending, arm: Arm) -> Stream:
        return Stream(post(arm.finished(p.output, self.tp), p.S, p.mixes.post, p.mixes.comb), p.mixes.pre)

    def _normed(self, p: Pending, arm: Arm) -> torch.Tensor:
        assert self.norm is not None, "only the last stage has the final norm"
        return self._boundary(p, self.norm, arm)[0]

    def _collapsed(self, stream: Stream, norm_weight: torch.Tensor) -> torch.Tensor:
        """With the bits of a boundary's."""
        return mhc_collapse(stream.S, pre_mix=stream.pre, norm_weight=norm_weight, eps=self.config.rms_norm_eps)

    def _moe(self, layer: Layer, x: torch.Tensor, arm: Arm, expert_ids: torch.Tensor | None) -> Output:
        plan = self._separate if not arm.fuses else self.plan if arm.passes_on else self._here
        side = self._side_stream if arm.side_stream and x.shape[0] <= _SIDE_STREAM_MAX_TOKENS else None
        tail = TailSpec(workspace=self.tp.workspace if arm.fuses else None)
        moe = moe_layer(layer.moe, layer.router, self.config.swiglu_limit, plan, layer.index, tail, expert_ids, side)
        return arm.moe(moe, x)

    def _remembered(self, S: torch.Tensor, p: EngramParameters, places: Places) -> torch.Tensor:
        c, (first, end) = self.config, self.config.image_tokens
        rows = engram.hash_rows(
            places.history, c.image_tokens, c.engram_pad_token_id, c.engram_compressed_vocab_size, p
        )
        keys, value = engram.keys_and_value(rows, p, c.hc_mult)
        now = places.history[:, 0]
        return engram.gated(S, keys, value, p.q, p.k, (now >= first) & (now < end), c.rms_norm_eps)
