"""all_reduce_mhc: streams that take up the sum once, its bits on gloo ranks and on virtual ranks, what it refuses."""

import pytest
import torch
from ranks import Ranks
from test_all_reduce_norm import CPU, MAX_TOKENS, H, call, partial_of
from test_finalize_mhc import close, streams_of

import moetail
from moetail import Workspace, reference
from moetail.testing import assert_same_bits

BF16 = torch.bfloat16
# (T, hc, in place)
CALLS = ((3, 4, False), (0, 4, False), (16, 3, True), (1, 1, False), (32, 2, True), (5, 8, True))


def mhc_of(T, hc, device="cpu"):
    """The arguments that every rank has alike."""
    return streams_of(T, hc, H, device=device, seed=T)


def given_back(op, inputs, mhc, in_place, workspace):
    """The op, and the streams that it was given, which only an in-place call may change."""
    if not in_place:
        return call(op, inputs, mhc, False, workspace)
    residual, out = mhc["residual"].clone(), torch.full((mhc["residual"].shape[0], H), float("nan"), dtype=BF16)
    got = op(*inputs, workspace=workspace, **mhc | {"residual": residual}, residual_out=residual, out=out)
    assert got[0] is out and got[1] is residual
    return got


def on_ranks(group):
    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=CPU)
    return [
        given_back(moetail.all_reduce_mhc, (partial_of(group.rank(), T),), mhc_of(T, hc), in_place, workspace)
        for T, hc, in_place in CALLS
    ]


@pytest.mark.parametrize("W", [2, 3])
def test_gloo_ranks(W):
    with Ranks(W) as ranks:
        got = ranks.run(on_ranks)
    for i, (T, hc, _) in enumerate(CALLS):
        want = reference.all_reduce_mhc([partial_of(r, T) for r in range(W)], **mhc_of(T, hc))
        for rank in range(W):
            for ours, theirs in zip(got[rank][i], want, strict=True):
                assert_same_bits(ours, theirs)


def test_the_streams_take_up_the_sum_once():  # B44
    """An oracle of its own, in fp64: neither the sum of what each rank would mix, nor comb transposed."""
    parts, mhc = [partial_of(r, 8) for r in range(3)], mhc_of(8, 4)
    h, new = reference.all_reduce_mhc(parts, **mhc)
    y = sum(part.double() for part in parts).to(BF16).double()
    want = torch.empty(8, 4, H, dtype=torch.float64)
    for t in range(8):
        for j in range(4):
            want[t, j] = mhc["post_mix"][t, j].double() * y[t]
            for i in range(4):
                want[t, j] += mhc["res_mix"][t, i, j].double() * mhc["residual"][t, i].double()
    torch.testing.assert_close(new, want.to(BF16))
    collapsed = (mhc["pre_mix"].double()[:, :, None] * new.double()).sum(1).to(BF16).double()
    close(h, torch.nn.functional.rms_norm(collapsed, (H,), mhc["norm_weight"].double(), mhc["eps"]))


@pytest.mark.parametrize("in_place", [False, True])
def test_one_rank(in_place):
    workspace = Workspace(None, MAX_TOKENS, H, device=CPU)
    x, mhc = partial_of(0, 7), mhc_of(7, 4)
    x[0] = -0.0
    mhc["residual"][0] = -0.0
    mhc["post_mix"][0], mhc["res_mix"][0] = 1.0, 1.0
    got = given_back(moetail.all_reduce_mhc, (x,), mhc, in_place, workspace)
    for ours, theirs in zip(got, reference.all_reduce_mhc([x], **mhc), strict=True):
        assert_same_bits(ours, theirs)
    assert torch.signbit(got[1][0]).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 0.0}, "eps must be between"),
        ({"eps": None}, "eps must be a number"),
        ({"residual": torch.zeros(4, H, dtype=BF16)}, "residual must have three dimensions"),
        ({"residual": torch.zeros(5, 4, H, dtype=BF16)}, "residual must have shape"),
        ({"post_mix": torch.zeros(4, 4, 1)}, "post_mix must have shape"),
        ({"res_mix": torch.zeros(4, 4, 4).mT}, "res_mix must be contiguous"),
        ({"pre_mix": torch.zeros(4, 4, dtype=BF16)}, "pre_mix must be float32"),
        ({"pre_mix": None}, "pre_mix must be a tensor, got NoneType"),
        ({"norm_weight": torch.ones(H + 1)}, "norm_weight must have shape"),
        ({"residual_out": torch.zeros(4, 4, H)}, "residual_out must have the dtype"),
        ({"out": torch.zeros(3, H, dtype=BF16)}, "out must"),
        ({"x": torch.zeros(4, H + 8, dtype=BF16)}, "x must have the workspace's hidden size"),
        ({"x": torch.zeros(MAX_TOKENS + 1, H, dtype=BF16)}, "workspace must hold"),
        ({"norm_weight": torch.ones(H, requires_grad=True)}, "gradients must not be wanted"),
    ],
)
def test_refused(change, says):
    workspace = Workspace(None, MAX_TOKENS, H, device=CPU)
    args = {"x": partial_of(0, 4), **mhc_of(4, 4), **change}
    with pytest.raises(ValueError, match=f"^{says}"):
        moetail.all_reduce_mhc(args.pop("x"), workspace=workspace, **args)


