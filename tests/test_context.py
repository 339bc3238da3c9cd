"""The rings of a context, against lists that forget nothing."""

import random

import torch

from moetail.models.context import Context, Packed
from moetail.models.deepseek_v41_config import small

CONFIG = small()
W, N = CONFIG.sliding_window, CONFIG.engram_max_ngram_size
CPU = torch.device("cpu")


def test_a_packed_step_says_whose_each_token_is():
    step = Packed.of([torch.tensor([5, 6, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([8])])
    assert step.query_lens == (3, 0, 1) and step.tokens.tolist() == [5, 6, 7, 8]
    assert step.request.tolist() == [0, 0, 0, 2] and step.offset.tolist() == [0, 1, 2, 0]


def test_a_ring_finds_what_its_window_holds():
    draw = random.Random(1)
    most = (1, 4, 6)
    context, texts = Context(CONFIG, 1, most, CPU), [[], [], []]
    for _ in range(30):
        new = [[draw.randrange(290) for _ in range(draw.randint(0, n))] for n in most]
        step = Packed.of([torch.tensor(ids, dtype=torch.int64) for ids in new])
        places = context.place(step)
        t = 0
        for r, (text, ids) in enumerate(zip(texts, new, strict=True)):
            text += ids
            first = sum(W - 1 + n for n in most[:r])
            for position in range(len(text) - len(ids), len(text)):
                back = min(position + 1, W)
                assert int(places.positions[t]) == position
                assert places.exists[t].tolist() == [True] * back + [False] * (W - back)
                held = context.tokens[places.window_rows[t, :back]].tolist()
                newest_first = text[position::-1][:back]
                assert held == newest_first
                rows = places.window_rows[t]
                assert first <= int(rows.min()) and int(rows.max()) < first + W - 1 + most[r]
                assert int(places.rows[t]) == int(rows[0])
                assert places.history[t].tolist() == (newest_first + [-1] * N)[:N]
                t += 1
        context.advance(step)
        assert context.lengths.tolist() == [len(text) for text in texts]
