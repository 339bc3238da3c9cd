"""How each arm ends a sublayer, against the definitions, alone and on ranks whose inputs differ.

`test_deferral.py` has the whole model.
"""

import pytest
import torch
from ranks import Ranks
from test_finalize_mhc import streams_of

from moetail import reference
from moetail.comm.workspace import Workspace
from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.models.parallel import TensorParallel
from moetail.models.tails import ARMS, Partial
from moetail.testing import assert_same_bits, finalize_inputs

CPU = torch.device("cpu")
T, K, H = 9, 5, 40
STREAMS = streams_of(T, 4, H)


def inputs(rank, device="cpu"):
    x = finalize_inputs(T, K, H, seed=rank, device=device)
    return {"rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared}


def pending(x, workspace):
    routed = UnfinalizedMoEOutput(x["rows"], x["row_map"], x["weights"])
    return MoEOutput(routed, x["shared"], TailSpec(workspace=workspace))


def ends(x, tp, streams=STREAMS):
    """(arm, what it is handed): the boundary's outputs, and the finished output. `x`: this rank's inputs."""
    y = reference.finalize(**x)
    handed_on = {
        ("separate", "partial"): lambda: Partial(y),
        ("fused", "partial"): lambda: Partial(y),
        ("fused", "pending"): lambda: pending(x, tp.workspace),
        ("here", "finished"): lambda: pending(x, tp.workspace).complete(),
    }
    return {
        case: (*ARMS[case[0]].boundary(make(), tp, **streams), ARMS[case[0]].finished(make(), tp))
        for case, make in handed_on.items()
    }


def check(results, ranks, device="cpu", streams=STREAMS):
    y = reference.finalize_all_reduce([inputs(rank, device) for rank in ranks])
    want = (*reference.mhc(y, **streams), y)
    for got in results.values():
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs)


def test_alone():
    check(ends(inputs(0), TensorParallel()), [0])


def on_ranks(group):
    return ends(inputs(group.rank()), TensorParallel.of(group, T, H, CPU))


def test_on_three_ranks():
    with Ranks(3) as ranks:
        for results in ranks.run(on_ranks):
            check(results, range(3))


def test_an_output_is_used_once():
    """A boundary takes it; a second one would add and reduce again."""
    output = pending(inputs(0), None)
    ARMS["fused"].boundary(output, TensorParallel(), **STREAMS)
    with pytest.raises(RuntimeError, match="taken already"):
        ARMS["fused"].boundary(output, TensorParallel(), **STREAMS)
    with pytest.raises(RuntimeError, match="taken already"):
        ARMS["fused"].finished(output, TensorParallel())


@pytest.mark.gpu
def test_alone_on_a_gpu():
    streams = streams_of(T, 4, H, device="cuda")
    check(ends(inputs(0, "cuda"), TensorParallel(), streams), [0], "cuda", streams)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4])
def test_virtual_ranks(W):
    """W ranks in this process, one stream each: the ends of every arm, in the same order on each."""
    workspaces, streams = Workspace.virtual(W, T, H, timeout_s=20.0), streams_of(T, 4, H, device="cuda")
    own, results = [torch.cuda.Stream() for _ in range(W)], []
    every = [inputs(rank, "cuda") for rank in range(W)]
    torch.cuda.synchronize()
    for calls in ("empty", "real"):  # empty ones load every kernel before a rank may poll
        results.clear()
        for rank in range(W):
            with torch.cuda.stream(own[rank]):
                torch.empty(
                    2**25, dtype=torch.uint8, device="cuda"
                )  # no rank allocates from the driver while others poll
                x = every[rank] if calls == "real" else {k: v if k == "rows" else v[:0] for k, v in every[rank].items()}
                s = (
                    streams
                    if calls == "real"
                    else {k: v[:0] if k.endswith(("mix", "ual")) else v for k, v in streams.items()}
                )
                results.append(ends(x, TensorParallel(None, workspaces[rank]), s))
        torch.cuda.synchronize()
    for rank in range(W):
        workspaces[rank].check()
        check(results[rank], range(W), "cuda", streams)
