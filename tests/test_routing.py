"""Balanced routing: the assignment, and that experts see it in place of their router's choice."""

import pytest
import torch

from moetail.bench import routing

CPU = torch.device("cpu")


class Experts(torch.nn.Module):
    """What a transformers experts module is to this file."""

    num_experts = 6

    def _apply_gate(self):
        raise AssertionError

    def forward(self, hidden, top_k_index, top_k_weights):
        return hidden + (top_k_index * top_k_weights).sum()


class Model(torch.nn.Module):
    """Two MoE layers, of K = 1 and 2, called by position and by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Experts(), Experts()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, use_cache=None):
        T = tokens.numel()
        x = self.first(torch.zeros(T), torch.full((T, 1), 5), torch.ones(T, 1))
        index = torch.tensor([[5, 4]], dtype=torch.int32).repeat(T, 1)
        return self.second(x, top_k_index=index, top_k_weights=torch.rand(T, 2))


@pytest.mark.parametrize(
    ("T", "K", "E"),
    [(1, 8, 64), (64, 8, 64), (7, 6, 64), (13, 4, 6), (5, 3, 3), (100, 1, 7)],
    ids=["one token", "full rounds", "a part of a round", "K does not divide E", "all experts", "top 1"],
)
def test_every_expert_equally_often_and_none_twice_for_a_token(T, K, E):
    index = routing.balanced_index(T, K, E, CPU)
    assert index.shape == (T, K) and index.dtype == torch.int64
    counts = torch.bincount(index.reshape(-1), minlength=E)
    assert len(counts) == E and counts.max() - counts.min() <= 1
    assert all(len(set(token)) == K for token in index.tolist())


def test_tables_have_each_layers_top_k_and_dtype():
    model = Model()
    tables = routing.balanced_tables(model, 9)
    assert list(tables) == [model.first, model.second]
    assert tables[model.first].shape == (9, 1) and tables[model.first].dtype == torch.int64
    assert tables[model.second].shape == (9, 2) and tables[model.second].dtype == torch.int32


def test_experts_see_the_table_and_the_routers_weights():
    model, tokens = Model(), torch.zeros(1, 9, dtype=torch.int64)
    tables = routing.balanced_tables(model, 9)
    torch.manual_seed(0)
    with routing.recorded(model) as real:
        model(tokens)
    torch.manual_seed(0)
    with routing.recorded(model) as balanced, routing.replaced(tables):
        out = model(tokens)
    assert [r.experts for r in balanced] == [model.first, model.second] == [r.experts for r in real]
    for before, after in zip(real, balanced, strict=True):
        assert after.top_k_index is tables[after.experts] and before.top_k_index is not tables[after.experts]
        assert torch.equal(before.top_k_weights, after.top_k_weights)
    assert torch.equal(out, sum((r.top_k_index * r.top_k_weights).sum() for r in balanced).expand(9))
    with routing.recorded(model) as later:
        model(tokens)
    assert later[0].top_k_index[0] == 5  # nothing stays behind


def test_a_step_of_another_size_is_an_error():
    model = Model()
    with routing.replaced(routing.balanced_tables(model, 9)):
        with pytest.raises(RuntimeError, match=r"index of shape \(9, 1\) .* got \(8, 1\)"):
            model(torch.zeros(1, 8))


def test_an_unknown_routing():
    routing.check_routing("real")
    with pytest.raises(ValueError, match="routing must be real or balanced, got 'auto'"):
        routing.check_routing("auto")
