"""What `bench kernels` compares of a MoE block up to its tail: ours, and what people use today.

route         ours | transformers' DeepSeek-V4 expression | Inductor on it | vLLM's topk_softplus_sqrt
permute       ours, for the block of that many tokens | torch's sort, histc and cumsum | vLLM's moe_align_block_size
grouped_gemm  ours, "first" (gather and SwiGLU inside) or "second" | torch's grouped_mm with what it needs around it
experts       TritonExperts | GroupedMMExperts
moe_block     ours from the router's logits to the tail | the same under transformers' own router and block
              (`enable(model, experts="triton")`) | transformers' DeepSeek-V3 block on grouped_mm | torch.compile of it

A case checks ours before it is timed: exactly where the result is exact, else within CLOSE of the baseline, whose
roundings lie at other places.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from moetail import reference
from moetail.bench.contenders import load_vllm_ops
from moetail.bench.routing import balanced_index
from moetail.bench.tune_ops import expert_weights, random_choices
from moetail.experts import GroupedMMExperts, TritonExperts
from moetail.models.dense import product_f32, swiglu
from moetail.ops.finalize import finalize
from moetail.ops.grouped_gemm import BLOCKS, block_for
from moetail.ops.grouped_gemm import grouped_gemm as grouped_gemm_op
from moetail.ops.permute import permute as permute_op
from moetail.ops.route import route as route_op
from moetail.routing import Permutation, Router

SETS = 4
LIMIT = 10.0
# Root mean square of the difference over that of the result. A rounding to bf16 leaves 2**-9.8 of it, and the paths
# differ by up to six: 2**-8.5. On a CPU experts of 48 to 1152 columns were 2**-7.5 apart at most.
CLOSE = 2.0**-7

Arms = dict[str, list[Callable[[], Any]]]


@dataclass(frozen=True)
class Size:
    """T tokens, E experts of which each takes K, hidden size H, I columns inside an expert."""

    T: int
    E: int
    K: int
    H: int
    I: int  # noqa: E741

    def __str__(self) -> str:
        return f"T={self.T} E={self.E} K={self.K} H={self.H} I={self.I}"


@dataclass(frozen=True)
class Case:
    """`arms`: one program a set of inputs, the same sets in each; ours is "moetail". `error()`: how far ours is from
    what it must be, 0 where that is exact; `allowed`: how far it may be."""

    arms: Arms
    num_bytes: int
    flops: int
    error: Callable[[], float]
    allowed: float = 0.0
    experts_hit: float = 0.0
    missing: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises: RuntimeError where ours is wrong: no time is printed for it."""
        error = self.error()
        if not error <= self.allowed:
            raise RuntimeError(f"moetail is off by {error:.2g}, allowed is {self.allowed:.2g}: it is not timed")


def route(size: Size, device: torch.device, routing: str, part: str) -> Case:
    T, E, K = size.T, size.E, size.K
    router = Router(K, "sqrtsoftplus", renormalize=True, routed_scale=1.5)
    logits = [torch.randn(T, E, device=device) for _ in range(SETS)]
    bias = torch.randn(E, device=device) * 0.1
    expression = functools.partial(_transformers_router, bias=bias, K=K)
    compiled = torch.compile(expression, dynamic=False)
    arms: Arms = {
        "moetail": [functools.partial(route_op, x, router, bias) for x in logits],
        "transformers": [functools.partial(expression, x) for x in logits],
        "inductor": [functools.partial(compiled, x) for x in logits],
    }
    missing = _with_vllm(arms, "vllm topk_softplus_sqrt", lambda: [_vllm_route(x, bias, K) for x in logits])

    def error() -> float:
        pairs = zip(route_op(logits[0], router, bias), reference.route(logits[0], router, bias), strict=True)
        return sum(float((got != want).float().mean()) for got, want in pairs)

    return Case(arms, T * (E * 4 + K * 8) + 4 * E, 0, error, missing=missing)


