"""`moetail bench kernels --op finalize_all_reduce`: the tail across ranks, against separate kernels and a collective.

Under torchrun the ranks are real, hold different data, and the slowest one counts. In one process on a GPU they are
virtual: W streams that share the GPU, which shows what the protocol itself costs and nothing of a link.
Bits first: ours that fail stop the run, and no time is printed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moetail import reference
from moetail.bench import stats, timing
from moetail.bench.contenders import KernelInputs
from moetail.bench.ranks import Ranks
from moetail.comm.finalize_all_reduce import finalize_all_reduce
from moetail.comm.workspace import MAX_WORLD_SIZE, Workspace
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize
from moetail.testing import assert_same_bits

OURS, ALONE = "moetail TRTLLM", "finalize alone"
TOKENS = (1, 8, 16, 64, 128, 256)
DEFAULT = tuple((T, 6, 5120) for T in TOKENS)
# Sets of inputs that rotate, and calls in a graph: a graph's own start is about 3 us and must not show.
_SETS, _CALLS = 8, 96
Program = Callable[[], object]


def check_ranks(virtual: int | None, ranks: Ranks, device: torch.device) -> None:
    """Raises: ValueError where there are not two ranks or more, real or virtual."""
    if virtual is None and ranks.world_size == 1:
        raise ValueError("op finalize_all_reduce must run under torchrun, or with --ranks W on a GPU, got one process")
    if virtual is not None and (ranks.world_size > 1 or device.type != "cuda"):
        raise ValueError(f"ranks must be given in one process on a GPU, got {ranks.world_size} processes on {device}")
    if virtual is not None and not 2 <= virtual <= MAX_WORLD_SIZE:
        raise ValueError(f"ranks must be from 2 to {MAX_WORLD_SIZE}, got {virtual}")


def run_shape(
    T: int, K: int, H: int, device: torch.device, ranks: Ranks, virtual: int | None = None, rounds: int = 20
) -> dict[str, Any]:
    """One shape, as a row of a record: microseconds a call, and baseline over ours.

    Raises: ValueError as `check_ranks`; RuntimeError where our bits fail.
    """
    check_ranks(virtual, ranks, device)
    with contextlib.ExitStack() as stack:
        if virtual is None:
            arms = _real(T, K, H, device, ranks, stack)
        else:
            arms = _virtual(T, K, H, device, virtual, stack)
        timing.warm_up(arms, seconds=0.2, slowest=ranks.slowest)
        samples, paired = timing.interleave(arms, rounds, slowest=ranks.slowest)
    per_call = {name: [us / _CALLS for us in values] for name, values in samples.items()}
    ratios = {name: stats.paired_ratio(paired[OURS], paired[name]) for name in paired if name not in (OURS, "control")}
    aa = stats.paired_ratio(paired[OURS], paired["control"])
    world_size = virtual or ranks.world_size
    return {
        "op": "finalize_all_reduce", "case": f"T={T} K={K} H={H} W={world_size}", "T": T, "K": K, "H": H,
        "dtype": "bfloat16", "world_size": world_size, "mode": "ranks" if virtual is None else "virtual ranks",
        "l2": f"{_SETS} sets", "us": stats.summary(per_call[OURS])["median_us"], "tb_per_s": None,
        "share_of_copy": None,
        "arms": {
            name: {**stats.summary(values), "samples_us": [round(v, 3) for v in values],
                   "bits": "TRTLLM" if name in (OURS, "control") else None}
            for name, values in per_call.items()
        },
        "ratios": {name: {"value": r.value, "low": r.low, "high": r.high} for name, r in ratios.items()},
        "aa": {"b_over_a": aa.value, "low": aa.low, "high": aa.high}, "not_installed": [],
    }  # fmt: skip


def _inputs(T: int, K: int, H: int, device: torch.device, rank: int) -> list[KernelInputs]:
    torch.manual_seed(1000 + rank)  # ranks must differ
    return [KernelInputs.random(T, K, H, device) for _ in range(_SETS)]


def _op(x: KernelInputs, workspace: Workspace) -> torch.Tensor:
    return finalize_all_reduce(*x.finalize_args(Numerics.TRTLLM), workspace=workspace, out=x.out)


def _finalized(x: KernelInputs, out: torch.Tensor) -> torch.Tensor:
    return finalize(*x.finalize_args(Numerics.TRTLLM), out=out)


def _partials(x: KernelInputs) -> torch.Tensor:
    return reference.finalize(*x.finalize_args(Numerics.TRTLLM))


def _check(got: torch.Tensor, partials: list[torch.Tensor], workspace: Workspace) -> None:
    try:
        assert_same_bits(got, reference.all_reduce(partials))
    except AssertionError as error:
        workspace.check()
        raise RuntimeError(f"{OURS} has wrong bits and is not timed: {error}") from None


def _calls(calls: Sequence[Program]) -> Program:
    def program() -> None:
        for i in range(_CALLS):
            calls[i % len(calls)]()

    return program


def _real(T: int, K: int, H: int, device: torch.device, ranks: Ranks, stack: contextlib.ExitStack) -> list[timing.Arm]:
    group = dist.group.WORLD
    assert group is not None
    workspace = Workspace(group, T, H, timeout_s=60.0, device=device)
    stack.callback(workspace.destroy)
    inputs = _inputs(T, K, H, device, ranks.rank)
    partial = _partials(inputs[0])
    partials = [torch.empty_like(partial) for _ in range(ranks.world_size)]
    dist.all_gather(partials, partial)
    _check(_op(inputs[0], workspace), partials, workspace)

    def separate(collective: Callable[[torch.Tensor], object], out: torch.Tensor | None = None) -> Sequence[Program]:
        def call(x: KernelInputs) -> None:
            collective(_finalized(x, x.out if out is None else out))

        return [functools.partial(call, x) for x in inputs]

    ours = [functools.partial(_op, x, workspace) for x in inputs]
    programs: dict[str, Sequence[Program]] = {
        OURS: ours,
        f"finalize + {'nccl' if device.type == 'cuda' else 'gloo'}": separate(dist.all_reduce),
        ALONE: [functools.partial(_finalized, x, x.out) for x in inputs],
        "control": ours,
    }
    if device.type == "cpu":
        return [timing.cpu_arm(name, _calls(calls), ranks.rendezvous) for name, calls in programs.items()]
    import torch.distributed._symmetric_memory as symm_mem

    buffer = symm_mem.empty(T, H, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(buffer, group.group_name)
    one_shot, two_shot = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    programs["finalize + symm_mem one-shot"] = separate(lambda y: one_shot(y, "sum", group.group_name), buffer)
    programs["finalize + symm_mem two-shot"] = separate(lambda y: two_shot(y, "sum", group.group_name), buffer)
    arms = [timing.cuda_graph_arm(name, _calls(calls), ranks.rendezvous) for name, calls in programs.items()]
    with _vllm_custom_all_reduce(device, T * H * 2) as custom:
        if custom is not None:
            arms.append(timing.cuda_graph_arm("finalize + vllm custom", _calls(separate(custom)), ranks.rendezvous))
    return arms


@contextlib.contextmanager
def _vllm_custom_all_reduce(device: torch.device, num_bytes: int) -> Iterator[Callable[[torch.Tensor], object] | None]:
    """vLLM's own one- and two-shot kernel; None where it is not installed or does not take this size. A graph is
    captured inside the block, which registers its buffers at the end."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        yield None
        return
    custom = CustomAllreduce(dist.new_group(backend="gloo"), device)
    if custom.disabled or num_bytes > custom.max_size:
        yield None
        return
    with custom.capture():
        yield custom.custom_all_reduce


