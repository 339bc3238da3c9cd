"""What lies where in the memory that a rank lends its peers, and which calls need how much of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from moetail import tuning

MAX_WORLD_SIZE = 8
PHASES = 2
SENTINEL = -1  # as int16; 0xFFFF is a NaN of bf16 and of fp16 that no rank sends
HEADER_BYTES = PHASES * MAX_WORLD_SIZE * 8  # of any W, so that what follows starts on a cache line
FLAG_BYTES = MAX_WORLD_SIZE * 8  # of a tile: an int64 flag of every rank


def slot_stride(hidden: int) -> int:
    """Elements from one token to the next: rows start at 16 bytes, so that every access is that wide."""
    return -(-hidden // 8) * 8


@dataclass(frozen=True)
class Layout:
    """What lies where in a rank's allocation: offsets in bytes. `phase` is a call's number modulo PHASES.

    headers       int64 [PHASES, W]: what source rank s pushed
    slots         16 bit [PHASES, W, slot_elements]: one shot. Source rank s writes its slot of every inbox
    arrivals      int64 [PHASES, slice_tokens, MAX_WORLD_SIZE]: the last call of which rank s pushed its part of a tile
    result_flags  int64 [slice_tokens, MAX_WORLD_SIZE]: the last call of which rank s pushed a tile of its results
    inbox         16 bit [PHASES, W - 1, slice_tokens, row]: the other ranks' parts of the tokens that this rank owns
    results       16 bit [max_tokens, row]: what the ranks that own the tokens pushed
    """

    world_size: int
    max_tokens: int
    hidden: int
    one_shot_tokens: int

    @property
    def slot_elements(self) -> int:
        return min(self.max_tokens, self.one_shot_tokens) * slot_stride(self.hidden)

    @property
    def slice_tokens(self) -> int:
        return -(-self.max_tokens // self.world_size)

    @property
    def arrivals(self) -> int:
        return -(-(HEADER_BYTES + PHASES * self.world_size * self.slot_elements * 2) // 128) * 128

    @property
    def result_flags(self) -> int:
        return self.arrivals + PHASES * self.slice_tokens * FLAG_BYTES

    @property
    def inbox(self) -> int:
        return self.result_flags + self.slice_tokens * FLAG_BYTES

    @property
    def results(self) -> int:
        return self.inbox + PHASES * (self.world_size - 1) * self.slice_tokens * slot_stride(self.hidden) * 2

    @property
    def size(self) -> int:
        return self.results + self.max_tokens * slot_stride(self.hidden) * 2


def cleared(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int16 [size / 2] as it must be before the first call."""
    memory[: HEADER_BYTES // 2] = 0
    memory[HEADER_BYTES // 2 : layout.arrivals // 2] = SENTINEL
    memory[layout.arrivals // 2 : layout.inbox // 2] = 0
    return memory


def one_shot_tokens(device: torch.device, world_size: int) -> int:
    """The most tokens of a call that goes in one shot: a static fact, so that all ranks take the same path."""
    return tuning.one_shot_tokens(_gpu(device) if device.type == "cuda" else "cpu", world_size)


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
