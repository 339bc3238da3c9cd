"""fused_experts: from hidden states and the router's choice to the finalized [T, H], ours and vLLM's.

vLLM's Triton experts weigh their rows in the second GEMM and add them with moe_sum; ours leave that to `finalize`. Both
get what a tuner gives: ours the config files' or the heuristic's, vLLM's the fastest here of its own default and the
CONFIGS below, as many for a call as `grouped_gemm_triton.CANDIDATES` has for a block. Importing vLLM changes Inductor's
settings in this process: so this is no part of `moe_block`, where Inductor is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from moetail.bench import timing
from moetail.bench.contenders_block import CLOSE, Arms, Case, Size, _choices, _distance, _hit
from moetail.bench.tune_ops import expert_weights
from moetail.experts import GroupedMMExperts, TritonExperts
from moetail.ops.finalize import finalize

# BLOCK_SIZE_M, _N, _K, GROUP_SIZE_M, warps, stages: of the space that vLLM's benchmark_moe.py walks.
DECODE = (
    (16, 32, 64, 1, 4, 5), (16, 32, 128, 1, 4, 4), (16, 64, 64, 1, 4, 4), (16, 64, 128, 1, 4, 3),
    (16, 64, 128, 1, 4, 5), (16, 64, 256, 1, 4, 3), (16, 128, 64, 1, 4, 4), (16, 128, 128, 1, 4, 3),
    (16, 128, 128, 1, 8, 4), (16, 128, 64, 16, 4, 5), (16, 256, 64, 1, 8, 4),
)  # fmt: skip
PREFILL = (
    (64, 128, 64, 16, 4, 3), (64, 128, 64, 16, 4, 4), (64, 128, 128, 16, 8, 3), (64, 256, 64, 16, 8, 4),
    (128, 128, 64, 16, 8, 3), (128, 128, 64, 16, 4, 3), (128, 128, 64, 1, 8, 4), (128, 256, 64, 16, 8, 3),
    (128, 256, 64, 16, 8, 4), (128, 256, 64, 32, 8, 4),
)  # fmt: skip
_VLLM = "vllm fused_experts"
_FIELDS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


def fused_experts(size: Size, device: torch.device, routing: str, part: str) -> Case:
    """`bytes` are the weights of the experts that are hit, and nothing else."""
    T, E, K, H, inner = size.T, size.E, size.K, size.H, size.I
    up, down = expert_weights(E, 2 * inner, H, False, device), expert_weights(E, H, inner, False, device)
    sets = _choices(size, routing, device)
    x = torch.randn(T, H, device=device, dtype=torch.bfloat16)
    weights = torch.rand(T, K, device=device)

    def program(experts: GroupedMMExperts | TritonExperts, ids: torch.Tensor) -> torch.Tensor:
        routed = experts(x, ids, weights)
        return finalize(routed.rows, routed.row_map, routed.weights)

    backends: dict[str, GroupedMMExperts | TritonExperts] = {
        "moetail": TritonExperts(up, down),
        "torch grouped_mm": GroupedMMExperts(up, down),
    }
    arms: Arms = {
        name: [functools.partial(program, experts, ids) for ids in sets] for name, experts in backends.items()
    }
    missing: list[str] = []
    if device.type == "cuda" and importlib.util.find_spec("vllm") is not None:
        arms[_VLLM] = _tuned(lambda ids: _vllm(x, up, down, weights, ids), sets, DECODE if T * K <= E else PREFILL)
    else:
        missing.append(_VLLM)

    def error() -> float:
        outs = [calls[0]() for calls in arms.values()]
        return max(_distance(outs[0], other) for other in outs[1:])

    hit, each = _hit(sets), 3 * inner * H
    return Case(arms, int(hit * each) * 2, 2 * T * K * each, error, CLOSE, hit, missing)


def _vllm(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

    return fused_experts_impl(x, up, down, weights, ids)


def _tuned(
    run: Callable[[torch.Tensor], torch.Tensor], sets: list[torch.Tensor], configs: tuple[tuple[int, ...], ...]
) -> list[Callable[[], torch.Tensor]]:
    """The programs of the fastest config; None is vLLM's own choice."""
    looks: dict[tuple[int, ...] | None, float] = {}
    for config in (None, *configs):
        try:
            arm = timing.cuda_graph_arm(str(config), functools.partial(_all_under, config, run, sets))
        except Exception as error:  # Triton's own, where a program does not fit a multiprocessor
            if type(error).__name__ != "OutOfResources" or config is None:
                raise
            continue
        arm.run()
        looks[config] = min(arm.run() for _ in range(3))
    best = min(looks, key=lambda config: looks[config])
    return [functools.partial(_under, best, run, ids) for ids in sets]


def _all_under(
    config: tuple[int, ...] | None, run: Callable[[torch.Tensor], torch.Tensor], sets: list[torch.Tensor]
) -> None:
    for ids in sets:
        _under(config, run, ids)


def _under(config: tuple[int, ...] | None, run: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> Any:
    from vllm.model_executor.layers import fused_moe

    with fused_moe.override_config(None if config is None else dict(zip(_FIELDS, config, strict=True))):
        return run(ids)
