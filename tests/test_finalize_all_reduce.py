"""finalize_all_reduce on gloo groups: the bits of its definition, with every rank's own map, rows and weights.

What a peer can do wrong is in test_all_reduce.py: both ops exchange through the same code.
"""

import random
import re
import time

import pytest
import torch
import torch._dynamo.testing
from ranks import Ranks

import moetail
from moetail import Numerics, Workspace, reference
from moetail.comm import workspace as words
from moetail.testing import assert_same_bits, finalize_inputs

BF16, F16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
H, K = 40, 5
SIZES = (0, 1, 2, 15, 16, 17, 64)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="W{}".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def make(group, **changes):
    return Workspace(group, **{"max_tokens": 64, "hidden": H, "device": CPU, "timeout_s": 20.0} | changes)


def arguments(rank, T, call=0, numerics=Numerics.TRTLLM, **changes):
    """Each rank's own. Slots that are absent, a padded row stride, dead memory that is NaN."""
    x = finalize_inputs(T, K, H, pad=8, absent=0.2, seed=1000 * call + rank, **changes)
    return {
        "rows": x.rows, "row_map": x.row_map, "weights": x.weights_for(numerics), "shared": x.shared,
        "numerics": numerics,
    }  # fmt: skip


def check(workspace, T, call=0, **changes):
    """One call against the definition, from every rank's arguments."""
    mine = arguments(workspace.rank, T, call, **changes)
    got = moetail.finalize_all_reduce(**mine, workspace=workspace)
    everyone = [arguments(r, T, call, **changes) for r in range(workspace.world_size)]
    assert_same_bits(got, reference.finalize_all_reduce(everyone))
    return got


def calls_of_changing_size(group):
    workspace = make(group)
    order = random.Random(5)
    for call in range(2 * len(SIZES)):
        T, late = order.choice(SIZES) if call >= len(SIZES) else SIZES[call], order.randrange(group.size())
        if group.rank() == late:
            time.sleep(0.02)
        check(workspace, T, call)
    assert int(workspace.control[words.CALL]) == 2 * len(SIZES) + 1


def test_bits_at_changing_sizes(ranks):  # B38, B50
    ranks.run(calls_of_changing_size)


def every_argument(group):
    rank, W = group.rank(), group.size()
    workspace = make(group)
    check(workspace, 9, numerics=Numerics.PREWEIGHTED)
    check(workspace, 9, numerics=Numerics.SINGLE_ROUNDING, map_dtype=torch.int64)

    def call(r):
        x = finalize_inputs(6, K, H, seed=r)
        return {
            "rows": x.rows, "row_map": x.row_map, "weights": x.weights, "shared": x.shared,
            "shared_gate": x.shared_gate, "routed_scale": 1.7, "num_valid_rows": torch.tensor([10 + r]),
        }  # fmt: skip

    want = reference.finalize_all_reduce([call(r) for r in range(W)])
    assert_same_bits(moetail.finalize_all_reduce(**call(rank), workspace=workspace), want)
    out = call(rank)["shared"]
    mine = call(rank) | {"shared": out}
    assert moetail.finalize_all_reduce(**mine, workspace=workspace, out=out) is out  # in place
    assert_same_bits(out, want)
    without = [call(r) | {"shared": None, "shared_gate": None} for r in range(W)]
    got = moetail.finalize_all_reduce(**without[rank], workspace=workspace)
    assert_same_bits(got, reference.finalize_all_reduce(without))


def test_every_argument(two):
    two.run(every_argument)


def half_precision(group):
    check(make(group, dtype=F16), 17, dtype=F16)


def test_fp16(two):
    two.run(half_precision)


def one_value(group, per_rank, shared):
    """T = 1, one slot of weight 1: the partial of rank r is per_rank[r] (+ shared)."""
    row = torch.full((1, H), per_rank[group.rank()], dtype=BF16)
    extra = None if shared is None else torch.full((1, H), shared, dtype=BF16)
    call = (row, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), extra)
    return moetail.finalize_all_reduce(*call, workspace=make(group))


def test_order_zeros_and_nan(ranks):  # B38
    W = len(ranks.pipes)
    big = (2.0**24, 1.0, -(2.0**24), 3.0)[:W]
    cases = [
        (big, None, {2: 2.0**24, 3: 0.0, 4: 3.0}[W]),
        ((-0.0,) * W, -0.0, 0.0),  # a routed sum starts at +0.0, so a partial is never -0 here
        ((float("nan"), *(1.0,) * (W - 1)), None, float("nan")),
        ((3.0,) * W, 2.0, 5.0 * W),  # shared is each rank's own part
    ]
    for per_rank, shared, want in cases:
        for y in ranks.run(one_value, per_rank, shared):
            assert_same_bits(y, torch.full((1, H), want, dtype=BF16))


def each_partial_is_rounded(group):
    """1 + 2**-9 rounds to 1 in bf16; four of them summed unrounded would be above 4."""
    return one_value(group, (1.0,) * group.size(), 2.0**-9)


def test_partials_are_rounded_before_they_are_added(ranks):
    W = len(ranks.pipes)
    for y in ranks.run(each_partial_is_rounded):
        assert_same_bits(y, torch.full((1, H), float(W), dtype=BF16))


def other_op(group):
    """One rank's tail is fused, the other's is not."""
    workspace = make(group)
    mine = arguments(group.rank(), 3)
    with pytest.raises(RuntimeError, match="disagree at call 1: another op or another number of tokens"):
        if group.rank() == 0:
            moetail.finalize_all_reduce(**mine, workspace=workspace)
        else:
            moetail.all_reduce(moetail.finalize(**mine), workspace=workspace)


def test_ranks_with_different_ops(two):
    two.run(other_op)


