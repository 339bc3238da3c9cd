"""The plan in a model: wherever a call is finalized, every boundary's bits are those of finalizing in the experts.

Six layers, Engrams at 1 and 3. TP1, TP2, TP3 and PP2 on gloo; on a GPU eager and captured, alone and on two ranks.
"""

import dataclasses

import decode_steps
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from watched_arm import WatchedArm

from moetail.bench import forward, timing
from moetail.bench.best_all_reduce import Nccl
from moetail.bench.cases import parse_case
from moetail.bench.deepseek_v41_step import DeepseekV41Model
from moetail.layer import MoELayer
from moetail.models import deepseek_v41_facts, moe_block
from moetail.models.context import Packed
from moetail.models.deepseek_v41 import Decoder
from moetail.models.deepseek_v41_config import small
from moetail.models.parallel import TensorParallel
from moetail.models.pipeline import Pipeline
from moetail.models.tails import ARMS
from moetail.plan import Covered, Measured, Place, Reason, measured
from moetail.testing import assert_same_bits

CPU = torch.device("cpu")
CONFIG = small()
NEXT, HERE, EXPERTS = Place.NEXT_LAYER, Place.MOE_LAYER, Place.EXPERTS
R = Reason


def facts(boundary=16, **changes):
    """The small model's layers with `changes` in each of the model's own; up to `boundary` tokens go into the next."""
    layers = deepseek_v41_facts.layers(CONFIG, boundary, boundary)
    return tuple(layer if layer.is_drafter else dataclasses.replace(layer, **changes) for layer in layers)


def passed_on(ranks, place=NEXT, reason=R.NEXT_TAKES_IT):
    """Where layers without an Engram behind them have `place`."""
    return [(HERE, R.BEFORE_ENGRAM), (place, reason)] * 2 + [(place, reason), (HERE, R.LAST_LAYER)]


# name: facts, tokens, the place and the reason of each layer, on one rank and on several
BRANCHES = {
    "into the next layer": (facts(), 16, passed_on(1)),
    "one token": (facts(), 1, passed_on(1)),
    "above the limit": (facts(), 17, passed_on(1, HERE, R.ABOVE_LIMIT)),
    "measured slower": (facts(measured=(Measured(1, 16, True),)), 9, [(EXPERTS, R.MEASURED_SLOWER)] * 6),
    "worse coverage": (
        facts(coverage=(Covered(1, 16, "heuristic", "exact"),)), 9, [(EXPERTS, R.WORSE_COVERAGE)] * 6,
    ),
    "several launches": (facts(experts_max_tokens=8), 20, [(EXPERTS, R.SEVERAL_LAUNCHES)] * 6),
    "cannot stop": (facts(can_stop=False), 5, [(EXPERTS, R.CANNOT_STOP)] * 6),
}  # fmt: skip
TYPES = {NEXT: "MoEOutput", HERE: "Tensor", EXPERTS: "Tensor"}


