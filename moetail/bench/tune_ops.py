"""What `moetail tune` measures of each op: its configs on real inputs, between a producer and a consumer where it has
such neighbours in a model.

Every maker takes (shape, T, device) and gives a `Bench`. Experts' weights are made once a shape (9 GB at
DeepSeek-V4.1-Flash's first GEMM), and rotate with the routing: four sets of choices, so that few tokens do not find
their experts' weights in the L2 cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetail.bench import edges
from moetail.bench.contenders import KernelInputs
from moetail.bench.contenders_finalize_mhc import MhcInputs
from moetail.bench.contenders_finalize_norm import NormInputs
from moetail.numerics import Numerics
from moetail.ops import (
    epilogue_triton,
    finalize_mhc_triton,
    finalize_norm_triton,
    finalize_triton,
    grouped_gemm_triton,
    permute_triton,
    route_triton,
)
from moetail.ops.epilogue_triton import RowConfig
from moetail.ops.finalize_triton import FinalizeConfig
from moetail.ops.permute import permute
from moetail.routing import Router
from moetail.tuning import Shape

_SETS_BYTES = 192 * 2**20
_EPS = 1e-6
# A launch with a config, which gives rows as they lie; and those rows in the order of the slots.
Launcher = tuple[Callable[[Any], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Bench:
    """`program(config)` is what is timed; `outputs(config)` runs once and returns what must not differ in a bit from
    `want`."""

    heuristic: Any
    candidates: tuple[Any, ...]
    program: Callable[[Any], Callable[[], None]]
    outputs: Callable[[Any], list[torch.Tensor]]
    want: list[torch.Tensor]


FINALIZE = tuple(
    FinalizeConfig(block, warps, columns_first)
    for columns_first in (False, True)
    for block in (128, 256, 512, 1024, 2048, 4096)
    for warps in (1, 2, 4, 8)
    if 2 <= block // (32 * warps) <= 32
)
# Each with the compiler's registers, and with all that one program on a multiprocessor may have.
ROWS = tuple(
    RowConfig(warps, registers) for warps in (1, 2, 4, 8, 16, 32) for registers in (0, min(65536 // (32 * warps), 255))
)


def finalize(shape: Shape, T: int, device: torch.device) -> Bench:
    """A config is timed as a model runs it: tuned on calls chained to themselves, the one found for T = 16, H = 5120
    took 1.9 us there, and the heuristic's 1.2 (H200)."""
    K, H = shape["K"], shape["H"]
    inputs = _sets(lambda: KernelInputs.random(T, K, H, device))
    sink = torch.empty_like(inputs[0].out)

    def run(x: KernelInputs, config: FinalizeConfig) -> None:
        finalize_triton.launch(
            x.rows, x.row_map, x.weights, x.shared, None, None, 1.0, Numerics.TRTLLM, x.out, config
        )  # fmt: skip

    guess = finalize_triton.heuristic(T, H, 2)
    widest = 2 * max(H, 128)
    return _between_edges(inputs, guess, tuple(c for c in FINALIZE if c.block < widest), run, lambda x: [x.out], sink)


def finalize_norm(shape: Shape, T: int, device: torch.device) -> Bench:
    K, H = shape["K"], shape["H"]
    inputs = _sets(lambda: NormInputs.random(T, K, H, device))

    def run(x: NormInputs, config: RowConfig) -> None:
        finalize_norm_triton.launch(
            x.rows, x.row_map, x.weights, x.shared, None, None, 1.0, Numerics.TRTLLM, x.residual, x.norm_weight, _EPS,
            None, False, x.out, x.residual_out, config=config,
        )  # fmt: skip

    unit = 8 if finalize_triton.has_pdl(device) else 0  # clusters come with sm_90, as early launches do
    guess = finalize_norm_triton.heuristic(T, H, 2, unit)
    candidates = (*_rows(H), *finalize_norm_triton.clustered(H, unit))
    sink = torch.empty_like(inputs[0].out)
    return _between_edges(inputs, guess, candidates, run, lambda x: [x.out, x.residual_out], sink)


def finalize_mhc(shape: Shape, T: int, device: torch.device) -> Bench:
    K, H, hc = shape["K"], shape["H"], shape["hc"]
    inputs = _sets(lambda: MhcInputs.random(T, K, H, device, hc=hc))

    def run(x: MhcInputs, config: RowConfig) -> None:
        finalize_mhc_triton.launch(
            x.rows, x.row_map, x.weights, x.shared, None, None, 1.0, Numerics.TRTLLM, x.residual, x.post_mix, x.res_mix,
            x.pre_mix, x.norm_weight, _EPS, x.out, x.residual_out, config=config,
        )  # fmt: skip

    guess = epilogue_triton.heuristic(finalize_mhc_triton.ROW_SHAPES, T, H, 2)
    sink = torch.empty_like(inputs[0].out)
    return _between_edges(inputs, guess, _rows(H), run, lambda x: [x.out, x.residual_out], sink)


def route(shape: Shape, T: int, device: torch.device) -> Bench:
    E, dims = shape["E"], dict(shape.dims)
    router = Router(dims["K"], dims["score"], True, int(dims.get("groups", 1)), int(dims.get("top_groups", 1)))  # type: ignore[arg-type]
    dtype = getattr(torch, shape.dtype)
    logits = [torch.randn(T, E, device=device).to(dtype) for _ in range(8)]
    bias = torch.randn(E, device=device) * 0.1
    weights, ids = (torch.empty(T, router.top_k, device=device, dtype=d) for d in (torch.float32, torch.int32))

    def run(x: torch.Tensor, config: route_triton.RouteConfig) -> None:
        route_triton.launch(x, bias, router, weights, ids, config)

    return _alone(logits, route_triton.HEURISTIC, route_triton.CANDIDATES, run, lambda: [weights, ids])


