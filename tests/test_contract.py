"""The deferral contract: it completes to the unfused bits, once, and cannot be used as a tensor or lost by mistake."""

import collections
import copy
import functools
import gc
import operator
import pickle
import types
import warnings

import numpy as np
import pytest
import torch
from ranks import Ranks

import moetail
from moetail import MoEOutput, Numerics, TailSpec, UnfinalizedMoEOutput, Workspace, reference
from moetail.comm import workspace as words
from moetail.contract import completed
from moetail.testing import assert_same_bits, finalize_inputs

TAIL = TailSpec(Numerics.TRTLLM, 2.5)


def make(tail=TAIL, device="cpu"):
    x = finalize_inputs(4, 3, 32, device=device)
    return MoEOutput(UnfinalizedMoEOutput(x.rows, x.row_map, x.weights), x.shared, tail)


@pytest.fixture
def output():
    output = make()
    yield output
    if output._pending:  # a test that only asks whether it refuses
        output.take()


def test_complete_is_the_tail(output):
    r = output.routed
    assert_same_bits(output.complete(), moetail.finalize(r.rows, r.row_map, r.weights, output.shared, routed_scale=2.5))
    assert r.num_tokens == 4
    short = UnfinalizedMoEOutput(r.rows, r.row_map, r.weights, torch.tensor([5]))
    want = moetail.finalize(r.rows, r.row_map, r.weights, None, num_valid_rows=torch.tensor([5]))
    assert_same_bits(MoEOutput(short, None).complete(), want)


def test_refuses_to_be_a_tensor(output):
    one = torch.ones(4, 32, dtype=torch.bfloat16)
    for use in (operator.add, operator.mul, operator.matmul, operator.sub, torch.add, torch.matmul):
        for args in ((output, one), (one, output)):
            with pytest.raises(TypeError, match="complete"):
                use(*args)
    for use in (
        len, iter, bool, float, int, operator.neg, abs, lambda o: o[0], torch.sum, lambda o: o < 1, lambda o: o // 2,
        lambda o: 1 in o, lambda o: operator.setitem(o, 0, one), lambda o: operator.iadd(one, o), np.asarray,
        lambda o: one == o, lambda o: o != one, lambda o: o == 0, copy.copy, copy.deepcopy, pickle.dumps, list,
    ):  # fmt: skip
        with pytest.raises(TypeError, match="complete"):
            use(output)
    assert output != "another" and output in [output] and {output: 1}[output] == 1
    for name in ("shape", "dtype", "view", "to", "device"):
        with pytest.raises(AttributeError, match=f"no {name}: it is not finalized yet, call .complete"):
            getattr(output, name)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        torch.as_tensor(output)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", {"rows": torch.zeros(3)}),
        ("row_map", {"row_map": torch.zeros(3)}),
        ("weights", {"weights": torch.zeros(4, 9)}),
    ],
)
def test_invariants_name_the_field(output, name, change):
    r = output.routed
    fields = {"rows": r.rows, "row_map": r.row_map, "weights": r.weights} | change
    with pytest.raises(ValueError, match=f"^{name} must"):
        UnfinalizedMoEOutput(**fields)


def test_the_shared_output_has_the_rows_shape(output):
    with pytest.raises(ValueError, match=r"^shared must have shape \(4, 32\), got \(4, 16\)"):
        MoEOutput(output.routed, output.shared[:, :16])  # and an output that never was is not missed


def test_a_workspace_is_one(output):
    with pytest.raises(ValueError, match="^workspace must be a moetail.Workspace or None, got str"):
        TailSpec(workspace="tp")
    one = Workspace(None, max_tokens=4, hidden=32, device=torch.device("cpu"))
    r, tail = output.routed, TailSpec(Numerics.TRTLLM, 2.5, one)
    assert_same_bits(MoEOutput(r, output.shared, tail).complete(), output.complete())
    assert MoEOutput(r, output.shared.clone().requires_grad_(), tail).complete().requires_grad
    one.destroy()
    with pytest.raises(RuntimeError, match="is destroyed"):
        MoEOutput(r, output.shared, tail).complete()


