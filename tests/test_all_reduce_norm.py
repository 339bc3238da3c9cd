"""all_reduce_norm: the norm of the sum, its bits on gloo ranks and on virtual ranks, and what it refuses."""

import pytest
import torch
from ranks import Ranks

import moetail
from moetail import Workspace, reference
from moetail.testing import assert_same_bits

H, MAX_TOKENS, EPS = 72, 32, 1e-6
CPU = torch.device("cpu")
KINDS = {
    "plain": {},
    "sandwich": {"post_norm_weight": True},
    "zero-centred": {"zero_centred": True},
    "in place": {"in_place": True},
}


def partial_of(rank, T, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(1000 * T + rank)
    return torch.randn(T, H, generator=g).to(dtype) * (10.0**rank)


def norm_of(T, dtype=torch.bfloat16, **kind):
    """The arguments that every rank has alike."""
    g = torch.Generator().manual_seed(T)
    norm = {
        "residual": torch.randn(T, H, generator=g).to(dtype),
        "norm_weight": torch.randn(H, generator=g),
        "eps": EPS,
    }
    if kind.get("post_norm_weight"):
        norm["post_norm_weight"] = torch.randn(H, generator=g).to(dtype)
    if kind.get("zero_centred"):
        norm["zero_centred"] = True
    return norm


def call(op, inputs, norm, in_place, workspace):
    """The op, and the residual it was given, which only an in-place call may change."""
    given = norm | {"residual": norm["residual"].clone()}
    out = torch.full_like(norm["residual"], float("nan")) if in_place else None
    kept = given["residual"] if in_place else None
    h, residual = op(*inputs, workspace=workspace, **given, residual_out=kept, out=out)
    assert (residual is kept and h is out) if in_place else torch.equal(given["residual"], norm["residual"])
    return h, residual


def on_ranks(group):
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=CPU)
    results = []
    for T in (3, 0, 16, 1, 32):
        for kind in KINDS.values():
            inputs = (partial_of(group.rank(), T),)
            results.append(call(moetail.all_reduce_norm, inputs, norm_of(T, **kind), "in_place" in kind, workspace))
    return results


@pytest.mark.parametrize("W", [2, 3])
def test_gloo_ranks(W):  # B45
    with Ranks(W) as ranks:
        got = ranks.run(on_ranks)
    cases = [(T, kind) for T in (3, 0, 16, 1, 32) for kind in KINDS.values()]
    for i, (T, kind) in enumerate(cases):
        want = reference.all_reduce_norm([partial_of(r, T) for r in range(W)], **norm_of(T, **kind))
        for rank in range(W):
            for theirs, ours in zip(want, got[rank][i], strict=True):
                assert_same_bits(ours, theirs)


def test_norm_of_the_sum_and_not_the_sum_of_norms():
    """An oracle of its own, in fp64."""
    parts, norm = [partial_of(r, 8) for r in range(3)], norm_of(8)
    h, residual = reference.all_reduce_norm(parts, **norm)
    y = sum(p.double() for p in parts).to(torch.bfloat16)
    total = (norm["residual"].double() + y.double()).to(torch.bfloat16)
    assert torch.equal(residual, total)
    x = total.double()
    torch.testing.assert_close(
        h, (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm["norm_weight"].double()).to(torch.bfloat16)
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_rank(kind):
    workspace = Workspace(None, MAX_TOKENS, H, device=CPU)
    norm = norm_of(7, **KINDS[kind])
    x = partial_of(0, 7)
    x[0] = -0.0
    norm["residual"][0] = -0.0
    got = call(moetail.all_reduce_norm, (x,), norm, kind == "in place", workspace)
    for ours, theirs in zip(got, reference.all_reduce_norm([x], **norm), strict=True):
        assert_same_bits(ours, theirs)
    assert bool(torch.signbit(got[1][0]).all()) or kind == "sandwich"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 0.0}, "eps must be between"),
        ({"eps": None}, "eps must be a number, got None"),
        ({"eps": "1e-6"}, "eps must be a number, got '1e-6'"),
        ({"zero_centred": 1}, "zero_centred must be True or False, got 1"),
        ({"residual": torch.zeros(4, H)}, "residual must"),
        ({"residual": torch.zeros(5, H, dtype=torch.bfloat16)}, "residual must"),
        ({"norm_weight": torch.ones(H + 1)}, "norm_weight must have shape"),
        ({"post_norm_weight": torch.ones(2 * H)[::2]}, "post_norm_weight must be contiguous"),
        ({"residual_out": torch.zeros(4, H)}, "residual_out must"),
        ({"out": torch.zeros(3, H, dtype=torch.bfloat16)}, "out must"),
        ({"norm_weight": None}, "norm_weight must be a tensor, got NoneType"),
        ({"x": torch.zeros(4, H + 8, dtype=torch.bfloat16)}, "x must have the workspace's hidden size"),
        ({"x": torch.zeros(MAX_TOKENS + 1, H, dtype=torch.bfloat16)}, "workspace must hold"),
        ({"norm_weight": torch.ones(H, requires_grad=True)}, "gradients must not be wanted"),
    ],
)
def test_refused(change, says):
    workspace = Workspace(None, MAX_TOKENS, H, device=CPU)
    args = {"x": partial_of(0, 4), **norm_of(4), **change}
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.all_reduce_norm(args.pop("x"), workspace=workspace, **args)


def test_overlap_is_refused():
    workspace, norm = Workspace(None, MAX_TOKENS, H, device=CPU), norm_of(4)
    with pytest.raises(ValueError, match="out"):
        moetail.all_reduce_norm(partial_of(0, 4), workspace=workspace, **norm, out=norm["residual"])


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("kind", ["plain", "sandwich"])
def test_virtual_ranks(W, kind):
    workspaces = Workspace.virtual(W, MAX_TOKENS, H, timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in range(W)]

    def run(T):
        norm = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in norm_of(T, **KINDS[kind]).items()}
        parts = [partial_of(r, T).cuda() for r in range(W)]
        torch.cuda.synchronize()
        got = []
        for r in range(W):
            with torch.cuda.stream(streams[r]):
                got.append(moetail.all_reduce_norm(parts[r], workspace=workspaces[r], **norm))
        torch.cuda.synchronize()
        return got, reference.all_reduce_norm(parts, **norm)

    for T in (0, 1, 32, 5, 17):  # the empty call loads the kernel before a rank may poll
        got, want = run(T)
        for pair in got:
            for ours, theirs in zip(pair, want, strict=True):
                assert_same_bits(ours, theirs)
