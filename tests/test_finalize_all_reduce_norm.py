"""finalize_all_reduce_norm: bits on gloo ranks and on virtual ranks, one rank, and what it refuses."""

import pytest
import torch
from ranks import Ranks
from test_all_reduce_norm import CPU, KINDS, MAX_TOKENS, H, call, norm_of

import moetail
from moetail import Workspace, reference
from moetail.testing import assert_same_bits, finalize_inputs

TOKENS = (3, 0, 16, 1, 32)


def inputs_of(rank, T, device="cpu"):
    x = finalize_inputs(T, 5, H, absent=0.1, device=device, seed=50 * rank + T)
    return x.rows, x.row_map, x.weights, x.shared


def on_ranks(group):
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=CPU)
    return [
        call(moetail.finalize_all_reduce_norm, inputs_of(group.rank(), T), norm_of(T, **kind), "in_place" in kind,
             workspace)
        for T in TOKENS for kind in KINDS.values()
    ]  # fmt: skip


def expected(W, T, norm, device="cpu"):
    names = ("rows", "row_map", "weights", "shared")
    ranks = [dict(zip(names, inputs_of(r, T, device), strict=True)) for r in range(W)]
    return reference.finalize_all_reduce_norm(ranks, **norm)


@pytest.mark.parametrize("W", [2, 3])
def test_gloo_ranks(W):
    with Ranks(W) as ranks:
        got = ranks.run(on_ranks)
    for i, (T, kind) in enumerate((T, kind) for T in TOKENS for kind in KINDS.values()):
        want = expected(W, T, norm_of(T, **kind))
        for rank in range(W):
            for ours, theirs in zip(got[rank][i], want, strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_rank_is_finalize_norm(kind):
    workspace, norm = Workspace(None, MAX_TOKENS, H, device=CPU), norm_of(9, **KINDS[kind])
    got = call(moetail.finalize_all_reduce_norm, inputs_of(0, 9), norm, kind == "in place", workspace)
    for ours, theirs in zip(got, expected(1, 9, norm), strict=True):
        assert_same_bits(ours, theirs)


def disagree(group):
    """Rank 0 norms, rank 1 does not: another op of the same shape."""
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=10.0, device=CPU)
    inputs = inputs_of(group.rank(), 4)
    with pytest.raises(RuntimeError, match="disagree at call 1"):
        if group.rank() == 0:
            moetail.finalize_all_reduce_norm(*inputs, workspace=workspace, **norm_of(4))
        else:
            moetail.finalize_all_reduce(*inputs, workspace=workspace)


def test_another_op_is_told():
    with Ranks(2) as ranks:
        ranks.run(disagree)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 2.0}, "eps must be between"),
        ({"residual": torch.zeros(4, H)}, "residual must"),
        ({"norm_weight": torch.ones(3)}, "norm_weight must have shape"),
        ({"routed_scale": float("inf")}, "routed_scale must be"),
        ({"numerics": "TRTLLM"}, "numerics must be"),
        ({"workspace": None}, "workspace must be a moetail.Workspace"),
    ],
)
def test_refused(change, says):
    args = {"workspace": Workspace(None, MAX_TOKENS, H, device=CPU), **norm_of(4), **change}
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.finalize_all_reduce_norm(*inputs_of(0, 4), **args)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("kind", ["plain", "sandwich", "zero-centred"])
def test_virtual_ranks(W, kind):
    workspaces = Workspace.virtual(W, MAX_TOKENS, H, timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in range(W)]
    for T in (0, 1, 32, 5, 17):  # the empty call loads the kernel before a rank may poll
        norm = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in norm_of(T, **KINDS[kind]).items()}
        parts, got = [inputs_of(r, T, "cuda") for r in range(W)], []
        want = expected(W, T, norm, "cuda")
        torch.cuda.synchronize()
        for r in range(W):
            with torch.cuda.stream(streams[r]):
                got.append(moetail.finalize_all_reduce_norm(*parts[r], workspace=workspaces[r], **norm))
        torch.cuda.synchronize()
        for pair in got:
            for ours, theirs in zip(pair, want, strict=True):
                assert_same_bits(ours, theirs)
