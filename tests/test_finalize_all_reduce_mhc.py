"""finalize_all_reduce_mhc: bits on gloo ranks and on virtual ranks, one rank, and what it refuses."""

import pytest
import torch
from ranks import Ranks
from test_all_reduce_mhc import BF16, CALLS, CPU, MAX_TOKENS, H, given_back, mhc_of, ordered
from test_finalize_all_reduce_norm import inputs_of

import moetail
from moetail import Numerics, Workspace, reference
from moetail.testing import assert_same_bits


def on_ranks(group):
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=CPU)
    return [
        given_back(moetail.finalize_all_reduce_mhc, inputs_of(group.rank(), T), mhc_of(T, hc), in_place, workspace)
        for T, hc, in_place in CALLS
    ]


def expected(W, T, mhc, device="cpu"):
    names = ("rows", "row_map", "weights", "shared")
    ranks = [dict(zip(names, inputs_of(r, T, device), strict=True)) for r in range(W)]
    return reference.finalize_all_reduce_mhc(ranks, **mhc)


@pytest.mark.parametrize("W", [2, 3])
def test_gloo_ranks(W):
    with Ranks(W) as ranks:
        got = ranks.run(on_ranks)
    for i, (T, hc, _) in enumerate(CALLS):
        want = expected(W, T, mhc_of(T, hc))
        for rank in range(W):
            for ours, theirs in zip(got[rank][i], want, strict=True):
                assert_same_bits(ours, theirs)


@pytest.mark.parametrize("in_place", [False, True])
def test_one_rank_is_finalize_mhc(in_place):
    workspace, mhc = Workspace(None, MAX_TOKENS, H, device=CPU), mhc_of(9, 4)
    got = given_back(moetail.finalize_all_reduce_mhc, inputs_of(0, 9), mhc, in_place, workspace)
    for ours, theirs in zip(got, moetail.finalize_mhc(*inputs_of(0, 9), **mhc), strict=True):
        assert_same_bits(ours, theirs)
    for ours, theirs in zip(got, expected(1, 9, mhc), strict=True):
        assert_same_bits(ours, theirs)


def test_opcheck():
    """At one rank, which the op itself takes. Dims and dtypes all differ."""
    mhc = [t.clone() if isinstance(t, torch.Tensor) else t for t in ordered(mhc_of(4, 3))]
    control = Workspace(None, MAX_TOKENS, H, device=CPU).control
    outputs = torch.empty(4, H, dtype=BF16), torch.empty(4, 3, H + 8, dtype=BF16)[:, :, :H]
    more = torch.randn(4, 1).to(torch.float16), torch.tensor([9]), 1.5, Numerics.TRTLLM.spec
    args = (*inputs_of(0, 4), *more, *mhc, control, "", 0, 1, MAX_TOKENS, False, *outputs, None, None, None)
    torch.library.opcheck(torch.ops.moetail.finalize_all_reduce_mhc.default, args)


def test_one_rank_compiles():
    workspace, mhc = Workspace(None, MAX_TOKENS, H, device=CPU), mhc_of(9, 4)
    call = torch.compile(moetail.finalize_all_reduce_mhc, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(call(*inputs_of(0, 9), workspace=workspace, **mhc), expected(1, 9, mhc), strict=True):
        assert_same_bits(ours, theirs)


def disagree(group):
    """Rank 0 mixes into streams, rank 1 does not: another op of the same shape."""
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=10.0, device=CPU)
    inputs, mhc = inputs_of(group.rank(), 4), mhc_of(4, 4)
    with pytest.raises(RuntimeError, match="disagree at call 1"):
        if group.rank() == 0:
            moetail.finalize_all_reduce_mhc(*inputs, workspace=workspace, **mhc)
        else:
            moetail.all_reduce_mhc(inputs[3], workspace=workspace, **mhc)


def test_another_op_is_told():
    with Ranks(2) as ranks:
        ranks.run(disagree)


def refuse(group):
    """What world size 1 leaves to finalize_mhc; nothing is sent, so the next call works."""
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=10.0, device=CPU)
    for change, says in REFUSED:
        args = {"workspace": workspace, **mhc_of(4, 4), **change}
        with pytest.raises(ValueError, match=f"^{says}"):
            moetail.finalize_all_reduce_mhc(*inputs_of(0, 4), **args)
    moetail.finalize_all_reduce_mhc(*inputs_of(0, 4), workspace=workspace, **mhc_of(4, 4))


REFUSED = [
    ({"eps": 2.0}, "eps must be between"),
    ({"eps": None}, "eps must be a number"),
    ({"residual": torch.zeros(4, H, dtype=BF16)}, "residual must have three dimensions"),
    ({"res_mix": torch.zeros(4, 4, 4).mT}, "res_mix must be contiguous"),
    ({"norm_weight": torch.ones(3)}, "norm_weight must have shape"),
    ({"routed_scale": float("inf")}, "routed_scale must be"),
    ({"numerics": "TRTLLM"}, "numerics must be"),
    ({"workspace": None}, "workspace must be a moetail.Workspace"),
    ({"post_mix": None}, "post_mix must be a tensor"),
    ({"residual_out": torch.zeros(1, 4, H, dtype=BF16).expand(4, 4, H)}, "residual_out must have streams that lie"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_refused(change, says):
    args = {"workspace": Workspace(None, MAX_TOKENS, H, device=CPU), **mhc_of(4, 4), **change}
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.finalize_all_reduce_mhc(*inputs_of(0, 4), **args)


def test_refused_on_two_ranks():
    with Ranks(2) as ranks:
        ranks.run(refuse)


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("hc", [4, 3])
def test_virtual_ranks(W, hc):
    workspaces = Workspace.virtual(W, MAX_TOKENS, H, timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in range(W)]
    for T in (0, 1, 32, 5, 17):  # the empty call loads the kernel before a rank may poll
        mhc, parts, got = mhc_of(T, hc, "cuda"), [inputs_of(r, T, "cuda") for r in range(W)], []
        want = expected(W, T, mhc, "cuda")
        torch.cuda.synchronize()
        for r in range(W):
            with torch.cuda.stream(streams[r]):
                got.append(moetail.finalize_all_reduce_mhc(*parts[r], workspace=workspaces[r], **mhc))
        torch.cuda.synchronize()
        for pair in got:
            for ours, theirs in zip(pair, want, strict=True):
                assert_same_bits(ours, theirs)