def _virtual(T: int, K: int, H: int, device: torch.device, W: int, stack: contextlib.ExitStack) -> list[timing.Arm]:
    workspaces = Workspace.virtual(W, T, H, timeout_s=60.0, device=device)
    for workspace in workspaces:
        stack.callback(workspace.destroy)
    streams = [torch.cuda.Stream(device) for _ in range(W)]
    inputs = [_inputs(T, K, H, device, r) for r in range(W)]

    def on_streams(calls: Sequence[Sequence[Program]]) -> Program:
        """Rank r's calls on stream r, all of them from the current stream's state and back into it."""

        def program() -> None:
            current = torch.cuda.current_stream(device)
            for stream, own in zip(streams, calls, strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    _calls(own)()
            for stream in streams:
                current.wait_stream(stream)

        return program

    ours = [[functools.partial(_op, x, workspaces[r]) for x in inputs[r]] for r in range(W)]
    alone = [[functools.partial(_finalized, x, x.out) for x in inputs[r]] for r in range(W)]
    _load(workspaces, device, K, H)
    for r in range(W):
        with torch.cuda.stream(streams[r]):
            ours[r][0]()
    torch.cuda.synchronize(device)
    for r in range(W):
        _check(inputs[r][0].out, [_partials(inputs[s][0]) for s in range(W)], workspaces[r])
    programs = {
        OURS: on_streams(ours), ALONE: _calls(alone[0]), f"finalize on {W} streams": on_streams(alone),
        "control": on_streams(ours),
    }  # fmt: skip
    return [timing.cuda_graph_arm(name, program) for name, program in programs.items()]


def _load(workspaces: list[Workspace], device: torch.device, K: int, H: int) -> None:
    """Every kernel is loaded before a rank may poll: an empty call on each, then they have nothing to wait for."""
    streams = [torch.cuda.Stream(device) for _ in workspaces]
    empty = KernelInputs.random(0, K, H, device)
    _finalized(empty, empty.out)
    for stream, workspace in zip(streams, workspaces, strict=True):
        with torch.cuda.stream(stream):
            _op(empty, workspace)
    torch.cuda.synchronize(device)
