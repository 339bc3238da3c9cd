"""Rotation, YaRN, window and sink. The whole of attention is checked against the oracle in test_deepseek_v41.py."""

import pytest
import torch

from moetail.models.attention import AttentionParameters, Rotation, frequencies, windowed
from moetail.models.deepseek_v41_config import FLASH, small
from moetail.models.parameters import Parameters
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16


def test_yarn_blends_between_15_and_25():  # pitfall 10
    got, i = frequencies(FLASH, window_only=False).double(), torch.arange(32, dtype=torch.float64)
    plain = 160000 ** -(i / 32)
    ramp = ((i - 15) / 10).clamp(0, 1)
    torch.testing.assert_close(got, plain * (1 - ramp) + plain / 16 * ramp, rtol=1e-6, atol=0)
    torch.testing.assert_close(frequencies(FLASH, window_only=True).double(), 10000 ** -(i / 32), rtol=1e-6, atol=0)


def test_adjacent_pairs_of_the_last_elements_turn():  # pitfall 10
    r = Rotation.at(torch.tensor([0, 3]), torch.tensor([0.5, 0.1]))
    x = torch.tensor([1.0, 2, 1, 0, 0, 1]).repeat(2, 1, 1)
    got = r.apply(x)
    assert_same_bits(got[0], x[0])
    a, b = torch.tensor(1.5), torch.tensor(0.3)
    torch.testing.assert_close(got[1, 0], torch.stack([x[1, 0, 0], x[1, 0, 1], a.cos(), a.sin(), -b.sin(), b.cos()]))


def test_turning_back_is_the_inverse_and_scores_see_distances_only():
    r = Rotation.at(torch.tensor([5, 900]), frequencies(small(), window_only=True))
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(r.apply(r.apply(x), back=True), x)
    q, k = torch.randn(1, 32), torch.randn(1, 32)
    at = lambda p, v: Rotation.at(torch.tensor([p]), frequencies(small(), True)).apply(v[:, None])[0, 0]  # noqa: E731
    torch.testing.assert_close(at(7, q) @ at(3, k), at(57, q) @ at(53, k), rtol=1e-4, atol=1e-4)


def test_the_sink_is_in_the_denominator_only():
    q, keys = torch.zeros(2, 3, 8, dtype=BF16), torch.randn(2, 5, 8).to(BF16)
    exists = torch.tensor([[True] * 5, [True, True, False, False, False]])
    sink = torch.tensor([-100.0, 0.0, 2.0])
    got = windowed(q, keys, exists, sink)
    for t, n in ((0, 5), (1, 2)):
        for head in range(3):
            want = keys[t, :n].float().sum(0) / (n + sink[head].exp())
            torch.testing.assert_close(got[t, head].float(), want, rtol=1.6e-2, atol=1e-5)


def test_no_key_of_a_window_that_is_empty():
    """A row that does not exist weighs 0, whatever it holds; scores far above the sink do not overflow."""
    q, keys = torch.full((1, 1, 8), 90.0, dtype=BF16), torch.full((1, 3, 8), 90.0, dtype=BF16)
    keys[0, 1] = -1
    got = windowed(q, keys, torch.tensor([[True, False, False]]), torch.zeros(1))
    assert_same_bits(got, keys[:, :1])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_hold_slices_of_the_same_tensors(size):
    cpu = torch.device("cpu")
    whole = AttentionParameters.random(Parameters(cpu), "a", small())
    parts = [AttentionParameters.random(Parameters(cpu, rank, size), "a", small()) for rank in range(size)]
    for name, dim in (("wq_b", 0), ("wo_a", 0), ("wo_b", 1), ("sink", 0)):
        assert_same_bits(torch.cat([getattr(part, name) for part in parts], dim), getattr(whole, name))
    for name in ("wqkv_a", "q_norm", "kv_norm"):
        for part in parts:
            assert_same_bits(getattr(part, name), getattr(whole, name))