def test_overlap_is_refused():
    workspace, mhc, x = Workspace(None, MAX_TOKENS, H, device=CPU), mhc_of(4, 4), partial_of(0, 4)
    with pytest.raises(ValueError, match=r"^out must not overlap residual"):
        moetail.all_reduce_mhc(x, workspace=workspace, **mhc, out=mhc["residual"][:, 3])
    new = torch.zeros(4, 4, H, dtype=BF16)
    with pytest.raises(ValueError, match=r"^residual_out must not overlap x"):
        moetail.all_reduce_mhc(new[:, 1], workspace=workspace, **mhc, residual_out=new)


def test_opcheck():
    """At one rank, which the op itself takes. Dims and dtypes all differ."""
    mhc = [t.clone() if isinstance(t, torch.Tensor) else t for t in ordered(mhc_of(4, 3))]
    control = Workspace(None, MAX_TOKENS, H, device=CPU).control
    outputs = torch.empty(4, H, dtype=BF16), torch.empty(4, 3, H + 8, dtype=BF16)[:, :, :H]
    args = (partial_of(0, 4), *mhc, control, "", 0, 1, MAX_TOKENS, False, *outputs, None, None, None)
    torch.library.opcheck(torch.ops.moetail.all_reduce_mhc.default, args)


def ordered(mhc):
    """As the schemas have them."""
    return [mhc[name] for name in ("residual", "post_mix", "res_mix", "pre_mix", "norm_weight", "eps")]


def compiled(group):
    """Two boundaries in one graph, the streams in place; the number of ops in each graph that was made."""
    import torch._dynamo.testing

    workspace = Workspace(group, MAX_TOKENS, H, timeout_s=20.0, device=CPU)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def boundaries(x, residual, mhc):
        h, residual = moetail.all_reduce_mhc(x, workspace=workspace, residual=residual, residual_out=residual, **mhc)
        return moetail.all_reduce_mhc(h, workspace=workspace, residual=residual, **mhc)

    for T in (3, 17, 32):
        mhc, parts = mhc_of(T, 4), [partial_of(r, T) for r in range(group.size())]
        residual, rest = mhc["residual"].clone(), {k: v for k, v in mhc.items() if k != "residual"}
        first = reference.all_reduce_mhc(parts, **mhc)
        want = reference.all_reduce_mhc([first[0]] * group.size(), residual=first[1], **rest)
        for ours, theirs in zip(boundaries(parts[group.rank()], residual, rest), want, strict=True):
            assert_same_bits(ours, theirs)
        assert_same_bits(residual, first[1])
    calls = [sum("all_reduce_mhc" in str(n.target) for n in graph.graph.nodes) for graph in counter.graphs]
    return [n for n in calls if n > 0]


def test_compile():
    with Ranks(2) as ranks:
        assert ranks.run(compiled) == [[2], [2]]


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("hc", [4, 3])
def test_virtual_ranks(W, hc):
    workspaces = Workspace.virtual(W, MAX_TOKENS, H, timeout_s=20.0)
    streams = [torch.cuda.Stream() for _ in range(W)]
    for T in (0, 1, 32, 5, 17):  # the empty call loads the kernel before a rank may poll
        mhc, parts = mhc_of(T, hc, "cuda"), [partial_of(r, T).cuda() for r in range(W)]
        want, got = reference.all_reduce_mhc(parts, **mhc), []
        kept = [mhc["residual"].clone() for _ in range(W)]
        torch.cuda.synchronize()
        for r in range(W):
            with torch.cuda.stream(streams[r]):
                got.append(
                    moetail.all_reduce_mhc(
                        parts[r], workspace=workspaces[r], **mhc | {"residual": kept[r]}, residual_out=kept[r]
                    )
                )
        torch.cuda.synchronize()
        for pair in got:
            for ours, theirs in zip(pair, want, strict=True):
                assert_same_bits(ours, theirs)