def empty_on_one_rank(group):
    workspace = make(group)
    check(workspace, 0)  # B11: all empty is a call
    check(workspace, 2)
    with pytest.raises(RuntimeError, match="disagree at call 3"):
        moetail.finalize_all_reduce(**arguments(group.rank(), 2 * group.rank()), workspace=workspace)


def test_a_rank_without_tokens(two):
    two.run(empty_on_one_rank)


def refused_before_anything_is_sent(group):
    workspace = make(group, max_tokens=4)
    good = arguments(group.rank(), 4)
    larger = arguments(group.rank(), 5)
    bad = {
        "workspace must hold a call's T=5 tokens, got one of max_tokens=4": larger,
        "rows must have the workspace's hidden size 40, got 39": good | {"rows": good["rows"][:, :39], "shared": None},
        "rows must have the workspace's dtype torch.bfloat16, got torch.float16": arguments(0, 4, dtype=F16),
        "rows must be on the workspace's device cpu, got meta": good | {"rows": good["rows"].to("meta")},
        "rows must have two dimensions": good | {"rows": good["rows"][0]},
        "row_map must have two dimensions": good | {"row_map": good["row_map"][0]},
        "row_map must be a tensor, got list": good | {"row_map": [0]},
        "weights must be a [T, K] tensor": good | {"weights": None},
        "shared must have shape": good | {"shared": good["shared"][:2]},
        "numerics must be a moetail.Numerics": good | {"numerics": "TRTLLM"},
        "routed_scale must be a number": good | {"routed_scale": "2"},
        "out must have shape": good | {"out": torch.empty(3, H, dtype=BF16)},
        "out must not overlap rows": good | {"out": good["rows"][:4]},
        "gradients must not be wanted": good | {"shared": good["shared"].clone().requires_grad_()},
    }
    if group.rank() == 1:
        for text, call in bad.items():
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                moetail.finalize_all_reduce(**call, workspace=workspace)
        with pytest.raises(ValueError, match="^workspace must be a moetail.Workspace, got NoneType"):
            moetail.finalize_all_reduce(**good, workspace=None)
    check(workspace, 4)
    workspace.destroy()
    with pytest.raises(RuntimeError, match="is destroyed: make a new one"):
        moetail.finalize_all_reduce(**good, workspace=workspace)


def test_bad_calls(two):
    two.run(refused_before_anything_is_sent)


def compiled(group, backend):
    """A layer of two tails: one graph, both collectives in it and in order, no recompilation when T changes."""
    torch._dynamo.reset()
    workspace = make(group)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def tails(a, b):
        first = moetail.finalize_all_reduce(**a, workspace=workspace)
        return first, moetail.finalize_all_reduce(**b, workspace=workspace, out=torch.empty_like(first))

    def want(T, call):
        return reference.finalize_all_reduce([arguments(r, T, call) for r in range(group.size())])

    for number, T in enumerate((3, 17, 64)):
        first, second = tails(arguments(group.rank(), T, 1), arguments(group.rank(), T, 2))
        assert_same_bits(first, want(T, 1))
        assert_same_bits(second, want(T, 2))
        assert int(workspace.control[words.CALL]) == 2 * number + 3
    calls = [sum("finalize_all_reduce" in str(n.target) for n in graph.graph.nodes) for graph in counter.graphs]
    return [n for n in calls if n > 0]  # Dynamo restarts once, which leaves an empty graph


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(two, backend):
    assert two.run(compiled, backend) == [[2], [2]]


def test_opcheck():
    """At one rank, which the op itself takes. Dims and dtypes all differ."""
    x = arguments(0, 4)
    control = Workspace(None, 64, H, device=CPU).control
    args = (x["rows"], x["row_map"], x["weights"], x["shared"], torch.randn(4, 1).to(F16), torch.tensor([9]), 1.5,
            Numerics.TRTLLM.spec, control, "", 0, 1, 64, False)  # fmt: skip
    torch.library.opcheck(torch.ops.moetail.finalize_all_reduce.default, args)
    torch.library.opcheck(torch.ops.moetail.finalize_all_reduce_out.default, (*args, torch.empty_like(x["shared"])))


def test_one_rank_is_finalize():
    workspace = Workspace(None, 64, H, device=CPU)
    x = arguments(0, 9)
    want = moetail.finalize(**x)
    assert_same_bits(moetail.finalize_all_reduce(**x, workspace=workspace), want)
    call = torch.compile(moetail.finalize_all_reduce, backend="aot_eager", fullgraph=True)
    assert_same_bits(call(**x, workspace=workspace), want)
    shared = x["shared"].requires_grad_()
    moetail.finalize_all_reduce(**x, workspace=workspace).sum().backward()
    assert_same_bits(shared.grad, torch.ones(9, H, dtype=BF16))
    with pytest.raises(ValueError, match="^workspace must hold a call's T=65 tokens"):
        moetail.finalize_all_reduce(**arguments(0, 65), workspace=workspace)


def test_the_definition():
    """Against sums written by hand: the order, one rounding, and the sign of a zero."""
    a, b, c = (torch.tensor([[v]], dtype=BF16) for v in (2.0**24, 1.0, -(2.0**24)))
    assert reference.all_reduce([a, b, c]).item() == 0.0 and reference.all_reduce([a, c, b]).item() == 1.0
    small = torch.tensor([[2.0**-8]], dtype=BF16)
    assert reference.all_reduce([b, small, small]).item() == 1 + 2.0**-7  # not rounded between
    zero = torch.tensor([[-0.0]], dtype=BF16)
    assert_same_bits(reference.all_reduce([zero, zero]), zero)
    assert_same_bits(reference.all_reduce([zero, -zero]), -zero)
