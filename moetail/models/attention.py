"""Attention with DeepSeek-V4.1's projections over a plain window of keys: no compressed context, no indexer.

One KV row of `head_dim` a token is key and value of all heads. Its last `qk_rope_head_dim` elements are rotated, so the
output's are rotated back. Exact for the layers that have only a window in the original.
Rounding: each projection, each rotation, the probabilities and the output are bf16; scores and softmax are fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from moetail.models.context import Places
from moetail.models.deepseek_v41_config import DeepseekV41Config
from moetail.models.dense import product_f32, rms_norm
from moetail.models.parameters import Parameters


@dataclass(frozen=True)
class AttentionParameters:
    """bf16 but for sink [heads] fp32. Of this rank's heads and groups: wq_b, sink, wo_a [groups, o_lora, ..] and the
    columns of wo_b; whole on every rank: wqkv_a [q_lora + head_dim, H] and the norms."""

    wqkv_a: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor
    sink: torch.Tensor

    @staticmethod
    def random(parameters: Parameters, name: str, config: DeepseekV41Config) -> AttentionParameters:
        p, c = parameters, config
        heads, H, group_width = c.num_attention_heads, c.hidden_size, c.num_attention_heads // c.o_groups * c.head_dim
        wo_a = p.linear(f"{name}.wo_a", c.o_groups * c.o_lora_rank, group_width, split=0)
        return AttentionParameters(
            torch.cat([p.linear(f"{name}.wq_a", c.q_lora_rank, H), p.linear(f"{name}.wkv", c.head_dim, H)]),
            p.norm(f"{name}.q_norm", c.q_lora_rank),
            p.norm(f"{name}.kv_norm", c.head_dim),
            p.linear(f"{name}.wq_b", heads * c.head_dim, c.q_lora_rank, split=0),
            wo_a.view(-1, c.o_lora_rank, group_width),
            p.linear(f"{name}.wo_b", H, c.o_groups * c.o_lora_rank, split=1),
            p.normal(f"{name}.attn_sink", heads, std=1.0, dtype=torch.float32, split=0),
        )


def frequencies(config: DeepseekV41Config, window_only: bool) -> torch.Tensor:
    """fp32 [qk_rope_head_dim / 2], radians a position: plain RoPE, or YaRN over another theta."""
    c, dim = config, config.qk_rope_head_dim
    theta = c.rope_theta if window_only else c.compress_rope_theta
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if window_only:
        return plain

    def turns_at(beta: float) -> float:
        return dim * math.log(c.rope_original_positions / (beta * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(turns_at(c.rope_beta_fast)), 0), min(math.ceil(turns_at(c.rope_beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / c.rope_factor * ramp


@dataclass(frozen=True)
class Rotation:
    """fp32 cos and sin [T, qk_rope_head_dim / 2] at the positions of a step."""

    cos: torch.Tensor
    sin: torch.Tensor

    @staticmethod
    def at(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
        angles = positions[:, None].float() * frequencies
        return Rotation(angles.cos(), angles.sin())

    def apply(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        """x [T, .., dim], its last elements rotated in adjacent pairs, rounded once; `back`: the other way."""
        half = self.cos.shape[-1]
        shape = (len(x), *[1] * (x.dim() - 2), half)
        cos, sin = self.cos.view(shape), (-self.sin if back else self.sin).view(shape)
        fixed, turned = x.split((x.shape[-1] - 2 * half, 2 * half), dim=-1)
        a, b = turned.float().unflatten(-1, (half, 2)).unbind(-1)
        pairs = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return torch.cat((fixed, pairs.flatten(-2).to(x.dtype)), dim=-1)


def attention(
    x: torch.Tensor, p: AttentionParameters, kv: torch.Tensor, places: Places, rotation: Rotation, eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, H] -> this rank's part of the output [T, H], `out` if given. Writes the tokens' rows of `kv` [rows,
    head_dim]."""
    T, dim = len(x), kv.shape[1]
    q, new = functional.linear(x, p.wqkv_a).split((len(p.q_norm), dim), dim=-1)
    q = functional.linear(rms_norm(q, p.q_norm, eps), p.wq_b).view(T, -1, dim)
    kv[places.rows] = rotation.apply(rms_norm(new, p.kv_norm, eps))
    seen = windowed(rotation.apply(q), kv[places.window_rows], places.exists, p.sink)
    seen = rotation.apply(seen, back=True)
    groups = p.wo_a.shape[0]
    low = torch.bmm(seen.view(T, groups, -1).transpose(0, 1), p.wo_a.transpose(1, 2))  # [groups, T, o_lora]
    return torch.mm(low.transpose(0, 1).reshape(T, -1), p.wo_b.T, out=out)


def windowed(q: torch.Tensor, keys: torch.Tensor, exists: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """q [T, heads, dim], keys [T, window, dim] that are also the values, exists [T, window] -> [T, heads, dim].

    The sink [heads] adds exp(sink) to the softmax's denominator and nothing else.
    """
    scores = product_f32(q, keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~exists[:, None], -math.inf)
    most = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None])
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink[:, None] - most)
    return torch.bmm((weights / total).to(q.dtype), keys)
