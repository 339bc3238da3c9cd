"""Parameters by name."""

import torch

from moetail.models.parameters import Parameters
from moetail.testing import assert_same_bits

CPU = torch.device("cpu")


def test_a_name_and_a_seed_are_one_tensor_whoever_asks_first():
    p, other = Parameters(CPU), Parameters(CPU)
    a, b = p.linear("a", 6, 8), p.linear("b", 6, 8)
    assert_same_bits(other.linear("b", 6, 8), b)
    assert_same_bits(other.linear("a", 6, 8), a)
    assert (a != b).any() and (Parameters(CPU, seed=1).linear("a", 6, 8) != a).any()


def test_ranks_hold_slices():
    whole = Parameters(CPU).linear("a", 6, 12)
    for dim in (0, 1):
        parts = [Parameters(CPU, rank, 3).linear("a", 6, 12, split=dim) for rank in range(3)]
        assert_same_bits(torch.cat(parts, dim), whole)
    assert_same_bits(Parameters(CPU, 2, 3).linear("a", 6, 12), whole)


def test_stacked_is_each_name_once():
    p = Parameters(CPU, 1, 2)
    names = [f"e.{i}" for i in range(5)]
    got = p.stacked(names, lambda q, name: q.linear(name, 4, 8, split=0))
    assert_same_bits(got, torch.stack([p.linear(name, 4, 8, split=0) for name in names]))


def test_what_the_distributions_are():
    p = Parameters(CPU)
    w = p.linear("w", 400, 100).float()
    assert abs(w.std() - 0.1) < 2e-3 and w.mean().abs() < 2e-3
    u = p.uniform("u", 1000, low=0.5, high=1.5)
    assert u.dtype == torch.float32 and 0.5 <= u.min() < 0.52 and 1.48 < u.max() <= 1.5
    assert abs(p.norm("n", 1000).float().mean() - 1) < 0.02
