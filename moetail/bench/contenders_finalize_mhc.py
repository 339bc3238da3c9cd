"""finalize_mhc's contenders: separate kernels (ours and torch's), and Inductor's one for all of it.

Their norm is torch's, whose mean is added in another order than ours: none has our bits, each is compared in time.
vLLM's mHC kernels are not here: they are TileLang's, and importing them imports vllm, which patches Inductor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import cast

import torch

from moetail import reference
from moetail.bench.contenders import Contender, KernelInputs, Op, Program
from moetail.bench.contenders_finalize_norm import finalize_alone
from moetail.numerics import Numerics
from moetail.ops.finalize import finalize
from moetail.ops.finalize_mhc import finalize_mhc

_EPS = 1e-6
_STREAMS = 4  # DeepSeek-V4.1's


@dataclass(frozen=True)
class MhcInputs(KernelInputs):
    """And the streams [T, hc, H], where the new ones go, the mixes and the norm's weight [H]."""

    residual: torch.Tensor
    residual_out: torch.Tensor
    post_mix: torch.Tensor
    res_mix: torch.Tensor
    pre_mix: torch.Tensor
    norm_weight: torch.Tensor

    @staticmethod
    def random(T: int, K: int, H: int, device: torch.device, num_experts: int = 64, hc: int = _STREAMS) -> MhcInputs:
        x = KernelInputs.random(T, K, H, device, num_experts)
        residual = torch.randn(T, hc, H, device=device, dtype=x.shared.dtype)
        return MhcInputs(
            **vars(x), residual=residual, residual_out=torch.empty_like(residual),
            post_mix=torch.rand(T, hc, device=device) * 2, pre_mix=torch.rand(T, hc, device=device),
            res_mix=torch.rand(T, hc, hc, device=device).softmax(-1),
            norm_weight=torch.randn(H, device=device, dtype=residual.dtype),
        )  # fmt: skip

    def num_bytes(self, numerics: Numerics) -> int:
        """What a kernel must move at least: the streams are read and written besides."""
        return super().num_bytes(numerics) + 2 * self.residual.numel() * self.residual.element_size()

    def streams(self) -> tuple[torch.Tensor, ...]:
        return self.residual, self.post_mix, self.res_mix, self.pre_mix, self.norm_weight

    def named(self) -> dict[str, torch.Tensor | float]:
        names = ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight")
        return dict(zip(names, self.streams(), strict=True)) | {"eps": _EPS}


def _ours(numerics: Numerics) -> Contender:
    def bind(inputs: KernelInputs) -> Program:
        x = cast(MhcInputs, inputs)
        call = functools.partial(
            finalize_mhc, *x.finalize_args(numerics), **x.named(), numerics=numerics, out=x.out,  # type: ignore[arg-type]
            residual_out=x.residual_out,
        )  # fmt: skip
        return lambda: call()[0]

    return Contender(f"moetail {numerics.name}", numerics, bind, numerics)


def _contenders() -> tuple[list[Contender], list[str]]:
    found = [
        Contender("finalize alone", None, finalize_alone),
        Contender("finalize, then torch post, collapse and norm", None, _finalize_then_torch),
        Contender("torch eager", None, _torch_eager),
        Contender("finalize, then inductor's post, collapse and norm", None, _finalize_then_inductor),
        Contender("inductor", None, _inductor),
    ]
    return found, []


def _mix(
    y: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor, pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(h, streams) as one would write it: the mix of the streams is a batched matrix product."""
    mixed = torch.matmul(res_mix.transpose(1, 2), residual.float())
    new = (mixed + post_mix.unsqueeze(-1) * y.float().unsqueeze(1)).to(y.dtype)
    collapsed = (pre_mix.unsqueeze(-1) * new.float()).sum(dim=1).to(y.dtype)
    return torch.nn.functional.rms_norm(collapsed, norm_weight.shape, norm_weight, _EPS), new


def _sums(
    y: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor, pre_mix: torch.Tensor,
    norm_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same in sums, which Inductor fuses: a matrix product it does not."""
    streams, y32 = [stream.float() for stream in residual.unbind(1)], y.float()
    new = []
    for j in range(len(streams)):
        total = post_mix[:, j, None] * y32
        for i, stream in enumerate(streams):
            total = total + res_mix[:, i, j, None] * stream
        new.append(total.to(y.dtype))
    collapsed = pre_mix[:, 0, None] * new[0].float()
    for j in range(1, len(new)):
        collapsed = collapsed + pre_mix[:, j, None] * new[j].float()
    h = torch.nn.functional.rms_norm(collapsed.to(y.dtype), norm_weight.shape, norm_weight, _EPS)
    return h, torch.stack(new, dim=1)


def _expression(
    rows: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor, *streams: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    routed = (rows[row_map].float() * weights.unsqueeze(-1)).sum(dim=1)
    return _sums(routed.to(rows.dtype) + shared, *streams)


def _finalize_then_torch(inputs: KernelInputs) -> Program:
    x = cast(MhcInputs, inputs)
    return lambda: _mix(finalize(*x.finalize_args(Numerics.TRTLLM), out=x.out), *x.streams())[0]


def _finalize_then_inductor(inputs: KernelInputs) -> Program:
    x, compiled = cast(MhcInputs, inputs), torch.compile(_sums, dynamic=False)
    return lambda: compiled(finalize(*x.finalize_args(Numerics.TRTLLM), out=x.out), *x.streams())[0]


def _torch_eager(inputs: KernelInputs) -> Program:
    x = cast(MhcInputs, inputs)

    def program() -> torch.Tensor:
        routed = (x.rows[x.row_map].float() * x.weights.unsqueeze(-1)).sum(dim=1)
        return _mix(routed.to(x.rows.dtype) + x.shared, *x.streams())[0]

    return program


def _inductor(inputs: KernelInputs) -> Program:
    x, compiled = cast(MhcInputs, inputs), torch.compile(_expression, dynamic=False)
    return lambda: compiled(x.rows, x.row_map, x.weights, x.shared, *x.streams())[0]


def _reference(inputs: KernelInputs, numerics: Numerics) -> torch.Tensor:
    x = cast(MhcInputs, inputs)
    h, _ = reference.finalize_mhc(*x.finalize_args(numerics), **x.named(), numerics=numerics)  # type: ignore[arg-type]
    return h


OP = Op("finalize_mhc", MhcInputs.random, _ours, _contenders, _reference)
