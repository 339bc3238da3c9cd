"""Times every config of the two-shot kernel, and both paths around the switch, on real ranks:

    torchrun --nproc-per-node=2 scripts/sweep_two_shot.py [epilogue none|norm] [T,T,..] [H] [K]

Prints microseconds of the slowest rank, CUDA graphs of ten calls, median of twelve. What wins goes into
`two_shot_triton.heuristic` and `tuning.ONE_SHOT_TOKENS` by hand. Bits are checked at every config.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import moetail
from moetail import reference, tuning
from moetail.comm import finalize_all_reduce_triton as one_shot
from moetail.comm import two_shot_triton as two_shot
from moetail.testing import assert_same_bits, finalize_inputs

_CALLS = 10


def measured(call: Callable[[int], object]) -> float:
    """Microseconds a call on the slowest rank."""
    call(0)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(_CALLS):
            call(i)
    samples = []
    for _ in range(14):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        us = torch.tensor(start.elapsed_time(end) * 1e3 / _CALLS, device="cuda")
        dist.all_reduce(us, dist.ReduceOp.MAX)
        samples.append(us.item())
    return statistics.median(samples[2:])


def sweep(epilogue: str, T: int, H: int, K: int) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    gpu = torch.cuda.get_device_name()
    sets = [finalize_inputs(T, K, H, device="cuda", seed=10 * i + rank) for i in range(3 if T > 2048 else 8)]
    partial = reference.finalize(sets[0].rows, sets[0].row_map, sets[0].weights, sets[0].shared)
    partials = [torch.empty_like(partial) for _ in range(W)]
    dist.all_gather(partials, partial)
    residual, weight = torch.zeros(T, H, dtype=torch.bfloat16, device="cuda"), torch.ones(H, device="cuda")
    norm = {"residual": residual, "norm_weight": weight, "eps": 1e-6} if epilogue == "norm" else {}
    op = moetail.finalize_all_reduce_norm if norm else moetail.finalize_all_reduce
    want = reference.all_reduce_norm(partials, **norm)[0] if norm else reference.all_reduce(partials)

    def timed(name: str, one_shot_tokens: int) -> None:
        tuning.ONE_SHOT_TOKENS[gpu, W] = one_shot_tokens
        one_shot._compile.cache_clear()
        workspace = moetail.Workspace(dist.group.WORLD, T, H, timeout_s=60.0)

        def call(i: int) -> torch.Tensor:
            x = sets[i % len(sets)]
            y = op(x.rows, x.row_map, x.weights, x.shared, workspace=workspace, **norm)
            return y[0] if norm else y

        got = call(0)
        torch.cuda.synchronize()
        workspace.check()
        assert_same_bits(got, want)
        us = measured(call)
        workspace.check()
        if rank == 0:
            print(f"T={T} K={K} H={H} W={W} {epilogue}: {us:8.1f} us  {name}", flush=True)
        dist.barrier()
        workspace.destroy()

    if T <= 4096:
        timed("one shot", T)
    guess = two_shot.heuristic(W, H, epilogue)
    for config in dict.fromkeys((guess, *two_shot.every_config(H, epilogue))):
        two_shot.heuristic = lambda *_, config=config: config
        timed(f"{config}{' (heuristic)' if config == guess else ''}", 1)


def main() -> None:
    epilogue, sizes, H, K = (*sys.argv[1:], *("none", "256,512,1024,4096,8192", "5120", "6")[len(sys.argv) - 1 :])
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    original = two_shot.heuristic
    for T in sizes.split(","):
        two_shot.heuristic = original
        sweep(epilogue, int(T), int(H), int(K))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
