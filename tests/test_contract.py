"""The deferral contract: it completes to the unfused bits, and cannot be used as a tensor by mistake."""

import operator

import pytest
import torch

import moetail
from moetail import MoEOutput, Numerics, TailSpec, UnfinalizedMoEOutput
from moetail.testing import assert_same_bits, finalize_inputs


@pytest.fixture
def output():
    x = finalize_inputs(4, 3, 32)
    return MoEOutput(UnfinalizedMoEOutput(x.rows, x.row_map, x.weights), x.shared, TailSpec(Numerics.TRTLLM, 2.5))


def test_complete_is_the_tail(output):
    r = output.routed
    assert_same_bits(output.complete(), moetail.finalize(r.rows, r.row_map, r.weights, output.shared, routed_scale=2.5))
    assert r.num_tokens == 4
    short = UnfinalizedMoEOutput(r.rows, r.row_map, r.weights, torch.tensor([5]))
    want = moetail.finalize(r.rows, r.row_map, r.weights, None, num_valid_rows=torch.tensor([5]))
    assert_same_bits(MoEOutput(short, None).complete(), want)


def test_refuses_to_be_a_tensor(output):
    one = torch.ones(4, 32, dtype=torch.bfloat16)
    for use in (operator.add, operator.mul, operator.matmul, operator.sub, torch.add, torch.matmul):
        for args in ((output, one), (one, output)):
            with pytest.raises(TypeError, match="complete"):
                use(*args)
    for use in (len, iter, bool, float, operator.neg, lambda o: o[0], torch.sum):
        with pytest.raises(TypeError, match="complete"):
            use(output)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", {"rows": torch.zeros(3)}),
        ("row_map", {"row_map": torch.zeros(3)}),
        ("weights", {"weights": torch.zeros(4, 9)}),
    ],
)
def test_invariants_name_the_field(output, name, change):
    r = output.routed
    fields = {"rows": r.rows, "row_map": r.row_map, "weights": r.weights} | change
    with pytest.raises(ValueError, match=f"^{name} must"):
        UnfinalizedMoEOutput(**fields)