def test_complete_runs_once(output, monkeypatch):
    real, calls = UnfinalizedMoEOutput.finalize, []
    monkeypatch.setattr(UnfinalizedMoEOutput, "finalize", lambda *args: (calls.append(args), real(*args))[1])
    first = output.complete()
    assert output.complete() is first and len(calls) == 1
    with pytest.raises(RuntimeError, match="completed already"):
        output.take()


def test_taken_is_spent(output):
    routed, shared, tail = output.take()
    assert (routed, shared, tail) == (output.routed, output.shared, output.tail)
    for again in (output.take, output.complete):
        with pytest.raises(RuntimeError, match="taken already"):
            again()


def test_a_failed_completion_can_be_asked_again(output):
    bad = MoEOutput(output.routed, output.shared.float(), TAIL)
    for _ in range(2):
        with pytest.raises(ValueError, match="^shared must have the rows' dtype"):
            bad.complete()


BAD = {
    "rows must be a tensor, got list": lambda r, s: UnfinalizedMoEOutput([0.0], r.row_map, r.weights),
    "row_map must be a tensor, got NoneType": lambda r, s: UnfinalizedMoEOutput(r.rows, None, r.weights),
    "weights must be a tensor or None, got float": lambda r, s: UnfinalizedMoEOutput(r.rows, r.row_map, 1.0),
    "num_valid_rows must be a tensor or None, got int": lambda r, s: UnfinalizedMoEOutput(r.rows, r.row_map, None, 5),
    "routed must be a moetail.UnfinalizedMoEOutput, got Tensor": lambda r, s: MoEOutput(r.rows, s),
    "shared must be a tensor or None, got str": lambda r, s: MoEOutput(r, "shared"),
    "tail must be a moetail.TailSpec, got Numerics": lambda r, s: MoEOutput(r, s, Numerics.TRTLLM),
    "numerics must be a moetail.Numerics, got 'TRTLLM'": lambda r, s: TailSpec("TRTLLM"),
    "routed_scale must be a number that fp32 holds, got None": lambda r, s: TailSpec(routed_scale=None),
    "routed_scale must be a number that fp32 holds, got nan": lambda r, s: TailSpec(routed_scale=float("nan")),
}


@pytest.mark.parametrize("sentence", BAD)
def test_fields_of_another_kind_are_refused(sentence, output):
    with pytest.raises(ValueError) as caught:
        BAD[sentence](output.routed, output.shared)
    assert str(caught.value) == sentence


def test_a_dropped_output_is_noticed():
    with pytest.warns(RuntimeWarning, match="MoEOutput of 4 tokens was dropped unfinalized"):
        make()
        gc.collect()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        make().complete()
        make().take()
        gc.collect()
    assert seen == []


def test_compiled():
    def whole(rows, row_map, weights, shared):
        output = MoEOutput(UnfinalizedMoEOutput(rows, row_map, weights), shared, TAIL)
        return output.complete() + output.complete()

    def producer(rows, row_map, weights, shared):
        return MoEOutput(UnfinalizedMoEOutput(rows, row_map, weights), shared, TAIL)

    compile_whole = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    want = make()
    r = want.routed
    args = (r.rows, r.row_map, r.weights, want.shared)
    assert_same_bits(compile_whole(whole)(*args), want.complete() + want.complete())
    with pytest.warns(RuntimeWarning, match="dropped"):  # an output that left its graph is an object like any other
        compile_whole(producer)(*args)
    escaped = compile_whole(producer)(*args)
    assert_same_bits(compile_whole(lambda output: output.complete())(escaped), want.complete())
    assert_same_bits(escaped.complete(), want.complete())


