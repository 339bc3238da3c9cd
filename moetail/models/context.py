"""The KV context of a step: what each request remembers, and where a step's tokens find it.

Every request has a ring of `sliding_window - 1 + max query` rows in one pool: a step writes its own rows and destroys
none that it reads, so setting the lengths back restores the state. All of it is device work of static shapes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from moetail.models.deepseek_v41_config import DeepseekV41Config


@dataclass(frozen=True)
class Packed:
    """The tokens of one step, request after request; [T] int64: tokens, request (whose it is), offset (its place in
    its request's query). expert_ids [T, K] int32, or None: the router's own."""

    query_lens: tuple[int, ...]
    tokens: torch.Tensor
    request: torch.Tensor
    offset: torch.Tensor
    expert_ids: torch.Tensor | None = None

    @staticmethod
    def of(queries: list[torch.Tensor], expert_ids: torch.Tensor | None = None) -> Packed:
        """`queries`: the new tokens of each request, int64, on one device."""
        device, lens = queries[0].device, tuple(len(query) for query in queries)
        request = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens)).to(device)
        offset = torch.cat([torch.arange(n) for n in lens]).to(device)
        return Packed(lens, torch.cat(queries), request, offset, expert_ids)


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step are: positions [T]; rows [T] of the pool, to write; window_rows [T, window], newest
    first, and which of them exist; history [T, max_ngram], their ids, -1 where there is none."""

    positions: torch.Tensor
    rows: torch.Tensor
    window_rows: torch.Tensor
    exists: torch.Tensor
    history: torch.Tensor


class Context:
    """lengths [N] int64: tokens that each request has; kv [layers, rows, head_dim] bf16; tokens [rows] int64."""

    def __init__(
        self, config: DeepseekV41Config, layers: int, max_query_lens: tuple[int, ...], device: torch.device
    ) -> None:
        self.window, self.max_ngram = config.sliding_window, config.engram_max_ngram_size
        self.max_query_lens = max_query_lens
        capacity = [self.window - 1 + n for n in max_query_lens]
        *base, total = itertools.accumulate(capacity, initial=0)
        self.base, self.capacity = torch.tensor(base, device=device), torch.tensor(capacity, device=device)
        self.lengths = torch.zeros(len(max_query_lens), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(total, dtype=torch.int64, device=device)
        # Zeros: a row that does not exist is read, and weighs 0.
        self.kv = torch.zeros(layers, total, config.head_dim, dtype=torch.bfloat16, device=device)

    def check(self, step: Packed) -> None:
        """Raises: ValueError where a query is longer than this context was made for."""
        if len(step.query_lens) != len(self.max_query_lens):
            raise ValueError(f"step must have {len(self.max_query_lens)} requests, got {len(step.query_lens)}")
        for request, (got, most) in enumerate(zip(step.query_lens, self.max_query_lens, strict=True)):
            if got > most:
                raise ValueError(f"step must have at most {most} tokens of request {request}, got {got}")

    def place(self, step: Packed) -> Places:
        """Remember the step's ids. Layers write their own rows."""
        base, capacity = self.base[step.request], self.capacity[step.request]
        positions = self.lengths[step.request] + step.offset
        rows = base + positions % capacity
        self.tokens[rows] = step.tokens
        before = positions[:, None] - torch.arange(self.window, device=positions.device)
        window_rows, exists = base[:, None] + before % capacity[:, None], before >= 0
        ngram = slice(0, self.max_ngram)
        history = torch.where(exists[:, ngram], self.tokens[window_rows[:, ngram]], -1)
        return Places(positions, rows, window_rows, exists, history)

    def advance(self, step: Packed) -> None:
        """The step's tokens are now part of the context."""
        self.lengths.index_add_(0, step.request, torch.ones_like(step.offset))
