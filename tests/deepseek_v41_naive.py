"""One layer of DeepSeek-V4.1 a second time, in fp64, token by token, with none of the package's formulas: the oracle of
its wiring. It shares the parameters and nothing else."""

import cmath
import math

import torch

F64 = torch.float64


def rms(x, eps=1e-20):
    return x / math.sqrt(float((x * x).mean()) + eps)


def mixes(S, p, c):
    """S [hc, H] -> pre [hc], post [hc], comb [source][target]."""
    hc = len(S)
    m = p.fn.to(F64) @ rms(S.reshape(-1))
    base, scale = p.base.to(F64), p.scale.to(F64)
    pre = torch.sigmoid(m[:hc] * scale[0] + base[:hc]) + c.hc_eps
    post = 2 * torch.sigmoid(m[hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (m[2 * hc :] * scale[2] + base[2 * hc :]).view(hc, hc).exp()
    comb = comb / comb.sum(1, keepdim=True) + c.hc_eps
    for step in range(2 * c.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(step % 2, keepdim=True) + c.hc_eps)
    return pre, post, comb


def post(y, S, weights, comb):
    return torch.stack([weights[j] * y + sum(comb[i, j] * S[i] for i in range(len(S))) for j in range(len(S))])


def rotated(x, position, c, window_only, sign):
    """The last elements of x [.., dim] as complex numbers, turned."""
    x, rope = x.clone(), c.qk_rope_head_dim
    for i in range(rope // 2):
        theta = c.rope_theta if window_only else c.compress_rope_theta
        turn = theta ** (-2 * i / rope)
        if not window_only:
            low, high = (
                rope * math.log(c.rope_original_positions / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (c.rope_beta_fast, c.rope_beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), rope - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            turn = turn * (1 - ramp) + turn / c.rope_factor * ramp
        factor = cmath.exp(1j * sign * position * turn)
        at = x.shape[-1] - rope + 2 * i
        turned = torch.complex(x[..., at], x[..., at + 1]) * factor
        x[..., at], x[..., at + 1] = turned.real, turned.imag
    return x


def attention(xs, p, c, window_only):
    """xs [T, H] of one request from position 0 -> [T, H]."""
    wq_a, wkv = p.wqkv_a.to(F64).split((c.q_lora_rank, c.head_dim))
    kv = [rotated(rms(wkv @ x) * p.kv_norm.to(F64), t, c, window_only, 1) for t, x in enumerate(xs)]
    out = []
    for t, x in enumerate(xs):
        q = (p.wq_b.to(F64) @ (rms(wq_a @ x) * p.q_norm.to(F64))).view(-1, c.head_dim)
        q = rotated(q, t, c, window_only, 1)
        seen = torch.stack(kv[max(0, t - c.sliding_window + 1) : t + 1])
        weights = torch.exp(q @ seen.T / math.sqrt(c.head_dim))
        weights = weights / (weights.sum(1, keepdim=True) + torch.exp(p.sink.to(F64))[:, None])
        o = rotated(weights @ seen, t, c, window_only, -1)
        groups = o.view(c.o_groups, -1)
        low = torch.cat([p.wo_a[g].to(F64) @ groups[g] for g in range(c.o_groups)])
        out.append(p.wo_b.to(F64) @ low)
    return torch.stack(out)


def expert(x, w13, w2, limit):
    gate, up = (w13.to(F64) @ x).chunk(2)
    gate, up = torch.minimum(gate, torch.tensor(limit, dtype=F64)), up.clip(-limit, limit)
    return w2.to(F64) @ (gate / (1 + torch.exp(-gate)) * up)


def moe(x, p, c, top_k):
    """The output, and by how much the last chosen expert beat the next: a narrow choice is rounding's."""
    score = [math.sqrt(math.log1p(math.exp(float(v)))) for v in p.gate.to(F64) @ x]
    biased = [s + float(b) for s, b in zip(score, p.bias, strict=True)]
    ids = sorted(range(len(score)), key=lambda e: -biased[e])
    margin = biased[ids[top_k - 1]] - biased[ids[top_k]]
    ids = ids[:top_k]
    total = sum(score[e] for e in ids)
    routed = sum(c.routed_scaling_factor * score[e] / total * expert(x, p.w13[e], p.w2[e], c.swiglu_limit) for e in ids)
    return routed + expert(x, p.shared_w13, p.shared_w2, c.swiglu_limit), margin


def engram(S, history, p, c):
    """S [hc, H]; history: this token's id and all before it, newest first."""
    columns, r, blocked = [], 0, False
    for s in range(c.engram_max_ngram_size):
        dead = s >= len(history) or c.image_tokens[0] <= history[s] < c.image_tokens[1]
        blocked = blocked or dead
        r ^= (c.engram_pad_token_id if blocked else history[s]) % c.engram_compressed_vocab_size * int(p.multipliers[s])
        if s:
            for head in range(c.engram_n_heads):
                column = (s - 1) * c.engram_n_heads + head
                columns.append(r % int(p.primes[column]) + sum(map(int, p.primes[:column])))
    both = (p.wkv.to(F64) @ p.table[columns].to(F64).reshape(-1)).view(c.hc_mult + 1, -1)
    out = []
    for i in range(c.hc_mult):
        d = float((rms(S[i]) * p.q[i].to(F64) * p.k[i].to(F64) * rms(both[i])).sum()) / math.sqrt(c.hidden_size)
        z = math.copysign(math.sqrt(max(abs(d), 1e-6)), d)
        dead = c.image_tokens[0] <= history[0] < c.image_tokens[1]
        out.append(S[i] + (0 if dead else 1 / (1 + math.exp(-z))) * both[-1])
    return torch.stack(out)


def layer(S, pre, tokens, p, c):
    """S [T, hc, H], pre [T, hc] and the ids of one request from position 0 -> S, pre of the next layer, fp64, and the
    margin of each token's routing."""
    S, pre, T = S.to(F64), pre.to(F64), range(len(S))
    if p.engram is not None:
        S = torch.stack([engram(S[t], tokens[t::-1], p.engram, c) for t in T])
    xs = [rms(pre[t] @ S[t]) * p.attn_norm.to(F64) for t in T]
    mixed = [mixes(S[t], p.attn_mix, c) for t in T]
    ys = attention(xs, p.attention, c, p.window_only)
    S = torch.stack([post(ys[t], S[t], *mixed[t][1:]) for t in T])
    xs = [rms(mixed[t][0] @ S[t]) * p.ffn_norm.to(F64) for t in T]
    mixed = [mixes(S[t], p.ffn_mix, c) for t in T]
    ys, margins = zip(*(moe(xs[t], p.moe, c, p.router.top_k) for t in T), strict=True)
    S = torch.stack([post(ys[t], S[t], *mixed[t][1:]) for t in T])
    return S, torch.stack([m[0] for m in mixed]), margins
