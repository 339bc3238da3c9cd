"""The router: its example, and what the bias may not do."""

import torch

from moetail.models.router import route


def test_the_example():
    ids, weights = route(torch.tensor([[2, -1, 0.5, 30]]), torch.tensor([0, 5.0, 0, -9]), 2, 1.5)
    assert ids.tolist() == [[1, 0]] and ids.dtype == torch.int32
    torch.testing.assert_close(weights, torch.tensor([[0.4160, 1.0840]]), rtol=0, atol=5e-5)


def test_the_bias_selects_and_does_not_weigh():  # pitfall 9
    logits = torch.randn(50, 12)
    plain_ids, plain = route(logits, torch.zeros(12), 12, 1.5)
    ids, weights = route(logits, torch.randn(12) * 3, 12, 1.5)
    assert (ids != plain_ids).any()
    torch.testing.assert_close(
        torch.zeros(50, 12).scatter(1, ids.long(), weights), torch.zeros(50, 12).scatter(1, plain_ids.long(), plain)
    )


def test_the_weights_add_up_to_the_scale():  # pitfall 9: 1.5 once
    _, weights = route(torch.randn(50, 12), torch.randn(12), 4, 1.5)
    torch.testing.assert_close(weights.sum(1), torch.full((50,), 1.5))
    assert weights.dtype == torch.float32
    _, weights = route(torch.full((1, 12), -1e4), torch.zeros(12), 4, 1.5)
    assert weights.tolist() == [[0.0] * 4]  # every score is 0: no NaN


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 300)
    logits[:, 200] = 1
    ids, _ = route(logits, torch.zeros(300), 5, 1.5)
    assert ids.tolist() == [[200, 0, 1, 2, 3]] * 3
