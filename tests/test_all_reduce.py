"""all_reduce on gloo groups: the bits of its definition, and one clear error for whatever a peer does."""

import os
import random
import re
import signal
import threading
import time

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from ranks import Ranks

import moetail
from moetail import Workspace, reference
from moetail.comm import workspace as words
from moetail.testing import assert_same_bits

pytestmark = pytest.mark.alone  # how soon an error comes

BF16, F16 = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
H = 24
SIZES = (0, 1, 2, 15, 16, 17, 64)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="W{}".format)
def ranks(request):
    with Ranks(request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture
def doomed():
    """Three ranks for a test that kills or stalls one."""
    with Ranks(3) as ranks:
        yield ranks


def make(group, **changes):
    return Workspace(group, **{"max_tokens": 64, "hidden": H, "device": CPU, "timeout_s": 20.0} | changes)


def inputs(rank, T, call, dtype=BF16):
    """Each rank's own values, spread so that the order of the ranks shows in the bits."""
    g = torch.Generator().manual_seed(1000 * call + rank)
    return (torch.randn(T, H, generator=g) * torch.exp2(torch.randint(-8, 8, (T, H), generator=g).float())).to(dtype)


def calls_of_changing_size(group, dtype):
    rank, W = group.rank(), group.size()
    workspace = make(group, dtype=dtype)
    order = random.Random(7)
    for call in range(28):
        T, late = order.choice(SIZES), order.randrange(W)
        if rank == late and call % 4 == 0:
            time.sleep(0.03)
        x = inputs(rank, T, call, dtype)
        got = moetail.all_reduce(x, workspace=workspace)
        assert_same_bits(got, reference.all_reduce([inputs(r, T, call, dtype) for r in range(W)]))
    assert int(workspace.control[words.CALL]) == 29
    workspace.check()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_bits_at_changing_sizes(ranks, dtype):  # B38, B50
    ranks.run(calls_of_changing_size, dtype)


def special_values(group):
    rank, W = group.rank(), group.size()
    x = torch.zeros(6, H, dtype=BF16)
    x[0] = (2.0**24, 1.0, -(2.0**24), 3.0)[rank]  # (2**24 + 1) - 2**24 is 0 in fp32, in no other order
    x[1] = -0.0
    x[2] = -0.0 if rank == 0 else 0.0
    x[3] = float("nan") if rank == W - 1 else 1.0
    x[4] = float("inf") if rank == 0 else -float("inf")
    x[5] = 3e38
    return moetail.all_reduce(x, workspace=make(group))


def test_order_zeros_and_nan(ranks):
    results = ranks.run(special_values)
    for y in results:
        assert_same_bits(y, results[0])
    y = results[0][:, 0]
    assert y[0] == {2: 2.0**24, 3: 0.0, 4: 3.0}[len(results)]
    assert y[1] == 0 and torch.signbit(y[1]) and y[2] == 0 and not torch.signbit(y[2])
    assert torch.isnan(y[3:5]).all() and y[5] == float("inf")


def same_token_in_every_batch(group):
    workspace = make(group)
    x = inputs(group.rank(), 64, 0)
    whole = moetail.all_reduce(x, workspace=workspace)
    for first, last in ((0, 1), (0, 17), (63, 64), (5, 37)):
        assert_same_bits(moetail.all_reduce(x[first:last], workspace=workspace), whole[first:last])


def test_batch_does_not_change_a_token(three):  # B37
    three.run(same_token_in_every_batch)


def written_into(group):
    rank, W = group.rank(), group.size()
    workspace = make(group)
    want = reference.all_reduce([inputs(r, 3, 0) for r in range(W)])
    arena = torch.full((5, H + 8), float("nan"), dtype=BF16)
    out = arena[1:4, :H]
    assert moetail.all_reduce(inputs(rank, 3, 0), workspace=workspace, out=out) is out
    assert_same_bits(out, want)
    assert torch.isnan(arena[0]).all() and torch.isnan(arena[4]).all() and torch.isnan(arena[:, H:]).all()
    x = inputs(rank, 3, 0)
    moetail.all_reduce(x, workspace=workspace, out=x)
    assert_same_bits(x, want)
    padded = arena.clone()[:3, :H].copy_(inputs(rank, 3, 0))  # a row stride larger than H
    assert_same_bits(moetail.all_reduce(padded, workspace=workspace), want)


def test_out_and_strides(three):
    three.run(written_into)


def said(function, *args, **kwargs):
    """(the error's text without the gloo cause, seconds it took)"""
    began = time.monotonic()
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    raise AssertionError("no error")


def after_a_fault(workspace, x, text):
    """The same sentence at once, from the next call and from check(); and a T = 0 call is a call."""
    for again in (
        said(moetail.all_reduce, x, workspace=workspace), said(moetail.all_reduce, x[:0], workspace=workspace),
        said(workspace.check),
    ):  # fmt: skip
        assert again[0] == text and again[1] < 0.5
    workspace.destroy()
    assert "is destroyed" in said(moetail.all_reduce, x, workspace=workspace)[0]


def one_is_killed(group):
    rank = group.rank()
    workspace = make(group)
    x = inputs(rank, 2, 0)
    moetail.all_reduce(x, workspace=workspace)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    text, seconds = said(moetail.all_reduce, x, workspace=workspace)
    after_a_fault(workspace, x, text)
    left = dist.new_group([0, 2], use_local_synchronization=True)
    renewed = make(left)
    y = moetail.all_reduce(torch.full((1, H), rank + 1.0, dtype=BF16), workspace=renewed)
    return text, seconds, y[0, 0].item()


def test_a_killed_rank(doomed):
    results = doomed.run(one_is_killed)
    assert results[1] is None
    for rank in (0, 2):
        text, seconds, y = results[rank]
        assert text.startswith(f"rank {rank} lost the connection to rank 1 at call 2: it died, ")
        assert seconds < 5 and y == 4.0


def one_stalls(group):
    rank = group.rank()
    workspace = make(group, timeout_s=1.0)
    x = inputs(rank, 2, 0)
    moetail.all_reduce(x, workspace=workspace)
    if rank == 1:
        time.sleep(2.0)
    text, seconds = said(moetail.all_reduce, x, workspace=workspace)
    after_a_fault(workspace, x, text)
    own = torch.ones(1)
    dist.all_reduce(own, group=group)  # the user's group lives
    renewed = make(group)
    return text, seconds, own.item(), moetail.all_reduce(torch.ones(1, H, dtype=BF16), workspace=renewed)[0, 0].item()


def test_a_stalled_rank(doomed):
    results = doomed.run(one_stalls)
    for rank in (0, 2):
        assert re.match(
            f"rank {rank} waited 1.0 s for rank 1 at call 2: it stopped, stalled or never", results[rank][0]
        )
        assert 0.9 < results[rank][1] < 1.8
    assert results[1][0].startswith("rank 1 lost the connection to rank 0 at call 2: it died, gave up waiting or ")
    assert all(result[2:] == (3.0, 3.0) for result in results)


def sizes_differ(group, sizes):
    rank = group.rank()
    workspace = make(group)
    moetail.all_reduce(inputs(rank, 1, 0), workspace=workspace)
    x = inputs(rank, sizes[rank], 1)
    text, seconds = said(moetail.all_reduce, x, workspace=workspace)
    after_a_fault(workspace, inputs(rank, 1, 2), text)
    return text, seconds


@pytest.mark.parametrize("sizes", [(4, 4, 5), (2, 0, 2), (0, 1, 0)], ids=str)
def test_ranks_with_different_sizes(three, sizes):
    odd = next(rank for rank in range(3) if sizes.count(sizes[rank]) == 1)
    for rank, (text, seconds) in enumerate(three.run(sizes_differ, sizes)):
        other = odd if rank != odd else min({0, 1, 2} - {odd})
        assert text.startswith(f"rank {rank} and rank {other} disagree at call 2: another op or another number of ")
        assert seconds < 5


def refused_before_anything_is_sent(group):
    """A bad call on one rank sends nothing: the next good call pairs with the peers' good call."""
    rank, W = group.rank(), group.size()
    workspace = make(group, max_tokens=4)
    x = inputs(rank, 4, 0)
    bad = {
        "workspace must hold a call's T=5 tokens, got one of max_tokens=4": inputs(rank, 5, 0),
        "x must have the workspace's hidden size 24, got 23": x[:, :23],
        "x must have the workspace's dtype torch.bfloat16, got torch.float16": x.to(F16),
        "x must be on the workspace's device cpu, got meta": x.to("meta"),
        "x must have two dimensions": x[0],
        "x must have inner stride 1": x.t().contiguous().t(),
        "x must be a tensor, got list": [1.0],
        "gradients must not be wanted": x.clone().requires_grad_(),
    }
    if rank == 1:
        for text, value in bad.items():
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                moetail.all_reduce(value, workspace=workspace)
        for text, out in {
            "out must have shape": torch.empty(4, 23, dtype=BF16), "out must not overlap x": None,
            "out must be a tensor or None": 3,
        }.items():  # fmt: skip
            buffer = torch.zeros(5, H, dtype=BF16)
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                moetail.all_reduce(buffer[:4], workspace=workspace, out=buffer[1:] if out is None else out)
        with pytest.raises(ValueError, match="^workspace must be a moetail.Workspace, got NoneType"):
            moetail.all_reduce(x, workspace=None)
    assert_same_bits(
        moetail.all_reduce(x, workspace=workspace), reference.all_reduce([inputs(r, 4, 0) for r in range(W)])
    )


def test_bad_calls(three):
    three.run(refused_before_anything_is_sent)


def two_threads(group):
    """One call waits for its peers; a second thread's call is refused, on that rank."""
    workspace = make(group)
    x = torch.ones(1, H, dtype=BF16)
    if group.rank() != 0:
        dist.barrier(group)
        return moetail.all_reduce(x, workspace=workspace)[0, 0].item()
    results = []
    first = threading.Thread(target=lambda: results.append(moetail.all_reduce(x, workspace=workspace)[0, 0].item()))
    first.start()
    while not workspace.control[words.OWNER]:
        time.sleep(0.01)
    text, _ = said(moetail.all_reduce, x, workspace=workspace)
    dist.barrier(group)
    first.join()
    return text, results, said(workspace.check)[0] == text


def test_concurrent_use(three):
    (text, results, stays), *others = three.run(two_threads)
    assert text.startswith("rank 0 began call 1 inside another: a workspace serves one stream and one thread at a time")
    assert stays and results == [3.0] and others == [3.0, 3.0]


def compiled(group):
    """Two collectives, the first result unused: both are made, in order; the graph is one; T compiles once."""
    rank, W = group.rank(), group.size()
    workspace = make(group)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(a, b):
        moetail.all_reduce(a, workspace=workspace)
        return moetail.all_reduce(b * 2, workspace=workspace) + 1

    for number, T in enumerate((3, 5, 17)):
        time.sleep(0.05 * rank)
        got = step(inputs(rank, T + 1, 0), inputs(rank, T, 1))
        assert_same_bits(got, reference.all_reduce([inputs(r, T, 1) * 2 for r in range(W)]) + 1)
        assert int(workspace.control[words.CALL]) == 2 * number + 3
    nodes = [str(n.target) for graph in counter.graphs for n in graph.graph.nodes if "all_reduce" in str(n.target)]
    return counter.frame_count, len(nodes)


def test_compile_keeps_both_calls_in_order(three):
    assert three.run(compiled) == [(1, 2)] * 3


def checked_op(group):
    workspace = make(group)
    w = (workspace.control, workspace.group_name, workspace.rank, workspace.world_size, workspace.max_tokens, False)
    x = inputs(group.rank(), 5, 0)
    torch.library.opcheck(torch.ops.moetail.all_reduce.default, (x, *w))
    torch.library.opcheck(torch.ops.moetail.all_reduce_out.default, (x, *w, torch.empty_like(x)))


def test_opcheck(three):
    three.run(checked_op)


def test_one_rank_gives_a_copy():
    workspace = Workspace(None, 4, H, device=CPU)
    x = inputs(0, 3, 0)
    y = moetail.all_reduce(x, workspace=workspace)
    assert_same_bits(y, x)
    assert y.data_ptr() != x.data_ptr()
    out = torch.empty_like(x)
    assert moetail.all_reduce(x, workspace=workspace, out=out) is out
    assert_same_bits(out, x)
    assert moetail.all_reduce(x[:0], workspace=workspace).shape == (0, H)
    with pytest.raises(ValueError, match="^workspace must hold a call's T=5 tokens"):
        moetail.all_reduce(inputs(0, 5, 0), workspace=workspace)
    call = torch.compile(moetail.all_reduce, backend="aot_eager", fullgraph=True)
    assert_same_bits(call(x, workspace=workspace), x)