def permute(size: Size, device: torch.device, routing: str, part: str) -> Case:
    T, E, K = size.T, size.E, size.K
    block = block_for(T, K, E)
    sets = _choices(size, routing, device)
    arms: Arms = {
        "moetail": [functools.partial(permute_op, ids, E, block=block) for ids in sets],
        "torch sort": [functools.partial(_torch_sort, ids.long(), E) for ids in sets],
    }
    missing = _with_vllm(arms, "vllm moe_align_block_size", lambda: [_vllm_align(ids, E, block) for ids in sets])

    def error() -> float:
        got, want = permute_op(sets[0], E, block=block), reference.permute(sets[0], E, block=block)
        return float(sum(int((getattr(got, n) != getattr(want, n)).sum()) for n in vars(want) if n != "block"))

    rows = permute_op(sets[0], E, block=block).source.numel()
    return Case(arms, 4 * (2 * T * K + rows + rows // block + 2 * E), 0, error, missing=missing)


def grouped_gemm(size: Size, device: torch.device, routing: str, part: str) -> Case:
    T, E, K, H, inner = size.T, size.E, size.K, size.H, size.I
    first = part == "first"
    N, Kd = (2 * inner, H) if first else (H, inner)
    weight = expert_weights(E, N, Kd, False, device)
    sets = _choices(size, routing, device)
    x, transposed = torch.randn(T if first else T * K, Kd, device=device, dtype=torch.bfloat16), weight.transpose(1, 2)
    block = block_for(T, K, E)
    padded = [permute_op(ids, E, block=block) for ids in sets]
    dense = [permute_op(ids, E) for ids in sets]

    def ours(p: Permutation) -> Callable[[], torch.Tensor]:
        if first:
            return lambda: grouped_gemm_op(x, weight, p, gather=True, activation="swiglu", limit=LIMIT)
        rows = x[p.source.clamp(min=0)]
        return lambda: grouped_gemm_op(rows, weight, p)

    def theirs(p: Permutation) -> Callable[[], torch.Tensor]:
        if first:
            return lambda: swiglu(functional.grouped_mm(x[p.source // K], transposed, offs=p.offsets), LIMIT)
        rows = x[p.source]
        return lambda: functional.grouped_mm(rows, transposed, offs=p.offsets)

    arms: Arms = {"moetail": [ours(p) for p in padded], "torch grouped_mm": [theirs(p) for p in dense]}

    def error() -> float:
        got, want = (a[0]()[p[0].row_map.flatten()] for a, p in zip(arms.values(), (padded, dense), strict=True))
        return _distance(got, want)

    hit = _hit(sets)
    moved = int(hit * N * Kd + x.numel() + T * K * (inner if first else H)) * 2
    return Case(arms, moved, 2 * T * K * N * Kd, error, CLOSE, hit)


def experts(size: Size, device: torch.device, routing: str, part: str) -> Case:
    """`bytes` are the weights of the experts that are hit, and nothing else. "block N": ours with another block than
    `block_for` gives, which is right where none of them is faster."""
    T, E, K, H, inner = size.T, size.E, size.K, size.H, size.I
    up, down = expert_weights(E, 2 * inner, H, False, device), expert_weights(E, H, inner, False, device)
    sets = _choices(size, routing, device)
    x = torch.randn(T, H, device=device, dtype=torch.bfloat16)
    weights = torch.rand(T, K, device=device)
    backends: dict[str, TritonExperts | GroupedMMExperts] = {
        "moetail": TritonExperts(up, down, limit=LIMIT),
        "torch grouped_mm": GroupedMMExperts(up, down, limit=LIMIT),
    }
    arms: Arms = {name: [functools.partial(run, x, ids, weights) for ids in sets] for name, run in backends.items()}
    for block in _next_blocks(block_for(T, K, E)):
        arms[f"block {block}"] = [functools.partial(_rows, x, ids, up, down, block) for ids in sets]

    def error() -> float:
        got, want = (run(x, sets[0], weights) for run in backends.values())
        return _distance(*(out.rows[out.row_map.flatten()] for out in (got, want)))

    hit, each = _hit(sets), 3 * inner * H
    return Case(arms, int(hit * each) * 2, 2 * T * K * each, error, CLOSE, hit)


def moe_block(size: Size, device: torch.device, routing: str, part: str) -> Case:
    """Random hidden states: the router chooses. One shared expert of the routed ones' size."""
    from moetail.integrations import transformers as integration

    T, E, K, H, inner = size.T, size.E, size.K, size.H, size.I
    stock = _stock_block(size, device)
    ours = _with_experts(stock, integration.TRITON)
    sets = [torch.randn(1, T, H, device=device, dtype=torch.bfloat16) for _ in range(SETS)]
    router = Router(K, "sigmoid", renormalize=True, routed_scale=2.5)
    backend = TritonExperts(stock.experts.gate_up_proj, stock.experts.down_proj)
    gate, bias = stock.gate.weight, stock.gate.e_score_correction_bias

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = x.view(T, H)
        weights, ids = route_op(product_f32(hidden, gate.T), router, bias)
        routed = backend(hidden, ids, weights)
        return finalize(routed.rows, routed.row_map, routed.weights, stock.shared_experts(hidden)).view(1, T, H)

    compiled = torch.compile(stock, dynamic=False)
    programs = {"moetail": block, "moetail in transformers": ours, "transformers": stock, "inductor": compiled}
    arms: Arms = {name: [functools.partial(run, x) for x in sets] for name, run in programs.items()}
    ids = [stock.gate(x)[2] for x in sets]
    hit, each = _hit(ids), 3 * inner * H
    moved = int((hit + 1) * each + E * H + 2 * T * H) * 2
    flops = 2 * T * ((K + 1) * each + E * H)

    def error() -> float:
        return _distance(block(sets[0]), stock(sets[0]))

    # A token whose choices are close may go elsewhere where the logits are added in another order.
    return Case(arms, moved, flops, error, 2 * CLOSE, hit)


CASES: dict[str, Callable[[Size, torch.device, str, str], Case]] = {
    "route": route, "permute": permute, "grouped_gemm": grouped_gemm, "experts": experts, "moe_block": moe_block,
}  # fmt: skip


def _rows(x: torch.Tensor, ids: torch.Tensor, up: torch.Tensor, down: torch.Tensor, block: int) -> torch.Tensor:
    p = permute_op(ids, up.shape[0], block=block)
    return grouped_gemm_op(grouped_gemm_op(x, up, p, gather=True, activation="swiglu", limit=LIMIT), down, p)


def _next_blocks(block: int) -> tuple[int, ...]:
    at = BLOCKS.index(block)
    return BLOCKS[max(at - 1, 0) : at] + BLOCKS[at + 1 : at + 2]


def _choices(size: Size, routing: str, device: torch.device) -> list[torch.Tensor]:
    T, E, K = size.T, size.E, size.K
    if routing == "random":
        return [random_choices(T, K, E, device) for _ in range(SETS)]
    index = balanced_index(T, K, E, device)
    return [((index + s * (E // SETS)) % E).int() for s in range(SETS)]


def _hit(sets: list[torch.Tensor]) -> float:
    """How many experts a call hits, on average."""
    return sum(ids.unique().numel() for ids in sets) / len(sets)


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt())


def _transformers_router(logits: torch.Tensor, bias: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = functional.softplus(logits).sqrt()
    ids = torch.topk(scores + bias, K, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5, ids


def _torch_sort(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, ...]:
    """What transformers' grouped_mm experts do to order rows."""
    expert_ids, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(expert_ids.float() if ids.device.type == "cpu" else expert_ids.int(), bins=E, min=0, max=E - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=ids.device)
    return offsets, order, inverse


def _with_vllm(arms: Arms, name: str, make: Callable[[], list[Callable[[], Any]]]) -> list[str]:
    """Add vLLM's arm where its library is there and takes these sizes; else the name and why, for the record."""
    if not torch.cuda.is_available():
        return [name]
    try:
        load_vllm_ops()
        programs = make()
        programs[0]()
    except (ModuleNotFoundError, AttributeError):  # no vLLM, or one without that op
        return [name]
    except RuntimeError as error:  # what it checks of its arguments
        return [f"{name} ({str(error).splitlines()[0]})"]
    arms[name] = programs
    return []


def _call(op: Any, *args: Any) -> Callable[[], Any]:
    """The op with these arguments, and None for the optional ones that newer versions have behind them."""
    more = len(op._schema.arguments) - len(args)
    return functools.partial(op, *args, *[None] * more)


def _vllm_route(logits: torch.Tensor, bias: torch.Tensor, K: int) -> Callable[[], Any]:
    T, device = logits.shape[0], logits.device
    weights, ids, slots = (torch.empty(T, K, device=device, dtype=d) for d in (torch.float32, torch.int32, torch.int32))
    return _call(torch.ops._moe_C.topk_softplus_sqrt.default, weights, ids, slots, logits, True, 1.5, bias)


def _vllm_align(ids: torch.Tensor, E: int, block: int) -> Callable[[], Any]:
    most = ids.numel() + E * (block - 1)
    rows, blocks, used = (torch.empty(n, device=ids.device, dtype=torch.int32) for n in (most, -(-most // block), 1))
    return _call(torch.ops._moe_C.moe_align_block_size.default, ids, E, block, rows, blocks, used)


def _stock_block(size: Size, device: torch.device) -> Any:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=size.H, moe_intermediate_size=size.I, n_routed_experts=size.E, num_experts_per_tok=size.K,
        n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = DeepseekV3MoE(config)
    block = block.to(torch.bfloat16).to_empty(device=device).eval()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(False).normal_(std=parameter.shape[-1] ** -0.5)
        assert parameter.dtype == torch.bfloat16, name
    block.gate._buffers["e_score_correction_bias"] = torch.zeros(size.E, device=device)
    return block


def _with_experts(block: Any, implementation: str) -> Any:
    """The same block, on the same weights, with another experts implementation."""
    other = copy.copy(block)
    other._modules = {**block._modules, "experts": copy.copy(block.experts)}
    other.experts.config = copy.deepcopy(block.experts.config)
    other.experts.config._experts_implementation = implementation
    return other
