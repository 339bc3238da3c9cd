"""How each arm ends a sublayer, against the definitions, alone and on ranks whose inputs differ.

`test_deferral.py` has the whole model.
"""

import pytest
import torch
from ranks import Ranks
from test_finalize_mhc import streams_of

from moetail import reference
from moetail.contract import MoEOutput, TailSpec, UnfinalizedMoEOutput
from moetail.models.parallel import TensorParallel
from moetail.models.tails import ARMS, Partial
from moetail.testing import assert_same_bits, finalize_inputs

CPU = torch.device("cpu")
T, K, H = 9, 5, 40
STREAMS = streams_of(T, 4, H)


def inputs(rank):
    x = finalize_inputs(T, K, H, seed=rank)
    return {"rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared}


def pending(rank, tp):
    x = inputs(rank)
    return MoEOutput(UnfinalizedMoEOutput(x["rows"], x["row_map"], x["weights"]), x["shared"], TailSpec(workspace=tp))


def ends(rank, tp):
    """(arm, what it is handed): the boundary's outputs, and the finished output."""
    y = reference.finalize(**inputs(rank))
    handed_on = {
        ("separate", "partial"): lambda: Partial(y),
        ("fused", "partial"): lambda: Partial(y),
        ("fused", "pending"): lambda: pending(rank, tp.workspace),
        ("here", "finished"): lambda: pending(rank, tp.workspace).complete(),
    }
    return {
        case: (*ARMS[case[0]].boundary(make(), tp, **STREAMS), ARMS[case[0]].finished(make(), tp))
        for case, make in handed_on.items()
    }


def check(results, ranks):
    y = reference.finalize_all_reduce([inputs(rank) for rank in ranks])
    want = (*reference.mhc(y, **STREAMS), y)
    for got in results.values():
        for ours, theirs in zip(got, want, strict=True):
            assert_same_bits(ours, theirs)


def test_alone():
    check(ends(0, TensorParallel()), [0])


def on_ranks(group):
    return ends(group.rank(), TensorParallel.of(group, T, H, CPU))


def test_on_three_ranks():
    with Ranks(3) as ranks:
        for results in ranks.run(on_ranks):
            check(results, range(3))


def test_an_output_is_used_once():
    """A boundary takes it; a second one would add and reduce again."""
    output = pending(0, None)
    ARMS["fused"].boundary(output, TensorParallel(), **STREAMS)
    with pytest.raises(RuntimeError, match="taken already"):
        ARMS["fused"].boundary(output, TensorParallel(), **STREAMS)
    with pytest.raises(RuntimeError, match="taken already"):
        ARMS["fused"].finished(output, TensorParallel())
