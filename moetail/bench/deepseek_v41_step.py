"""DeepSeek-V4.1's decoder (`moetail.models.deepseek_v41`) as a `StepModel`, for `moetail bench forward --model`:

    moetail.bench.deepseek_v41_step:flash_4_layers   the first four layers at their true size, about 115 GB in bf16
    moetail.bench.deepseek_v41_step:small            six layers that a laptop's CPU runs in milliseconds

Tokens are packed, so one step may mix prefills and decodes. Under torchrun the ranks are tensor-parallel.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from moetail.bench import models, timing
from moetail.bench.cases import Case, Request
from moetail.bench.forward import differing_bits
from moetail.bench.ranks import Ranks
from moetail.bench.routing import balanced_index, check_routing
from moetail.bench.step import Step, Tails
from moetail.models import deepseek_v41_config
from moetail.models.context import Context, Packed
from moetail.models.deepseek_v41 import Decoder
from moetail.models.deepseek_v41_config import FLASH, DeepseekV41Config
from moetail.models.parallel import TensorParallel
from moetail.models.tails import TAILS, TailInputs, recorded

# The tokens of one context-building call: what bounds its memory.
_CONTEXT_TOKENS = 4096
# Of a step on several ranks: what their workspace holds.
_MAX_TOKENS = 8192
_TAIL_ROUNDS = 10
# Input sets of a tail measured alone rotate until they leave any cache, or there are this many.
_ROTATED_BYTES, _MAX_SETS = 256 * 1024 * 1024, 16


def flash_4_layers(device: torch.device) -> DeepseekV41Model:
    """Layers 0 to 3 of DeepSeek-V4.1-Flash with its embedding, head and the Engram of layer 1, whose table has a
    hundredth of its rows and stays in host memory."""
    config = replace(FLASH, num_hidden_layers=4, engram_vocab_size=160000)
    return DeepseekV41Model("deepseek-v4.1-flash, 4 layers", config, device)


def small(device: torch.device) -> DeepseekV41Model:
    return DeepseekV41Model("deepseek-v4.1 small", deepseek_v41_config.small(), device)


@dataclass(frozen=True)
class DeepseekV41Step:
    """`restore()`, then `forward()` -> (logits [n, vocab] of each request's last 1 + D tokens, final hidden states
    [T, H]). `lengths` [N]: the context's, before the step."""

    model: DeepseekV41Model
    packed: Packed
    context: Context
    lengths: torch.Tensor
    logit_rows: torch.Tensor

    def restore(self) -> None:
        self.context.lengths.copy_(self.lengths)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = self.model.decoder
        hidden = decoder.forward(self.packed, self.context, TAILS[self.model.arm])
        return decoder.logits(hidden[self.logit_rows]), hidden


class DeepseekV41Model:
    """A `StepModel` of one pipeline stage, on the ranks of torchrun if there are any."""

    arms: tuple[str, ...] = tuple(TAILS)

    def __init__(self, name: str, config: DeepseekV41Config, device: torch.device) -> None:
        self.name, self.config, self.device, self.arm = name, config, device, self.arms[0]
        group = dist.group.WORLD if dist.is_initialized() else None
        self.tp = TensorParallel.of(group, _MAX_TOKENS, config.hidden_size, device)
        self.ranks = Ranks(self.tp.rank, self.tp.size, torch.ones(1, device=device) if self.tp.size > 1 else None)
        with models.fits_in_memory(f"model {name}"):
            self.decoder = Decoder(config, device, self.tp, engram_on_cpu=True)

    def use(self, arm: str) -> None:
        """Raises: ValueError for an arm that is none of `arms`."""
        if arm not in TAILS:
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
        """The step, its context filled by the router's own routing and the arm now in use.

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
            for first in range(0, max(len(row.prefix) for row in rows), chunk):
                parts = [row.prefix[first : first + chunk] for row in rows]
                self.decoder.forward_stage(Packed.of(parts), context, TAILS[self.arm])
            K, E = self.config.num_experts_per_tok, self.config.n_routed_experts
            balanced = balanced_index(case.num_tokens, K, E, self.device).to(torch.int32)
            packed = Packed.of([row.query for row in rows], balanced if routing == "balanced" else None)
            return DeepseekV41Step(self, packed, context, context.lengths.clone(), _last_rows(requests, self.device))

    @torch.no_grad()
    def tails(self, step: Step) -> Tails:
        """The first MoE layer's tails under the routing of this step. Leaves the step restored.

        Raises: RuntimeError where the arms differ in a bit.
        """
        assert isinstance(step, DeepseekV41Step)
        seen: list[TailInputs] = []
        step.restore()
        self.decoder.forward_stage(step.packed, step.context, recorded(TAILS[self.arms[0]], seen))
        step.restore()
        routed, shared = seen[0]
        assert routed.weights is not None
        (T, K), H = routed.row_map.shape, shared.shape[1]
        dtypes = (str(t.dtype).removeprefix("torch.") for t in (routed.rows, routed.weights))
        return Tails(self._measured(seen[0]), len(seen), T, K, H, *dtypes)

    def _measured(self, inputs: TailInputs) -> dict[str, list[float]]:
        routed, shared = inputs
        outputs = {arm: tail(routed, shared, self.tp) for arm, tail in TAILS.items()}
        first = outputs[self.arms[0]]
        if self.ranks.total(sum(differing_bits((first,), (y,)) for y in outputs.values())):
            raise RuntimeError("the tails of the arms differ in their bits")
        count = min(_MAX_SETS, 1 + _ROTATED_BYTES // (routed.rows.numel() * routed.rows.element_size()))
        sets = [(replace(routed, rows=routed.rows.clone()), shared.clone()) for _ in range(count)]

        def program(arm: str) -> Callable[[], None]:
            def run() -> None:
                for one in sets:
                    TAILS[arm](*one, self.tp)

            return run

        make = timing.cuda_graph_arm if self.device.type == "cuda" else timing.cpu_arm
        arms = [make(arm, program(arm), self.ranks.rendezvous) for arm in TAILS]
        timing.warm_up(arms, seconds=0.1, slowest=self.ranks.slowest)
        samples, _ = timing.interleave(arms, _TAIL_ROUNDS, slowest=self.ranks.slowest)
        return {arm: [us / count for us in values] for arm, values in samples.items()}

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


def _last_rows(requests: list[Request], device: torch.device) -> torch.Tensor:
    """The packed rows of each request's last 1 + D tokens."""
    rows: list[int] = []
    end = 0
    for request in requests:
        end += request.query_len
        rows += range(end - 1 - request.num_draft_tokens, end)
    return torch.tensor(rows, device=device)
