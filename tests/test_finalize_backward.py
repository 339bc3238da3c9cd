"""The gradient of finalize against autograd of a plain torch expression, and where slots or tokens are missing."""

import pytest
import torch

import moetail
from moetail import Numerics
from moetail.testing import finalize_inputs


def leaves(x, *names):
    return {n: getattr(x, n).nan_to_num().clone().requires_grad_() for n in names}


def plain(rows, row_map, weights, shared, gate, scale):
    picked = rows[row_map.long()]
    return scale * (picked * weights[..., None]).sum(1) + torch.sigmoid(gate) * shared


def test_against_autograd_of_the_plain_expression():
    x = finalize_inputs(6, 4, 32, dtype=torch.float32)
    names = ("rows", "weights", "shared", "shared_gate")
    ours, theirs = leaves(x, *names), leaves(x, *names)
    dy = torch.randn(6, 32)
    y = moetail.finalize(
        ours["rows"], x.row_map, ours["weights"], ours["shared"], shared_gate=ours["shared_gate"], routed_scale=1.5
    )
    y.backward(dy)
    plain(theirs["rows"], x.row_map, theirs["weights"], theirs["shared"], theirs["shared_gate"], 1.5).backward(dy)
    for name in names:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad)


def test_a_row_that_two_slots_share_gets_both_gradients():
    rows = torch.randn(2, 8, requires_grad=True)
    row_map = torch.tensor([[1, 1], [0, 1]])
    moetail.finalize(rows, row_map, torch.tensor([[1.0, 2.0], [4.0, 8.0]])).sum().backward()
    assert torch.equal(rows.grad, torch.tensor([[4.0], [11.0]]).expand(2, 8))


def test_absent_slots_have_zero_gradients():  # B18, B21: not NaN, whatever their memory holds
    x = finalize_inputs(8, 4, 16, absent=0.4, dtype=torch.float32)  # dead rows are NaN
    rows, weights = x.rows.clone().requires_grad_(), x.weights.clone().requires_grad_()
    gone = (x.row_map < 0) | (x.row_map >= rows.shape[0])
    moetail.finalize(rows, x.row_map, weights, x.shared, num_valid_rows=torch.tensor([30])).sum().backward()
    gone |= x.row_map >= 30
    assert torch.isfinite(rows.grad).all() and torch.isfinite(weights.grad).all()
    assert (weights.grad[gone] == 0).all() and (weights.grad[~gone] != 0).all()
    dead = torch.ones(rows.shape[0], dtype=torch.bool)
    dead[x.row_map[~gone].long()] = False
    assert (rows.grad[dead] == 0).all() and (rows.grad[~dead] != 0).all()


def test_many_slots_on_one_row_accumulate_in_fp32():
    rows = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((64, 8), 2.0**-9)
    weights[0, 0] = 1.0
    moetail.finalize(
        rows, torch.zeros(64, 8, dtype=torch.int32), weights, num_valid_rows=torch.tensor([99])
    ).sum().backward()
    assert torch.equal(rows.grad, torch.full((1, 4), 1 + 511 * 2.0**-9, dtype=torch.float32).to(torch.bfloat16))


def test_no_tokens_keep_the_graph():  # B13
    rows = torch.randn(3, 8, requires_grad=True)
    weights = torch.rand(0, 2, requires_grad=True)
    shared = torch.rand(0, 8, requires_grad=True)
    moetail.finalize(rows, torch.empty(0, 2, dtype=torch.int32), weights, shared).sum().backward()
    assert torch.equal(rows.grad, torch.zeros(3, 8))
    assert weights.grad.shape == (0, 2) and shared.grad.shape == (0, 8)


def test_preweighted_rows():
    rows = torch.randn(2, 8, requires_grad=True)
    moetail.finalize(rows, torch.tensor([[0, -1]]), None, numerics=Numerics.PREWEIGHTED).sum().backward()
    assert torch.equal(rows.grad, torch.tensor([[1.0], [0.0]]).expand(2, 8))


def test_out_and_gradients_exclude_each_other():
    x = finalize_inputs(2, 2, 8, dtype=torch.float32)
    weights = x.weights.requires_grad_()
    with pytest.raises(ValueError, match="^out must be None"):
        moetail.finalize(x.rows, x.row_map, weights, out=torch.empty(2, 8))
    with torch.no_grad():
        moetail.finalize(x.rows, x.row_map, weights, out=torch.empty(2, 8))
