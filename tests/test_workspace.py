"""Workspace: what ranks must agree on, what is refused, the fault word, and the life of one."""

import dataclasses
import inspect
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from moetail import Workspace, all_reduce, tuning
from moetail.comm import workspace as w
from moetail.comm.workspace import Fault, FaultKind

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", FaultKind)
def test_fault_word(kind):
    for peer, call in ((0, 1), (7, 2**40)):
        fault = Fault(kind, peer, call)
        assert 0 < fault.encode() < 2**63
        assert Fault.decode(fault.encode()) == fault
    said = Fault(kind, 3, 17).sentence(2, 30.0)
    assert "rank 2" in said and "new one" in said


def test_what_a_timeout_says():
    said = Fault(FaultKind.TIMED_OUT, 1, 17).sentence(0, 30.0)
    assert said.startswith("rank 0 waited 30.0 s for rank 1 at call 17: it stopped, stalled or never made the call; ")


def test_header_fields_do_not_overlap():
    assert w.header(3, w.Kind.FINALIZE_ALL_REDUCE, 5) == (3 << 32) + (2 << 24) + 5
    for call in (2**31 - 1, 2**31, 2**31 + 1, 2**40):  # a server that runs for days
        assert 0 < w.header(call, w.Kind.FINALIZE_ALL_REDUCE, 2**24 - 1) < 2**63
        assert w.header(call, w.Kind.ALL_REDUCE, 1) != w.header(call - 2, w.Kind.ALL_REDUCE, 1)
    bytes_ = [kind.by(tile) for kind in w.Kind for tile in (0, 1, 2, 4, 8, 16, 32, 64)]
    assert len(set(bytes_)) == len(bytes_) and max(bytes_) < 128  # of one path, tile and op each; never the sign


BAD = {
    "max_tokens-zero": ("max_tokens", {"max_tokens": 0}),
    "max_tokens-too-many": ("max_tokens", {"max_tokens": 2**24}),
    "max_tokens-float": ("max_tokens", {"max_tokens": 4.0}),
    "hidden-zero": ("hidden", {"hidden": 0}),
    "hidden-bool": ("hidden", {"hidden": True}),
    "dtype-fp32": ("dtype", {"dtype": torch.float32}),
    "timeout-zero": ("timeout_s", {"timeout_s": 0.0}),
    "timeout-nan": ("timeout_s", {"timeout_s": float("nan")}),
    "timeout-string": ("timeout_s", {"timeout_s": "30"}),
    "device-no-such": ("device", {"device": "tpu"}),
    "device-none": ("device", {"device": [0]}),
    "device-meta": ("device", {"device": torch.device("meta")}),
}


@pytest.mark.parametrize(("name", "change"), BAD.values(), ids=BAD)
def test_bad_arguments(name, change):
    arguments = {"max_tokens": 4, "hidden": 8, "dtype": BF16, "timeout_s": 30.0, "device": CPU} | change
    with pytest.raises(ValueError, match=f"^{name} must be "):
        Workspace(None, **arguments)


@pytest.mark.parametrize("group", ["x", 3, (0, 1), -100])
def test_a_group_that_is_none(group):
    with pytest.raises(ValueError, match="^group must be a torch.distributed.ProcessGroup or None, got "):
        Workspace(group, max_tokens=4, hidden=8)


def test_at_most_eight_ranks():
    with pytest.raises(ValueError, match="^world_size must be from 1 to 8, got 9"):
        w.Facts(4, 8, BF16, 30.0, "cuda", 9, 1).check()


def test_virtual_ranks_need_a_gpu():
    with pytest.raises(ValueError, match="^device must be a cuda device for virtual ranks, got cpu"):
        Workspace.virtual(2, 4, 8, device=CPU)


