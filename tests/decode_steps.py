"""Decode steps of changing batch sizes by two arms, eager or captured, compared bit by bit on the device, under both
guards: nothing is compiled and the host never waits once every size has run."""

import random
from dataclasses import replace

import torch

from moetail import guards
from moetail.models.context import Packed
from moetail.models.deepseek_v41_config import FLASH

SIZES = (1, 2, 3, 7, 8, 16, 17, 32)
# Four layers of the released widths, with so few experts and so small a vocabulary that they fit anywhere.
WIDE = replace(
    FLASH, num_hidden_layers=4, n_routed_experts=16, vocab_size=1024, image_tokens=(1000, 1005),
    engram_vocab_size=2000, engram_compressed_vocab_size=500,
)  # fmt: skip


class Batch:
    """One batch size: a context for each arm, and a program for each that returns the step's hidden states."""

    def __init__(self, decoder, arms, size):
        self.decoder, self.arms = decoder, arms
        text = torch.arange(size, device=decoder.device) * 7 % 250
        self.step = Packed.of(list(text.split(1)))
        self.contexts = [decoder.context([1] * size) for _ in arms]
        self.programs = [lambda i=i: decoder.forward(self.step, self.contexts[i], arms[i]) for i in range(len(arms))]

    def capture(self, pool):
        """Into graphs that share one pool with every other graph."""
        self.programs = [self._captured(program, pool) for program in self.programs]

    def _captured(self, program, pool):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = program()

        def replay():
            graph.replay()
            return out

        return replay

    def run(self):
        """In how many elements the arms' hidden states differ: a number on the device. The next step's tokens follow
        from the first arm's."""
        first, *others = [program().clone() for program in self.programs]
        differs = sum((other.view(torch.int16) != first.view(torch.int16)).sum() for other in others)
        logits = self.decoder.logits(first)
        self.step.tokens.copy_(logits.argmax(-1) % 250)
        return differs + (~torch.isfinite(first)).sum()


def run(decoder, arms, steps, captured=False, sizes=SIZES):
    """In how many elements the arms differ over so many steps."""
    draw = random.Random(3)
    batches = [Batch(decoder, arms, size) for size in sizes]
    total = torch.zeros((), dtype=torch.int64, device=decoder.device)
    for batch in batches:
        total += batch.run()
    if captured:
        pool = torch.cuda.graph_pool_handle()
        for batch in batches:
            batch.capture(pool)
    with guards.no_jit("error"), guards.no_host_sync("error"):
        for _ in range(steps):
            total += draw.choice(batches).run()
    return int(total)
