"""The experts up to their second GEMM, against a loop over tokens and slots."""

import pytest
import torch

from moetail.contract import TailSpec
from moetail.models import deepseek_v41_facts
from moetail.models.deepseek_v41_config import small
from moetail.models.dense import swiglu
from moetail.models.moe_block import MoEParameters, expert_rows, moe_layer, router
from moetail.models.parameters import Parameters
from moetail.ops.route import route
from moetail.plan import WorldFacts, plan_tails
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
CONFIG = small()
LIMIT, ROUTER = 10.0, router(3, CONFIG)


PLAN = plan_tails(deepseek_v41_facts.layers(CONFIG), WorldFacts(64))


def moe(x, p, router, limit, expert_ids=None):
    """The rows and the shared expert's output, of a layer whose calls go into the next."""
    routed, shared, _ = moe_layer(p, router, limit, PLAN, 1, TailSpec(), expert_ids).forward_unfinalized(x).take()
    return routed, shared


@pytest.fixture(scope="module")
def p():
    return MoEParameters.random(Parameters(torch.device("cpu")), "ffn", CONFIG, 8)


def test_the_router_of_the_example():  # pitfall 9: the bias selects and does not weigh, 1.5 is in the weights
    weights, ids = route(torch.tensor([[2, -1, 0.5, 30]]), router(2, CONFIG), torch.tensor([0, 5.0, 0, -9]))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.4160, 1.0840]]), rtol=0, atol=5e-5)


def test_the_bias_reaches_the_router(p):
    x = torch.randn(20, 64).to(BF16)
    logits = x.float() @ p.gate.float().T
    weights, ids = route(logits, ROUTER, p.bias)
    assert (ids != route(logits, ROUTER)[1]).any()  # random biases matter
    routed, _ = moe(x, p, ROUTER, LIMIT)
    torch.testing.assert_close(routed.weights, weights)
    assert_same_bits(routed.row_map, expert_rows(x, ids, weights, p.w13, p.w2, LIMIT).row_map)


def one(x, w13, w2):
    return swiglu(x[None] @ w13.T, LIMIT)[0] @ w2.T


@pytest.mark.parametrize("T", [0, 1, 33])
def test_rows_are_the_experts_outputs_without_weights(p, T):
    x, weights = torch.randn(T, 64).to(BF16), torch.rand(T, 3)
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(T)] or [torch.zeros(3).long()])[:T].to(torch.int32)
    ids[ids == 5] = 7  # an expert without tokens, and one chosen twice
    out = expert_rows(x, ids, weights, p.w13, p.w2, LIMIT)
    assert out.rows.shape[1] == 64 and out.row_map.dtype == torch.int32 and out.weights is weights
    assert out.row_map.unique().numel() == 3 * T
    for t in range(T):
        for k in range(3):
            w13, w2 = p.w13[ids[t, k]].double(), p.w2[ids[t, k]].double()
            h = swiglu((w13 @ x[t].double()).float(), LIMIT).to(BF16)  # gate and up are not rounded before
            torch.testing.assert_close(out.rows[out.row_map[t, k]], (w2 @ h.double()).to(BF16))
    in_row_order = ids.reshape(-1)[out.row_map.reshape(-1).argsort()].tolist()
    assert in_row_order == sorted(in_row_order)


def test_the_shared_expert_is_not_scaled(p):  # pitfall 9
    x = torch.randn(9, 64).to(BF16)
    routed, shared = moe(x, p, ROUTER, LIMIT)
    torch.testing.assert_close(shared, torch.stack([one(row, p.shared_w13, p.shared_w2) for row in x]))
    torch.testing.assert_close(routed.weights.sum(1), torch.full((9,), 1.5))


def test_given_ids_keep_the_routers_weights(p):
    x = torch.randn(9, 64).to(BF16)
    ids = torch.arange(27, dtype=torch.int32).view(9, 3) % 8
    routed, _ = moe(x, p, ROUTER, LIMIT, ids)
    assert_same_bits(routed.weights, moe(x, p, ROUTER, LIMIT)[0].weights)
    assert_same_bits(routed.rows, expert_rows(x, ids, routed.weights, p.w13, p.w2, LIMIT).rows)