def test_one_rank_needs_no_group():
    workspace = Workspace(None, 4, 8, device=CPU)
    assert (workspace.rank, workspace.world_size, workspace.control.dtype) == (0, 1, torch.int64)
    workspace.check()
    workspace.destroy()
    workspace.destroy()
    with pytest.raises(RuntimeError, match="^the workspace of rank 0 is destroyed: make a new one"):
        workspace.check()
    with pytest.raises(RuntimeError, match="is destroyed"):
        all_reduce(torch.zeros(1, 8, dtype=BF16), workspace=workspace)


def test_each_fact_must_agree():
    facts = w.Facts(4, 8, BF16, 30.0, "cpu", 3, 341)
    others = {
        "max_tokens": 5, "hidden": 16, "dtype": torch.float16, "timeout_s": 1.0, "device_type": "cuda", "world_size": 2,
        "one_shot_tokens": 512,
    }  # fmt: skip
    assert others.keys() == {field.name for field in dataclasses.fields(w.Facts)}
    w.check_agreement([facts] * 3)
    for name, value in others.items():
        with pytest.raises(ValueError, match=rf"^{name.removesuffix('_type')} must be the same .* on rank 2"):
            w.check_agreement([facts, facts, dataclasses.replace(facts, **{name: value})])


def refused(group, overrides):
    try:
        Workspace(group, **{"max_tokens": 4, "hidden": 8, "device": CPU} | overrides.get(group.rank(), {}))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "made"


def test_ranks_that_disagree_all_hear_it(three):
    for rank, change, said in (
        (1, {"hidden": 16}, "hidden must be the same on every rank, got 8 on rank 0 and 16 on rank 1"),
        (2, {"max_tokens": 0}, "max_tokens must be the same on every rank, got 4 on rank 0 and 0 on rank 2"),
        (0, {"dtype": torch.float16}, "dtype must be the same on every rank, got torch.float16 on rank 0 and "
         "torch.bfloat16 on rank 1"),
    ):  # fmt: skip
        assert three.run(refused, {rank: change}) == [said] * 3
    assert three.run(refused, {rank: {"hidden": 0} for rank in range(3)}) == ["hidden must be 1 or more, got 0"] * 3
    assert three.run(refused, {}) == ["made"] * 3


def refused_with_configs(group, digests):
    """As on GPUs whose config files differ: a CPU has none."""
    real = tuning.digest
    tuning.digest = lambda device: digests[group.rank()]
    try:
        return refused(group, {})
    finally:
        tuning.digest = real


def test_ranks_with_other_configs_all_hear_it(three):
    (said,) = set(three.run(refused_with_configs, ["one", "one", "other"]))
    assert said.startswith("configs must be the same on every rank") and said.endswith("'other' on rank 2")
    assert three.run(refused_with_configs, ["one"] * 3) == ["made"] * 3


