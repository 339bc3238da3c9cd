"""The bytes of a decoder's parameters, from its config: those of its tensors, whatever the stage and the ranks."""

import dataclasses
import types

import pytest
import torch

from moetail.models.deepseek_v41 import Decoder
from moetail.models.deepseek_v41_config import FLASH, small
from moetail.models.deepseek_v41_size import parameter_bytes
from moetail.shared_slots import SharedSlots

CONFIG = small()


def num_bytes(part):
    """Of its parameters: the integers of an Engram's hash and a slot's weight are none."""
    if isinstance(part, (list, tuple)):
        return sum(map(num_bytes, part))
    if isinstance(part, torch.Tensor):
        return part.numel() * part.element_size() if part.is_floating_point() else 0
    if isinstance(part, SharedSlots) or not dataclasses.is_dataclass(part):
        return 0
    return sum(map(num_bytes, vars(part).values()))


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [(range(6), 1), (range(6), 3), (range(1), 1), (range(1, 4), 2), (range(4, 6), 1)],
    ids=["whole", "three-ranks", "first-stage", "middle-of-two-ranks", "last-stage"],
)
def test_they_are_the_tensors(stage, ranks):
    tp = types.SimpleNamespace(rank=0, size=ranks, workspace=None)
    decoder = Decoder(CONFIG, torch.device("cpu"), tp, stage)
    tables = [layer.engram.table for layer in decoder.layers if layer.engram is not None]
    parts = [decoder.embedding, decoder.norm, decoder.head, decoder.layers]
    assert parameter_bytes(CONFIG, stage, ranks) == (num_bytes(parts), num_bytes(tables))


def test_the_released_layers():
    """13.75 billion parameters each (`test_the_released_size_without_its_memory`)."""
    (total, tables), (one_more, _) = (parameter_bytes(FLASH, range(2, stop)) for stop in (4, 5))
    assert tables == 0 and round((one_more - total) / 2e9, 2) == 13.76