def permute_(shape: Shape, T: int, device: torch.device) -> Bench:
    from moetail.ops.permute import _new

    E, K, block = shape["E"], shape["K"], shape["block"]
    choices = [random_choices(T, K, E, device) for _ in range(8)]
    out = _new(choices[0], E, block)

    def run(ids: torch.Tensor, config: permute_triton.PermuteConfig) -> None:
        permute_triton.launch(ids, None, E, block, *out, config=config)  # type: ignore[misc, arg-type]

    return _alone(choices, permute_triton.HEURISTIC, permute_triton.CANDIDATES, run, lambda: list(out))


def grouped_gemm(shape: Shape, T: int, device: torch.device) -> Bench:
    """Want is what the config of the smallest block computes: a row has the same bits under every schedule."""
    E, K, N, Kd, block = (shape[name] for name in ("E", "K", "N", "Kd", "block"))
    weight = expert_weights(E, N, Kd, shape["transposed"], device)
    gather, activation, limit = bool(shape["gather"]), "swiglu" if shape["swiglu"] else None, 10.0
    sets = [random_choices(T, K, E, device) for _ in range(4)]
    x_slots = torch.randn(T if gather else T * K, Kd, device=device, dtype=torch.bfloat16)
    columns = N // 2 if activation else N

    def launcher(ids: torch.Tensor, block: int) -> Launcher:
        p = permute(ids, E, block=block)
        x = x_slots if gather else x_slots[p.source.clamp(min=0)]
        out = torch.full((p.source.numel(), columns), torch.nan, device=device, dtype=torch.bfloat16)

        def run(config: Any) -> torch.Tensor:
            grouped_gemm_triton.launch(
                x, weight, None, p.source, p.block_expert, T, K, block, gather, activation,
                limit if activation else None, out, config,
            )  # fmt: skip
            return out

        return run, lambda out: out[p.row_map.flatten()]

    runs = [launcher(ids, block) for ids in sets]

    def program(config: Any) -> None:
        for run, _ in runs:
            run(config)

    def once(config: Any, which: Launcher = runs[0]) -> list[torch.Tensor]:
        run, in_slot_order = which
        return [in_slot_order(run(config).clone())]

    want = once(grouped_gemm_triton.CONFIGS[16], launcher(sets[0], 16))
    config, candidates = grouped_gemm_triton.CONFIGS[block], grouped_gemm_triton.candidates(block)
    return Bench(config, candidates, lambda config: functools.partial(program, config), once, want)


MAKERS: dict[str, Callable[[Shape, int, torch.device], Bench]] = {
    "finalize": finalize, "finalize_norm": finalize_norm, "finalize_mhc": finalize_mhc, "route": route,
    "permute": permute_, "grouped_gemm": grouped_gemm,
}  # fmt: skip


@functools.lru_cache(maxsize=4)
def expert_weights(E: int, N: int, Kd: int, transposed: bool, device: torch.device) -> torch.Tensor:
    """[E, N, Kd] bf16, of variance 1 / Kd; `transposed`: stride 1 in N."""
    shape = (E, Kd, N) if transposed else (E, N, Kd)
    weight = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=Kd**-0.5)
    return weight.transpose(1, 2) if transposed else weight


def random_choices(T: int, K: int, E: int, device: torch.device) -> torch.Tensor:
    """int32 [T, K]: K different experts a token, each as likely as any other."""
    return torch.rand(T, E, device=device).argsort(dim=1)[:, :K].int().contiguous()


def _rows(H: int) -> tuple[RowConfig, ...]:
    return tuple(config for config in ROWS if 4 <= H // (32 * config.warps) <= 64) or ROWS


def _sets(make: Callable[[], Any]) -> list[Any]:
    """So many sets of inputs that no call finds its own in the L2 cache."""
    first = make()
    count = max(2, min(64, _SETS_BYTES // first.num_bytes(Numerics.TRTLLM)))
    return [first, *(make() for _ in range(count - 1))]


def _between_edges(
    inputs: list[Any],
    guess: Any,
    candidates: tuple[Any, ...],
    run: Callable[[Any, Any], None],
    outputs: Callable[[Any], list[torch.Tensor]],
    sink: torch.Tensor,
) -> Bench:
    first = inputs[0]
    first.rows.copy_(first.slot_rows)  # what the producer writes

    def program(config: Any) -> None:
        for x in inputs:
            edges.produce(x.slot_rows, x.rows)
            run(x, config)
            edges.consume(x.out, x.shared, sink)

    def once(config: Any) -> list[torch.Tensor]:
        for out in outputs(first):
            out.fill_(torch.nan)
        run(first, config)
        return [out.clone() for out in outputs(first)]

    return Bench(guess, candidates, lambda config: functools.partial(program, config), once, once(guess))


def _alone(
    inputs: list[torch.Tensor],
    guess: Any,
    candidates: tuple[Any, ...],
    run: Callable[[torch.Tensor, Any], None],
    outputs: Callable[[], list[torch.Tensor]],
) -> Bench:
    def program(config: Any) -> None:
        for x in inputs:
            run(x, config)

    def once(config: Any) -> list[torch.Tensor]:
        for out in outputs():
            out.fill_(-77)
        run(inputs[0], config)
        return [out.clone() for out in outputs()]

    return Bench(guess, candidates, lambda config: functools.partial(program, config), once, once(guess))
