"""Both arms of a tail against the definition, alone and on ranks whose inputs differ."""

import torch
from ranks import Ranks

from moetail import reference
from moetail.contract import UnfinalizedMoEOutput
from moetail.models.parallel import TensorParallel
from moetail.models.tails import TAILS, recorded
from moetail.testing import assert_same_bits, finalize_inputs

CPU = torch.device("cpu")
T, K, H = 9, 5, 40


def inputs(rank):
    x = finalize_inputs(T, K, H, seed=rank)
    return {"rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared}


def run(tail, rank, tp):
    x = inputs(rank)
    return tail(UnfinalizedMoEOutput(x["rows"], x["row_map"], x["weights"]), x["shared"], tp)


def test_alone():
    for tail in TAILS.values():
        assert_same_bits(run(tail, 0, TensorParallel()), reference.finalize(**inputs(0)))


def on_ranks(group):
    tp = TensorParallel.of(group, T, H, CPU)
    return [run(tail, group.rank(), tp) for tail in TAILS.values()]


def test_on_three_ranks():
    want = reference.finalize_all_reduce([inputs(rank) for rank in range(3)])
    with Ranks(3) as ranks:
        for results in ranks.run(on_ranks):
            for got in results:
                assert_same_bits(got, want)


def test_a_recorded_tail_is_the_tail():
    seen = []
    got = run(recorded(TAILS["fused"], seen), 0, TensorParallel())
    assert_same_bits(got, reference.finalize(**inputs(0)))
    assert len(seen) == 1
    assert_same_bits(seen[0][1], inputs(0)["shared"])
