"""DeepSeek-V4.1's decoder (`moetail.models.deepseek_v41`) as a `StepModel`, for `moetail bench forward --model`:

    moetail.bench.deepseek_v41_step:flash_4_layers    the first four layers at their true size, about 115 GB in bf16
    moetail.bench.deepseek_v41_step:flash_8_layers    eight, for two ranks
    moetail.bench.deepseek_v41_step:flash_4_limit_16  four, whose boundaries take 16 tokens: above, `here` is `fused`
    moetail.bench.deepseek_v41_step:small             six layers that a laptop's CPU runs in milliseconds
    moetail.bench.deepseek_v41_step:small_two_stages  the same, the ranks in two pipeline stages

Tokens are packed, so one step may mix prefills and decodes. Under torchrun the ranks of a stage are tensor-parallel.
Arms: those of `moetail.models.tails`; with `_side`, the shared experts on a stream of their own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moetail.bench import best_all_reduce, deepseek_v41_tails, memory, models
from moetail.bench.cases import Case, Request
from moetail.bench.deepseek_v41_tails import MoE, RecordingArm
from moetail.bench.ranks import Ranks
from moetail.bench.routing import balanced_index, check_routing
from moetail.bench.step import Step, Tails
from moetail.models import deepseek_v41_config, deepseek_v41_facts, deepseek_v41_size
from moetail.models.context import Context, Packed
from moetail.models.deepseek_v41 import Decoder, Stream
from moetail.models.deepseek_v41_config import FLASH, DeepseekV41Config
from moetail.models.parallel import Collective, TensorParallel
from moetail.models.pipeline import Pipeline
from moetail.models.tails import ARMS, Arm
from moetail.plan import LayerFacts

# The tokens of one context-building call: what bounds its memory.
_CONTEXT_TOKENS = 4096
# Of a step on several ranks: what their workspace holds.
_MAX_TOKENS = 8192


def flash_4_layers(device: torch.device) -> DeepseekV41Model:
    """Layers 0 to 3 of DeepSeek-V4.1-Flash with its embedding, head and the Engram of layer 1, whose table has a
    hundredth of its rows and stays in host memory."""
    return DeepseekV41Model("deepseek-v4.1-flash, 4 layers", _flash(4), device)


def flash_8_layers(device: torch.device) -> DeepseekV41Model:
    """Layers 0 to 7: on each of two ranks as much as four on one."""
    return DeepseekV41Model("deepseek-v4.1-flash, 8 layers", _flash(8), device)


def flash_4_limit_16(device: torch.device) -> DeepseekV41Model:
    """A control: calls above the limit are finalized in place 2 whether or not layers may pass them on."""
    facts = deepseek_v41_facts.layers(_flash(4), 16, 16)
    return DeepseekV41Model("deepseek-v4.1-flash, 4 layers, limit 16", _flash(4), device, facts=facts)


def small(device: torch.device) -> DeepseekV41Model:
    return DeepseekV41Model("deepseek-v4.1 small", deepseek_v41_config.small(), device)


def small_two_stages(device: torch.device) -> DeepseekV41Model:
    return DeepseekV41Model("deepseek-v4.1 small, 2 stages", deepseek_v41_config.small(), device, stages=2)


def _flash(layers: int) -> DeepseekV41Config:
    return replace(FLASH, num_hidden_layers=layers, engram_vocab_size=160000)


@dataclass(frozen=True)
class DeepseekV41Step:
    """`restore()`, then `forward()` -> (logits [n, vocab] of each request's last 1 + D tokens, final hidden states
    [T, H]), or on a stage that is not the last what it sent. `lengths` [N]: the context's, before the step. `arms`: by
    name, with the collective that is fastest at this T; `collective`: its name."""

    model: DeepseekV41Model
    packed: Packed
    context: Context
    lengths: torch.Tensor
    logit_rows: torch.Tensor
    arms: dict[str, Arm]
    collective: str

    def restore(self) -> None:
        self.context.lengths.copy_(self.lengths)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model
        out = model.pipeline.run(model.decoder, self.packed, self.context, self.arms[model.arm])
        if isinstance(out, Stream):
            return out.S, out.pre
        return model.decoder.logits(out[self.logit_rows]), out


class DeepseekV41Model:
    """A `StepModel` of one pipeline stage, on the ranks of torchrun if there are any."""

    def __init__(
        self, name: str, config: DeepseekV41Config, device: torch.device, stages: int = 1,
        facts: tuple[LayerFacts, ...] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.config, self.device = name, config, device
        self.arms = (*ARMS, *(f"{name}_side" for name in ARMS))
        self.arm = self.arms[0]
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.ranks = Ranks(rank, world_size, torch.ones(1, device=device) if world_size > 1 else None)
        self.pipeline = Pipeline.of(rank, world_size, stages)
        self._check_memory(world_size)
        self.tp = TensorParallel.of(_tensor_group(world_size, self.pipeline), _MAX_TOKENS, config.hidden_size, device)
        with models.fits_in_memory(f"model {name}"):
            self.decoder = Decoder(
                config, device, self.tp, self.pipeline.layers(config.num_hidden_layers), engram_on_cpu=True, facts=facts
            )

    def _check_memory(self, world_size: int) -> None:
        """The ranks are of one host, whose memory they share: the Engram tables, and on a CPU everything.

        Raises: ValueError.
        """
        stage = self.pipeline.layers(self.config.num_hidden_layers)
        ranks = world_size // self.pipeline.size
        self.config.check_tp(ranks)
        total, tables = deepseek_v41_size.parameter_bytes(self.config, stage, ranks)
        what, host = f"model {self.name}", torch.device("cpu")
        if self.device.type == "cpu":
            memory.check_fits(what, total * world_size, host)
        else:
            memory.check_fits(what, total - tables, self.device)
            memory.check_fits(what, tables * world_size, host)

    def use(self, arm: str) -> None:
        """Raises: ValueError for an arm that is none of `arms`."""
        if arm not in self.arms:
            raise ValueError(f"arm must be one of {', '.join(self.arms)}, got {arm!r}")
        self.arm = arm

    def check(self, case: Case) -> None:
        """Raises: ValueError with the reason why this model cannot run the case."""
        longest, limit = max(request.kv_len for request in case.requests), self.config.max_position_embeddings
        if longest > limit:
            raise ValueError(f"case {case.name}: KV length must be <= the model's {limit} positions, got {longest}")
        if self.tp.size > 1 and case.num_tokens > _MAX_TOKENS:
            raise ValueError(
                f"case {case.name}: a step on {self.tp.size} ranks must have at most {_MAX_TOKENS} tokens, "
                f"got {case.num_tokens}"
            )

    @torch.no_grad()
    def build(self, case: Case, routing: str) -> DeepseekV41Step:
        """The step, its context filled by the router's own routing.

        Raises: ValueError as `check` does, for an unknown routing, and where memory does not suffice.
        """
        self.check(case)
        check_routing(routing)
        with models.fits_in_memory(f"case {case.name}"):
            requests = [request for request in case.requests for _ in range(request.count)]
            rows = [self._row(case, i, request) for i, request in enumerate(requests)]
            chunk = max(1, _CONTEXT_TOKENS // len(rows))
            context = self.decoder.context([max(len(row.query), min(chunk, len(row.prefix))) for row in rows])
            context.lengths.copy_(torch.tensor([row.start for row in rows]))
            collective, arms = self._arms(case.num_tokens)
            for first in range(0, max(len(row.prefix) for row in rows), chunk):
                parts = [row.prefix[first : first + chunk] for row in rows]
                self.pipeline.run(self.decoder, Packed.of(parts), context, ARMS["fused"])
            K, E = self.config.num_experts_per_tok, self.config.n_routed_experts
            balanced = balanced_index(case.num_tokens, K, E, self.device).to(torch.int32)
            packed = Packed.of([row.query for row in rows], balanced if routing == "balanced" else None)
            last = _last_rows(requests, self.device)
            return DeepseekV41Step(self, packed, context, context.lengths.clone(), last, arms, collective)

    def _arms(self, T: int) -> tuple[str, dict[str, Arm]]:
        chosen, collective = best_all_reduce.choose(T, self.config.hidden_size, self.tp, self.device, self.ranks)
        arms = {name: replace(arm, collective=Collective() if arm.fuses else collective) for name, arm in ARMS.items()}
        return chosen, arms | {f"{name}_side": replace(arm, side_stream=True) for name, arm in arms.items()}

    @torch.no_grad()
    def tails(self, step: Step) -> Tails:
        """A layer's tails, both sublayers', as the mean of this stage's under the routing of this step. Leaves the step
        restored.

        Raises: RuntimeError where the arms differ in a bit.
        """
        assert isinstance(step, DeepseekV41Step)
        recording = RecordingArm(False, collective=step.arms["separate"].collective)
        step.restore()
        self.pipeline.run(self.decoder, step.packed, step.context, recording)
        step.restore()
        arms = {name: step.arms[name] for name in ARMS}
        measured = deepseek_v41_tails.measure(
            recording.calls, arms, self.decoder.plan, self.tp, self.ranks, self.device
        )  # fmt: skip
        layers = len(self.decoder.layers)
        per_layer = {name: [us / layers for us in values] for name, values in measured.items()}
        moe = next(call for call in recording.calls if isinstance(call, MoE))
        assert moe.routed.weights is not None
        (T, K), H = moe.routed.row_map.shape, moe.shared.shape[1]
        rows, weights = (str(t.dtype).removeprefix("torch.") for t in (moe.routed.rows, moe.routed.weights))
        # A side stream changes no tail.
        samples = {name: per_layer[name.removesuffix("_side")] for name in self.arms}
        return Tails(samples, layers, T, K, H, rows, weights, f"separate sums over ranks by {step.collective}")

    def _row(self, case: Case, index: int, request: Request) -> _Row:
        """Random ids below the image tokens, the same on every rank and for every arm."""
        c = self.config
        reach = c.sliding_window * c.num_hidden_layers + c.engram_max_ngram_size
        prefix = min(request.prefix_len, reach)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.name}/{index}".encode()))
        ids = torch.randint(c.image_tokens[0], (prefix + request.query_len,), generator=generator).to(self.device)
        return _Row(ids[:prefix], ids[prefix:], request.prefix_len - prefix)


@dataclass(frozen=True)
class _Row:
    """One request's ids. `prefix` begins at position `start`: what is older is out of reach of every layer's window, so
    what the query reads is computed exactly."""

    prefix: torch.Tensor
    query: torch.Tensor
    start: int


def _tensor_group(world_size: int, pipeline: Pipeline) -> dist.ProcessGroup | None:
    """The ranks of this stage."""
    if world_size == 1:
        return None
    if pipeline.size == 1:
        return dist.group.WORLD
    width = world_size // pipeline.size
    groups = [dist.new_group(list(range(first, first + width))) for first in range(0, world_size, width)]
    return groups[pipeline.stage]


def _last_rows(requests: list[Request], device: torch.device) -> torch.Tensor:
    """The packed rows of each request's last 1 + D tokens."""
    rows: list[int] = []
    end = 0
    for request in requests:
        end += request.query_len
        rows += range(end - 1 - request.num_draft_tokens, end)
    return torch.tensor(rows, device=device)
