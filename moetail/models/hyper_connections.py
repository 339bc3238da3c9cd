"""mHC: the residual stream of `hc` copies, in its single-pass ("shifted") form.

    mixes(S)               pre, post, comb, of the S that the sublayer takes as its residual
    S' = post(y, S, ..)    after the sublayer, whose output is y
    c  = collapse(S', pre) the next sublayer's input, before its norm. `pre` comes from the mixes of S, one sublayer ago

Rounding: S, y and c are bf16; the mixes and their parameters stay fp32; one rounding in `post` and one in `collapse`.
Order: post * y first, then the streams, ascending. `post` is torch's, for where a stage or an Engram parts it from the
collapse, which `moetail.mhc_collapse` then does; elsewhere `moetail.mhc` and its fused kin do both, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moetail.models.parameters import Parameters
from moetail.ops.mhc_mixes import mhc_mixes


@dataclass(frozen=True)
class MixParameters:
    """fp32. Rows of fn [hc * (hc + 2), hc * H] and base [hc * (hc + 2)]: pre (hc), post (hc), comb (hc * hc, source
    major); scale [3], one for each."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def random(parameters: Parameters, name: str, hc: int, H: int) -> MixParameters:
        """Of a size that exercises it: comb is about .5 off symmetry, and 40 layers stay finite."""
        rows = hc * (hc + 2)
        return MixParameters(
            parameters.normal(f"{name}_fn", rows, hc * H, std=(hc * H) ** -0.5, dtype=torch.float32),
            parameters.normal(f"{name}_base", rows, std=0.3, dtype=torch.float32),
            parameters.uniform(f"{name}_scale", 3, low=0.5, high=1.5),
        )


@dataclass(frozen=True)
class Mixes:
    """fp32: pre [T, hc] in (eps, 1 + eps), post [T, hc] in (0, 2), comb [T, hc source, hc target]."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def one_hot(S: torch.Tensor) -> torch.Tensor:
    """The pre [T, hc] of a stream that no sublayer has made mixes for: all of stream 0."""
    pre = torch.zeros(S.shape[:2], dtype=torch.float32, device=S.device)
    pre[:, 0] = 1
    return pre


def mixes(S: torch.Tensor, p: MixParameters, rms_eps: float, hc_eps: float, iterations: int) -> Mixes:
    """S [T, hc, H] bf16. One statistic a token, over all of hc * H."""
    pre, post, comb = mhc_mixes(
        S, p.fn, p.base, p.scale, rms_eps=rms_eps, hc_eps=hc_eps, iterations=iterations
    )  # fmt: skip
    return Mixes(pre, post, comb)


def post(y: torch.Tensor, S: torch.Tensor, weights: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """S'[t, j] = weights[t, j] * y[t] + sum over i of comb[t, i, j] * S[t, i]; y [T, H], S [T, hc, H]."""
    total = weights[:, :, None] * y[:, None].float()
    for i in range(S.shape[1]):
        total = total + comb[:, i, :, None] * S[:, i, None].float()
    return total.to(S.dtype)
