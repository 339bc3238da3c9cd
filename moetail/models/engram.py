"""Engram: rows of a large table, found by hashing a token's last n ids, gated into every stream of the residual.

    hash    for each order n = 2 .. max and each head: (xor over s < n of id[p - s] * multiplier[s]) mod prime + offset
    gate_i  sigmoid of the signed root of <S_i, key_i>, both RMS-normed by themselves;  S_i = bf16(S_i + gate_i * value)

Differs from the original: the table is bf16 (not FP8 with scales), and every rank holds it and `wkv` whole (not by
heads and columns, gathered). The map from token ids to compressed ones is `id mod compressed_vocab_size`: the original
is made from the tokenizer's text, random weights may use any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.parameters import Parameters

GATE_CLAMP = 1e-6


def primes(layer_ids: tuple[int, ...], max_ngram: int, heads: int, vocab_size: int) -> dict[int, list[int]]:
    """The rows of each hash column, by layer: order 2's heads, then order 3's, .. No prime twice in a model."""
    seen: set[int] = set()
    found: dict[int, list[int]] = {}
    for layer in layer_ids:
        found[layer] = []
        for _ in range(2, max_ngram + 1):
            candidate = vocab_size - 1
            for _ in range(heads):
                candidate += 1
                while candidate in seen or not _is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                found[layer].append(candidate)
    return found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> list[int]:
    """Odd, and so small that a compressed id times one of them fits int64."""
    bound = (2**63 - 1) // compressed_vocab_size // 2
    draws = np.random.default_rng(10007 * layer_id).integers(0, bound, max_ngram, dtype=np.int64)
    return [int(draw) * 2 + 1 for draw in draws]


@dataclass(frozen=True)
class EngramParameters:
    """int64 on the device: primes and offsets [orders * heads], multipliers [max_ngram]. `table` [sum of primes,
    head_dim] on the device, or a view of pinned host memory. wkv [(hc + 1) * H, columns * head_dim]: hc keys, then one
    value. q and k [hc, H]."""

    primes: torch.Tensor
    offsets: torch.Tensor
    multipliers: torch.Tensor
    table: torch.Tensor
    wkv: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor

    @staticmethod
    def random(
        parameters: Parameters, name: str, config: DeepseekV41Config, layer: int, table_on_cpu: bool
    ) -> EngramParameters:
        c, device = config, parameters.device
        sizes = primes(c.engram_layer_ids, c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)[layer]
        factors = multipliers(layer, c.engram_max_ngram_size, c.engram_compressed_vocab_size)
        columns = torch.tensor(sizes, device=device)
        shape = (sum(sizes), c.engram_head_dim)
        if table_on_cpu and device.type == "cuda":
            host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True)
            table = host_view(host, device)
        else:
            host = table = torch.empty(shape, dtype=torch.bfloat16, device=device)
        start = 0
        for column, rows in enumerate(sizes):  # one at a time: a table of the released size fits no fp32 copy
            part = parameters.normal(f"{name}.embed.{column}", rows, c.engram_head_dim, std=0.5)
            host[start : start + rows].copy_(part)
            start += rows
        width = len(sizes) * c.engram_head_dim
        return EngramParameters(
            columns, columns.cumsum(0) - columns, torch.tensor(factors, device=device), table,
            parameters.linear(f"{name}.wkv", (c.hc_mult + 1) * c.hidden_size, width),
            parameters.norm(f"{name}.q_weight", c.hc_mult, c.hidden_size),
            parameters.norm(f"{name}.k_weight", c.hc_mult, c.hidden_size),
        )  # fmt: skip


def host_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned bf16 memory as a tensor of `device`, which reads it over the bus. It keeps `host` alive."""

    class Words:
        __cuda_array_interface__ = {  # noqa: RUF012  a protocol, not a field
            "shape": tuple(host.shape), "typestr": "<i2", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip
        owner = host

    view = torch.as_tensor(Words(), device=device).view(torch.bfloat16)
    assert view.data_ptr() == host.data_ptr(), "a view, not a copy"
    return view


def hash_rows(
    history: torch.Tensor, dead: tuple[int, int], pad: int, compressed: int, p: EngramParameters
) -> torch.Tensor:
    """history [T, max_ngram] int64: each token's id and those before it, newest first, negative where there is none ->
    table rows [T, columns] int64. A dead id (from dead[0], below dead[1]) hides itself and all before it."""
    unknown = (history < 0) | ((history >= dead[0]) & (history < dead[1]))
    blocked = unknown.long().cumsum(-1) > 0
    value = torch.where(blocked, pad % compressed, history % compressed)
    heads = len(p.primes) // (history.shape[1] - 1)
    mixed = value[:, 0] * p.multipliers[0]
    columns = []
    for s in range(1, history.shape[1]):
        mixed = mixed ^ (value[:, s] * p.multipliers[s])
        columns.append(mixed[:, None].expand(-1, heads))
    return torch.cat(columns, dim=1) % p.primes + p.offsets


def keys_and_value(rows: torch.Tensor, p: EngramParameters, hc: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [T, columns] -> keys [T, hc, H] and the value [T, H] of all streams, bf16."""
    found = functional.embedding(rows, p.table).flatten(1)
    both = functional.linear(found, p.wkv).view(len(rows), hc + 1, -1)
    return both[:, :hc], both[:, hc]


def gated(
    S: torch.Tensor, keys: torch.Tensor, value: torch.Tensor, q: torch.Tensor, k: torch.Tensor, dead: torch.Tensor,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """S [T, hc, H] with the value added to each stream by its own gate, which is 0 for dead tokens (dead [T] bool)."""
    s, key = S.float(), keys.float()
    dot = (s * q.float() * k.float() * key).sum(-1)
    dot = dot * torch.rsqrt(s.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * s.shape[-1] ** -0.5
    root = dot.abs().clamp_min(GATE_CLAMP).sqrt()
    gate = torch.sigmoid(torch.where(dot < 0, -root, root)).masked_fill(dead[:, None], 0.0)
    return (s + gate[:, :, None] * value[:, None].float()).to(S.dtype)