def test_nothing_unfinished_leaves_a_stage():  # B65, B67
    Pair = collections.namedtuple("Pair", ("hidden", "pre_mix"))
    tensor, want = torch.ones(2), make().complete()
    sent = completed({"hidden_states": make(), "pair": Pair([make(), 3], (tensor, None, "x", 1.5, True))})
    assert_same_bits(sent["hidden_states"], want)
    assert_same_bits(sent["pair"].hidden[0], want)
    assert sent["pair"].pre_mix[0] is tensor and sent["pair"].pre_mix[1:] == (None, "x", 1.5, True)
    assert completed(tensor) is tensor
    with pytest.raises(TypeError, match="got UnfinalizedMoEOutput"):
        completed([finished := make(), finished.routed])
    with pytest.raises(TypeError, match="got SimpleNamespace"):  # what it holds is not seen
        completed(types.SimpleNamespace(hidden_states=1))


def test_memory_outlives_the_stream_that_reads_it(output, monkeypatch):  # B51
    r = output.routed
    x = UnfinalizedMoEOutput(r.rows, r.row_map, r.weights, torch.tensor([5]))
    recorded = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("reader", device))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((id(self), stream[0])))
    MoEOutput(x, output.shared, TAIL).take()
    want = {id(t) for t in (x.rows, x.row_map, x.weights, x.num_valid_rows, output.shared)}
    assert {tensor for tensor, _ in recorded} == want and {stream for _, stream in recorded} == {"reader"}


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def rank_inputs(rank):
    torch.manual_seed(rank)
    x = finalize_inputs(4, 3, 32)
    return UnfinalizedMoEOutput(x.rows, x.row_map, x.weights), x.shared


def completed_on_ranks(group):
    workspace = Workspace(group, max_tokens=4, hidden=32, device=torch.device("cpu"), timeout_s=20.0)
    tail = TailSpec(Numerics.TRTLLM, 2.5, workspace)
    routed, shared = rank_inputs(group.rank())
    output = MoEOutput(routed, shared, tail)
    y = output.complete()
    assert output.complete() is y
    assert int(workspace.control[words.CALL]) == 2  # the first call's number is 1
    parts = [rank_inputs(rank) for rank in range(group.size())]
    assert_same_bits(y, reference.all_reduce([r.finalize(s, TAIL) for r, s in parts]))
    with pytest.raises(ValueError, match="^gradients must"):
        MoEOutput(routed, shared.clone().requires_grad_(), tail).complete()
    with pytest.raises(ValueError, match="^rows must have the workspace's dtype"):
        UnfinalizedMoEOutput(routed.rows.float(), routed.row_map, routed.weights).finalize(None, tail)
    assert int(workspace.control[words.CALL]) == 2
    compiled = torch.compile(lambda output: completed(output), backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(MoEOutput(routed, shared, tail)), y)
    assert int(workspace.control[words.CALL]) == 3


def test_completes_across_ranks_once(two):
    two.run(completed_on_ranks)


@pytest.mark.gpu
def test_shared_memory_of_a_side_stream_is_not_given_away():  # B51
    want = make(device="cuda").complete()
    side, reader = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    output = make(device="cuda")
    r = output.routed
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shared = torch.empty(4, 32, dtype=r.rows.dtype, device="cuda").copy_(output.shared)
    output.take()
    output = MoEOutput(r, shared, TAIL)
    reader.wait_stream(side)
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(200_000_000)
        y = output.complete()
    address = shared.data_ptr()
    del output, shared
    with torch.cuda.stream(side):
        later = [torch.full((4, 32), 93.0, dtype=r.rows.dtype, device="cuda") for _ in range(8)]
    assert address not in {t.data_ptr() for t in later}
    torch.cuda.synchronize()
    assert_same_bits(y, want)


@pytest.mark.gpu
def test_captured():
    output, want = make(device="cuda"), make(device="cuda").complete()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = output.complete()
        with pytest.warns(RuntimeWarning, match="dropped"):
            MoEOutput(output.routed, output.shared, TAIL)
            gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(y, want)
