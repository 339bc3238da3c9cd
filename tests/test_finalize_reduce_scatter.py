"""finalize_reduce_scatter on gloo groups: the bits of its definition, and what it refuses.

What a peer can do wrong is in test_all_reduce.py; the CUDA kernel in test_two_shot.py and test_two_shot_triton.py."""

import random
import re

import pytest
import torch
import torch._dynamo.testing
from ranks import Ranks
from test_finalize_all_reduce import H, arguments, make

import moetail
from moetail import Numerics, Workspace, reference
from moetail.comm import workspace as words
from moetail.testing import assert_same_bits

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, 3, 4], ids="W{}".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def check(workspace, T, call=0, **changes):
    rank, W = workspace.rank, workspace.world_size
    got = moetail.finalize_reduce_scatter(**arguments(rank, T, call, **changes), workspace=workspace)
    everyone = [arguments(r, T, call, **changes) for r in range(W)]
    assert got.shape == (T // W, H)
    if T:
        assert_same_bits(got, reference.finalize_reduce_scatter(everyone, rank))
        assert_same_bits(got, reference.finalize_all_reduce(everyone)[rank * T // W : (rank + 1) * T // W])


def calls_of_changing_size(group):
    workspace, order = make(group), random.Random(5)
    for call in range(8):
        check(workspace, group.size() * order.choice((0, 1, 2, 7, 16)), call)
    check(workspace, 2 * group.size(), 9, numerics=Numerics.PREWEIGHTED)
    mine = arguments(group.rank(), 6, 10)  # beside the other op, on the same workspace
    everyone = [arguments(r, 6, 10) for r in range(group.size())]
    assert_same_bits(
        moetail.finalize_all_reduce(**mine, workspace=workspace), reference.finalize_all_reduce(everyone)
    )  # fmt: skip
    assert int(workspace.control[words.CALL]) == 11


def test_bits_at_changing_sizes(ranks):
    ranks.run(calls_of_changing_size)


def refused(group):
    workspace = make(group, max_tokens=4)
    good = arguments(group.rank(), 4)
    bad = {
        "row_map must have a number of tokens that 2 ranks can share, got T=3": arguments(group.rank(), 3),
        "workspace must hold a call's T=6 tokens, got one of max_tokens=4": arguments(group.rank(), 6),
        "rows must have the workspace's dtype": arguments(0, 4, dtype=torch.float16),
        "shared must have shape": good | {"shared": good["shared"][:2]},
        "weights must be a [T, K] tensor": good | {"weights": None},
        "routed_scale must be a number": good | {"routed_scale": "2"},
        "gradients must not be wanted": good | {"shared": good["shared"].clone().requires_grad_()},
    }
    if group.rank() == 1:
        for text, call in bad.items():
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                moetail.finalize_reduce_scatter(**call, workspace=workspace)
        with pytest.raises(ValueError, match="^workspace must be a moetail.Workspace, got NoneType"):
            moetail.finalize_reduce_scatter(**good, workspace=None)
    check(workspace, 4)


def test_bad_calls(two):
    two.run(refused)


def other_op(group):
    workspace, mine = make(group), arguments(group.rank(), 4)
    op = (moetail.finalize_reduce_scatter, moetail.finalize_all_reduce)[group.rank()]
    with pytest.raises(RuntimeError, match="disagree at call 1: another op or another number of tokens"):
        op(**mine, workspace=workspace)


def test_ranks_with_different_ops(two):
    two.run(other_op)


def compiled(group):
    torch._dynamo.reset()
    workspace = make(group)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(moetail.finalize_reduce_scatter, backend=counter, fullgraph=True, dynamic=True)
    for number, T in enumerate((4, 18, 64)):
        got = call(**arguments(group.rank(), T, 1), workspace=workspace)
        everyone = [arguments(r, T, 1) for r in range(group.size())]
        assert_same_bits(got, reference.finalize_reduce_scatter(everyone, group.rank()))
        assert int(workspace.control[words.CALL]) == number + 2
    calls = [sum("reduce_scatter" in str(n.target) for n in graph.graph.nodes) for graph in counter.graphs]
    return [n for n in calls if n > 0]  # Dynamo restarts once, which leaves an empty graph


def test_compile(two):
    assert two.run(compiled) == [[1], [1]]


def test_opcheck():
    """At one rank, which the op itself takes. Dims and dtypes all differ."""
    x = arguments(0, 4)
    control = Workspace(None, 64, H, device=CPU).control
    args = (x["rows"], x["row_map"], x["weights"], x["shared"], torch.randn(4, 1).half(), torch.tensor([9]), 1.5,
            Numerics.TRTLLM.spec, control, "", 0, 1, 64, False)  # fmt: skip
    torch.library.opcheck(torch.ops.moetail.finalize_reduce_scatter.default, args)


def test_one_rank_is_finalize():
    x = arguments(0, 9)
    got = moetail.finalize_reduce_scatter(**x, workspace=Workspace(None, 64, H, device=CPU))
    assert_same_bits(got, moetail.finalize(**x))
