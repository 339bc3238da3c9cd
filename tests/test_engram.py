"""Engram: the primes, multipliers and rows that are known, and the gate's example."""

import pytest
import torch

from moetail.models import engram
from moetail.models.deepseek_v41_config import FLASH, small
from moetail.models.engram import EngramParameters
from moetail.models.parameters import Parameters
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
CONFIG = small(engram_layer_ids=(1,), engram_compressed_vocab_size=500, image_tokens=(290, 291))
DEAD = CONFIG.image_tokens
ROWS = [(782, 1107, 2117, 3771), (104, 1041, 2858, 3964), (24, 1577, 2407, 3163), (532, 1762, 2241, 3409),
        (104, 1041, 2424, 3954)]  # fmt: skip
ROWS_DEAD = [(441, 1236, 2381, 3920), (700, 1056, 2708, 3573), (532, 1762, 2363, 3733)]


def history(ids, length):
    """[T, length], newest first, -1 before the first."""
    return torch.tensor([[ids[p - s] if p >= s else -1 for s in range(length)] for p in range(len(ids))])


@pytest.fixture(scope="module")
def parameters():
    return EngramParameters.random(Parameters(torch.device("cpu")), "e", CONFIG, 1, table_on_cpu=True)


def test_the_released_tables_and_multipliers():
    found = engram.primes(FLASH.engram_layer_ids, 4, 8, FLASH.engram_vocab_size)
    assert found[1][:2] == [16000057, 16000079] and found[14][0] == 16000477
    assert [sum(found[layer]) for layer in (1, 14)] == [384006168, 384016682]
    assert engram.multipliers(1, 4, 99092) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert engram.multipliers(14, 4, 99092) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_the_rows_of_the_vector(parameters):
    assert parameters.primes.tolist() == [1009, 1013, 1019, 1021]
    assert parameters.table.shape == (1009 + 1013 + 1019 + 1021, CONFIG.engram_head_dim)
    got = engram.hash_rows(history([10, 11, 12, 10, 11], 3), DEAD, 2, 500, parameters)
    assert [tuple(row) for row in got.tolist()] == ROWS


def test_a_dead_token_hides_itself_and_all_before_it(parameters):  # pitfall 8: blocked latches
    got = engram.hash_rows(history([10, 290, 12, 10, 11], 3), DEAD, 2, 500, parameters)
    assert [tuple(row) for row in got[1:4].tolist()] == ROWS_DEAD
    assert tuple(got[0].tolist()) == ROWS[0]


def test_the_gate_of_the_example():  # pitfall 5: each stream by itself
    S = torch.tensor([[[1, 2, -1, 0.5], [0.5, -0.5, 1, 0]]], dtype=BF16)
    keys = torch.tensor([[[0.5, 1, 0, 1], [1, 1, -1, 2]]], dtype=BF16)
    value, ones = torch.tensor([[2, -2, 1, 0]], dtype=BF16), torch.ones(2, 4, dtype=BF16)
    got = engram.gated(S, keys, value, ones, ones, torch.tensor([False]), 1e-20)
    want = [[[2.5625, 0.439453125, -0.2197265625, 0.5], [1.125, -1.125, 1.3125, 0]]]
    assert_same_bits(got, torch.tensor(want, dtype=BF16))
    assert_same_bits(engram.gated(S, keys, value, ones, ones, torch.tensor([True]), 1e-20), S)


@pytest.mark.parametrize(("dot", "gate"), [(0.0, 0.50025), (1e-9, 0.50025), (-1e-9, 0.49975), (-0.25, 0.37754)])
def test_the_gate_is_clamped_and_keeps_the_sign(dot, gate):
    """S and key of one element in two: their RMS is 1 / sqrt(2), so the dot is what the weights make of it."""
    S = torch.tensor([[[1.0, 0.0]]], dtype=BF16)
    q = torch.tensor([[dot / 2**0.5, 0.0]])
    value = torch.tensor([[0.0, 1.0]], dtype=torch.float32)
    got = engram.gated(S.float(), S, value, q, torch.ones(1, 2), torch.tensor([False]), 1e-20)
    torch.testing.assert_close(got[0, 0, 1], torch.tensor(gate), rtol=0, atol=1e-5)


def test_keys_come_first_and_one_value_last(parameters):  # pitfall 8
    rows = torch.tensor(ROWS[:2])
    keys, value = engram.keys_and_value(rows, parameters, CONFIG.hc_mult)
    found = torch.cat([parameters.table[row].reshape(1, -1) for row in rows])
    H = CONFIG.hidden_size
    torch.testing.assert_close(keys[:, 2], found @ parameters.wkv[2 * H : 3 * H].T)
    torch.testing.assert_close(value, found @ parameters.wkv[-H:].T)


@pytest.mark.gpu
def test_a_table_in_host_memory_gives_the_same_rows(parameters):
    cuda = torch.device("cuda")
    there = EngramParameters.random(Parameters(cuda), "e", CONFIG, 1, table_on_cpu=True)
    rows = torch.tensor(ROWS, device=cuda)
    assert there.table.device.type == "cuda"
    graph = torch.cuda.CUDAGraph()
    torch.nn.functional.embedding(rows, there.table)
    with torch.cuda.graph(graph):
        got = torch.nn.functional.embedding(rows, there.table)
    graph.replay()
    assert_same_bits(got.cpu(), parameters.table[torch.tensor(ROWS)])
