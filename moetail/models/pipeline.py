"""Pipeline parallelism of a decoder: which stage this is, and what stages exchange.

A stage sends its stream finished: the streams and the mix that the next input is collapsed with. Its last layer's
output is summed over the ranks and mixed in before it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetail.models.context import Context, Packed
from moetail.models.deepseek_v41 import Decoder, Stream
from moetail.models.tails import Arm


@dataclass(frozen=True)
class Pipeline:
    """Stage `stage` of `size`; `before` and `after`: the global ranks of its neighbours that hold the same part of the
    model, None at an end."""

    stage: int = 0
    size: int = 1
    before: int | None = None
    after: int | None = None

    @staticmethod
    def of(rank: int, world_size: int, size: int) -> Pipeline:
        """The first world_size / size ranks are the first stage, and so on.

        Raises: ValueError where the ranks do not make `size` equal stages.
        """
        if size < 1 or world_size % size:
            raise ValueError(f"size must divide the {world_size} ranks into stages, got {size}")
        width = world_size // size
        stage = rank // width
        return Pipeline(
            stage, size, rank - width if stage > 0 else None, rank + width if stage < size - 1 else None
        )  # fmt: skip

    def layers(self, count: int) -> range:
        """This stage's of `count` layers."""
        return range(self.stage * count // self.size, (self.stage + 1) * count // self.size)

    def run(self, decoder: Decoder, step: Packed, context: Context, arm: Arm) -> Stream | torch.Tensor:
        """One step of this stage: the stream that it sent, or on the last stage the normed hidden states [T, H]. Device
        work only, where the backend's send and receive are."""
        entering = None if self.before is None else self._received(decoder, len(step.tokens), self.before)
        if self.after is None:
            return decoder.forward(step, context, arm, entering)
        stream = decoder.forward_stage(step, context, arm, entering)
        for tensor in (stream.S, stream.pre):
            dist.send(tensor.contiguous(), self.after)
        return stream

    def _received(self, decoder: Decoder, T: int, before: int) -> Stream:
        c, device = decoder.config, decoder.device
        S = torch.empty(T, c.hc_mult, c.hidden_size, dtype=torch.bfloat16, device=device)
        pre = torch.empty(T, c.hc_mult, dtype=torch.float32, device=device)
        for tensor in (S, pre):
            dist.recv(tensor, before)
        return Stream(S, pre)