def tokens(T, seed=0):
    """Two requests, or one of one token."""
    text = torch.randint(0, 290, (T,), generator=torch.Generator().manual_seed(seed))
    return [text] if T == 1 else [text[: T // 2], text[T // 2 :]]


def run_arms(layers, T, tp=None):
    """Both arms' watched run of one step, and the final hidden states of both."""
    decoder, texts = Decoder(CONFIG, CPU, tp, facts=layers), tokens(T)
    arms = [WatchedArm(fuses) for fuses in (False, True)]
    hidden = []
    for arm in arms:
        context = decoder.context([len(text) for text in texts])
        hidden.append(decoder.forward(Packed.of(texts), context, arm))
    reasons = [decoder.plan.range_of(i, T).reason for i in range(6)]
    return arms, hidden, reasons


def check_branch(name, arms, hidden, reasons):
    (separate, fused), (*_, want) = arms, BRANCHES[name]
    assert fused.outputs == [(i, place, TYPES[place]) for i, (place, _) in enumerate(want)]
    assert reasons == [reason for _, reason in want]
    assert {output for *_, output in separate.outputs} == {"Partial"}
    # 6 between attention and experts, 3 into attention without an Engram or an embedding, and the final norm.
    assert len(fused.boundaries) == len(separate.boundaries) == 10
    for got, expected in zip(fused.boundaries, separate.boundaries, strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            assert_same_bits(ours, theirs)
    assert_same_bits(*hidden)
    assert torch.isfinite(hidden[0]).all()


@pytest.mark.parametrize("name", BRANCHES)
def test_every_branch_on_one_rank(name):
    layers, T, _ = BRANCHES[name]
    check_branch(name, *run_arms(layers, T))


def branches_on_ranks(group):
    tp = TensorParallel.of(group, 64, CONFIG.hidden_size, CPU)
    return {name: run_arms(layers, T, tp) for name, (layers, T, _) in BRANCHES.items()}


@pytest.mark.parametrize("W", [2, 3])
def test_every_branch_on_ranks(W):
    with Ranks(W) as ranks:
        results = ranks.run(branches_on_ranks)
    for name in BRANCHES:
        for result in results:
            check_branch(name, *result[name])
            assert_same_bits(result[name][1][0], results[0][name][1][0])


def staged(group, T, tp_size):
    """This rank's part of a pipeline of two stages, both arms: what each layer handed on, and what left the stage."""
    pipeline = Pipeline.of(group.rank(), group.size(), group.size() // tp_size)
    tp = None
    if tp_size > 1:
        parts = [dist.new_group([r, r + 1]) for r in range(0, group.size(), 2)]
        tp = TensorParallel.of(parts[pipeline.stage], 64, CONFIG.hidden_size, CPU)
    decoder = Decoder(CONFIG, CPU, tp, pipeline.layers(6), facts=facts())
    texts, results = tokens(T), []
    for arm in (WatchedArm(fuses) for fuses in (False, True)):
        context = decoder.context([len(text) for text in texts])
        out = pipeline.run(decoder, Packed.of(texts), context, arm)
        out = (out,) if isinstance(out, torch.Tensor) else (out.S, out.pre)
        results.append((arm.outputs, [t for pair in arm.boundaries for t in pair], out))
    return results, decoder.plan.range_of(decoder.stage.stop - 1, T).reason


def check_stages(by_rank, T, want):
    """`by_rank`: of the first and of the last stage."""
    places = []
    for results, _ in by_rank:
        (separate, fused) = results
        places += fused[0]
        for ours, theirs in zip((*fused[1], *fused[2]), (*separate[1], *separate[2]), strict=True):
            assert_same_bits(ours, theirs)
    passed = NEXT if T <= 16 else HERE
    assert [place for _, place, _ in places] == [HERE, passed, HERE, passed, passed, HERE]
    assert [reason for _, reason in by_rank] == [R.LAST_OF_STAGE, R.LAST_LAYER]
    assert_same_bits(by_rank[1][0][1][2][0], want)


def whole(T, group=None):
    decoder, texts = Decoder(CONFIG, CPU, TensorParallel.of(group, 64, 64, CPU), facts=facts()), tokens(T)
    return decoder.forward(Packed.of(texts), decoder.context([len(t) for t in texts]), ARMS["separate"])


@pytest.mark.parametrize("T", [1, 16, 40])
def test_two_stages(T):
    """Layer 2 is the last of its stage: what it hands on is finished there, and the streams leave complete."""
    with Ranks(2) as ranks:
        check_stages(ranks.run(staged, T, 1), T, whole(T))


def whole_on_ranks(group, T):
    return whole(T, group)


def test_two_stages_of_two_ranks():
    with Ranks(2) as ranks:
        (want, _) = ranks.run(whole_on_ranks, 12)
    with Ranks(4) as ranks:
        results = ranks.run(staged, 12, 2)
    for rank in (0, 1):
        check_stages([results[rank], results[rank + 2]], 12, want)


@pytest.mark.parametrize(("T", "same"), [(16, False), (17, True)])
def test_the_control_above_the_limit_is_one_program(T, same):
    """Arms `here` and `fused`: what a bench of them must call the same."""
    decoder, texts, handed = Decoder(CONFIG, CPU, facts=facts()), tokens(T), []
    for passes_on in (False, True):
        arm = WatchedArm(True, passes_on)
        hidden = decoder.forward(Packed.of(texts), decoder.context([len(text) for text in texts]), arm)
        handed.append(([kind for *_, kind in arm.outputs], hidden))
    assert (handed[0][0] == handed[1][0]) is same
    assert_same_bits(handed[0][1], handed[1][1])


def test_a_producer_that_gets_slower_when_deferred_is_declined(monkeypatch):
    """The seed's failure: the gate calls the step slower, and the plan that is told so defers no such call.

    The clock is what the experts did, a microsecond a call: a busy machine changes nothing.
    """
    real, real_rows, deferred, clock = MoELayer.forward_unfinalized, moe_block.expert_rows, [], [0]

    def rows(*args):
        clock[0] += 1000
        return real_rows(*args)

    def slower(self, hidden):
        deferred.append(len(hidden))
        self.experts(hidden, *self.router(hidden)[::-1])
        return real(self, hidden)

    monkeypatch.setattr(moe_block, "expert_rows", rows)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(MoELayer, "forward_unfinalized", slower)
    monkeypatch.setattr(DeepseekV41Model, "tails", lambda *_: None)
    case = parse_case("decode=8*1@9")

    def gate(facts, rounds):
        model = DeepseekV41Model("planted", CONFIG, CPU, facts=facts)
        deferred.clear()
        return forward.run_case(model, case, forward.Settings(("separate", "fused"), rounds)), model.decoder.plan

    result, plan = gate(facts(), 8)
    assert result.verdict.word == "slower" and result.differing_bits == 0 and plan.place(1, 8) is NEXT
    told = measured({case.num_tokens: result.verdict.word == "slower"})
    result, plan = gate(facts(measured=told), 8)
    assert not deferred and result.verdict.word == "same" and result.differing_bits == 0
    assert {plan.range_of(i, 8).reason for i in range(6)} == {R.MEASURED_SLOWER}
    assert plan.place(1, 9) is NEXT  # of which nothing was measured


def test_decode_steps_of_changing_sizes():
    decoder = Decoder(CONFIG, CPU, facts=facts())
    assert decode_steps.run(decoder, [ARMS["separate"], ARMS["fused"]], 6, sizes=(1, 3, 17)) == 0
    differs = dataclasses.replace(CONFIG, routed_scaling_factor=1.25)
    other = Decoder(differs, CPU)
    batch = decode_steps.Batch(decoder, [ARMS["separate"], ARMS["fused"]], 3)
    batch.programs[1] = lambda: other.forward(batch.step, batch.contexts[1], ARMS["fused"])
    assert int(batch.run()) > 0  # it can see


ON_GPU = [("small", False), ("small", True), ("wide", False), ("wide", True)]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("config", "side_stream"), ON_GPU, ids=["small", "small-side", "wide", "wide-side"])
def test_200_decode_steps(config, side_stream, captured):
    """One graph a size and arm, all in one pool. Shared experts on a side stream: what they read and write lives until
    the boundary has run, in eager mode while memory is given back and taken again."""
    device = torch.device("cuda", 0)
    decoder = Decoder({"small": CONFIG, "wide": decode_steps.WIDE}[config], device)
    arms = [ARMS["separate"], dataclasses.replace(ARMS["fused"], side_stream=side_stream)]
    assert {decoder.plan.place(3 if config == "small" else 2, T) for T in decode_steps.SIZES} == {NEXT}
    assert decode_steps.run(decoder, arms, 200, captured) == 0


def steps_on_two_gpus(rank, folder):
    """One of two processes: all of it, the separate arm through NCCL."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device)
    for config in (CONFIG, decode_steps.WIDE):
        tp = TensorParallel.of(dist.group.WORLD, 64, config.hidden_size, device)
        decoder = Decoder(config, device, tp)
        for fused in (ARMS["fused"], dataclasses.replace(ARMS["fused"], side_stream=True), ARMS["here"]):
            for captured in (False, True):
                arms = [dataclasses.replace(ARMS["separate"], collective=Nccl()), fused]
                assert decode_steps.run(decoder, arms, 200, captured) == 0, (config.hidden_size, fused, captured)
                tp.workspace.check()
        dist.barrier()
        tp.workspace.destroy()
    dist.destroy_process_group()


@pytest.mark.gpu2
def test_200_decode_steps_on_two_gpus(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    both = [context.Process(target=steps_on_two_gpus, args=(rank, tmp_path)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=400)
    assert [process.exitcode for process in both] == [0, 0]


def test_which_stage_is_whose():
    assert [Pipeline.of(r, 4, 2) for r in range(4)] == [
        Pipeline(0, 2, None, 2), Pipeline(0, 2, None, 3), Pipeline(1, 2, 0, None), Pipeline(1, 2, 1, None),
    ]  # fmt: skip
    assert [Pipeline(s, 3).layers(7) for s in range(3)] == [range(2), range(2, 4), range(4, 7)]
    assert Pipeline.of(0, 1, 1) == Pipeline()
    for size in (0, 3):
        with pytest.raises(ValueError, match="^size must divide the 4 ranks"):
            Pipeline.of(0, 4, size)