def broken(group, error, args, on):
    """A rank whose digest raises, as where its MOETAIL_CONFIGS is another."""
    real = tuning.digest

    def digest(device):
        if group.rank() == on:
            raise error(*args)
        return real(device)

    tuning.digest = digest
    try:
        Workspace(group, 4, 8, device=CPU)
    except (ValueError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        tuning.digest = real
    return "made"


class OnlyHere(Exception):
    """Unpickles nowhere: its constructor takes two."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


@pytest.mark.parametrize(
    ("error", "args", "said"),
    [(ValueError, ["MOETAIL_CONFIGS must be a folder"], "ValueError: MOETAIL_CONFIGS must be a folder"),
     (KeyError, ["gpu"], "RuntimeError: KeyError('gpu')"), (OnlyHere, "ab", "RuntimeError: OnlyHere('a b')")],
    ids=["value", "key", "of-its-own"],
)  # fmt: skip
def test_a_rank_that_fails_alone_is_heard_by_all(three, error, args, said):
    """Before the gather it raised where it was, and its peers waited."""
    assert three.run(broken, error, args, 1) == [f"{said} (on rank 1)"] * 3
    assert three.run(refused, {}) == ["made"] * 3


def test_a_device_that_one_rank_does_not_have_is_heard_by_all(three):
    (said,) = set(three.run(refused, {2: {"device": "nonsense"}}))
    assert "nonsense" in said and said.endswith("(on rank 2)")
    assert three.run(refused, {}) == ["made"] * 3


def life(group):
    """A workspace beside the user's own traffic, a second one on the same ranks, one after another."""
    rank = group.rank()
    x = torch.full((2, 8), float(rank + 1), dtype=BF16)
    first = Workspace(group, 4, 8, device=CPU)
    second = Workspace(group, 4, 8, device=CPU)
    assert first.group_name != second.group_name
    sums = [all_reduce(x, workspace=first), all_reduce(2 * x, workspace=second), all_reduce(3 * x, workspace=first)]
    own = torch.ones(1)
    dist.all_reduce(own, group=group)
    first.destroy()
    sums.append(all_reduce(4 * x, workspace=second))
    third = Workspace(group, 2, 8, device=CPU)
    sums.append(all_reduce(5 * x, workspace=third))
    second.check()
    calls = [int(each.control[w.CALL]) for each in (first, second, third)]
    second.destroy()
    third.destroy()
    return [y[0, 0].item() for y in sums], own.item(), calls


def test_several_workspaces_and_the_users_own_group(three):
    assert three.run(life) == [([6.0, 12.0, 18.0, 24.0, 30.0], 3.0, [3, 3, 2])] * 3


def in_another_order(group):
    """Values whose sum in process order is 1, on a group whose rank order is another (where torch can make one)."""
    can = "sort_ranks" in inspect.signature(dist.new_group).parameters
    turned = dist.new_group([2, 0, 1], **({"sort_ranks": False} if can else {}))
    x = torch.full((1, 8), (2.0**24, 1.0, -(2.0**24))[turned.rank()], dtype=BF16)
    return all_reduce(x, workspace=Workspace(turned, 4, 8, device=CPU))[0, 0].item()


def test_rank_order_is_the_groups(three):
    assert three.run(in_another_order) == [0.0] * 3


@pytest.mark.gpu
def test_virtual_ranks():
    ranks = Workspace.virtual(3, 4, 16, device=torch.device("cuda"))
    assert [r.rank for r in ranks] == [0, 1, 2] and len({tuple(r.control[w.PEERS :].tolist()) for r in ranks}) == 1
    assert all(int(r.control[w.CALL]) == 1 and int(r.control[w.TIMEOUT_NS]) == 30 * 10**9 for r in ranks)
    ranks[0].check()
    ranks[0].destroy()
    with pytest.raises(RuntimeError, match="is destroyed"):
        ranks[0].check()
    assert int(ranks[0].control[w.STATUS]) == Fault(FaultKind.DESTROYED).encode()
    ranks[1].check()


@pytest.mark.gpu
def test_refused_inside_a_capture():
    graph = torch.cuda.CUDAGraph()
    torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="^a Workspace must be made and destroyed outside of a CUDA"):
            Workspace(None, 4, 16)


def connected_and_returned(group, late_s):
    """When this rank was connected, the last rank so much later than the others, and when its workspace was made."""
    from moetail.comm import workspace

    real, connected = workspace._gloo_group, []

    def late(*args):
        exchange = real(*args)
        time.sleep(late_s if group.rank() == group.size() - 1 else 0)
        connected.append(time.monotonic())
        return exchange

    workspace._gloo_group = late
    try:
        Workspace(group, 4, 8, device=CPU)
    finally:
        workspace._gloo_group = real
    return connected[0], time.monotonic()


def test_no_rank_goes_on_before_all_are_connected(three):
    """Else it may drop its workspace, and close the connections that a peer is making."""
    connected, returned = zip(*three.run(connected_and_returned, 0.3), strict=True)
    assert min(returned) >= max(connected)
