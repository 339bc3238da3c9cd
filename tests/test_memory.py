"""What lies where in a rank's memory: no overlap, whole vectors, and the table that says which calls need how much."""

import itertools

import pytest
import torch

from moetail import tuning
from moetail.comm import memory
from moetail.comm.memory import FLAG_BYTES, HEADER_BYTES, PHASES, SENTINEL, Layout, slot_stride

SHAPES = {
    "two-ranks": (2, 8192, 5120, 512),
    "odd-everything": (3, 1001, 1003, 341),
    "fewer-tokens-than-ranks": (8, 3, 12, 128),
    "past-2-to-the-31": (8, 32768, 7168, 128),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_follow_each_other(shape):
    layout = Layout(*shape)
    W, max_tokens, hidden, one_shot = shape
    row, share = slot_stride(hidden) * 2, -(-max_tokens // W)
    assert row >= 2 * hidden and row % 16 == 0
    parts = (
        ("slots", HEADER_BYTES, PHASES * W * min(max_tokens, one_shot) * row),
        ("arrivals", layout.arrivals, PHASES * share * FLAG_BYTES),
        ("result_flags", layout.result_flags, share * FLAG_BYTES),
        ("inbox", layout.inbox, PHASES * (W - 1) * share * row),
        ("results", layout.results, max_tokens * row),
        ("end", layout.size, 0),
    )
    for (name, start, length), (_, following, _) in itertools.pairwise(parts):
        assert 0 <= following - (start + length) < 128, name
    assert all(start % 16 == 0 for _, start, _ in parts) and layout.arrivals % 128 == layout.result_flags % 64 == 0


def test_cleared():
    layout = Layout(3, 5, 12, 2)
    words = memory.cleared(torch.full((layout.size // 2,), 7, dtype=torch.int16), layout)
    slots, flags, inbox = HEADER_BYTES // 2, layout.arrivals // 2, layout.inbox // 2
    used = slots + PHASES * 3 * layout.slot_elements
    assert not words[:slots].any() and bool((words[slots:used] == SENTINEL).all()) and not words[flags:inbox].any()


def test_a_gigabyte_is_not_wasted():
    """8192 tokens at two ranks: two inboxes of half of them and all results; slots for 512 tokens."""
    row = 2 * 5120
    assert Layout(2, 8192, 5120, 512).size < (2 * 4096 + 8192 + 2 * 2 * 512) * row + 2**20


def test_the_table(monkeypatch):
    assert [tuning.one_shot_tokens("a GPU", W) for W in (2, 3, 4, 8)] == [512, 341, 256, 256]  # the guess
    monkeypatch.setitem(tuning.ONE_SHOT_TOKENS, ("a GPU", 2), 96)
    assert tuning.one_shot_tokens("a GPU", 2) == 96 and tuning.one_shot_tokens("another", 2) == 512
    monkeypatch.setitem(tuning.ONE_SHOT_TOKENS, ("cpu", 4), 7)
    assert memory.one_shot_tokens(torch.device("cpu"), 4) == 7
    assert all(1 <= T < 2**24 for T in tuning.ONE_SHOT_TOKENS.values())
