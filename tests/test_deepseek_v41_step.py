"""bench forward on DeepSeek-V4.1: its cases, both arms' bits, tails alone, ranks, and the trimmed context."""

import json
import os

import pytest
import torch
from ranks import Ranks
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import deepseek_v41_step, deepseek_v41_tails, forward, memory
from moetail.bench.cases import parse_case
from moetail.bench.deepseek_v41_step import DeepseekV41Model
from moetail.bench.deepseek_v41_tails import Attention, MoE, RecordingArm
from moetail.models import deepseek_v41_config
from moetail.models.context import Packed
from moetail.models.tails import ARMS, Arm
from moetail.plan import Place, WorldFacts, plan_tails
from moetail.testing import assert_same_bits

CPU = torch.device("cpu")
NAME = "moetail.bench.deepseek_v41_step:small"


@pytest.fixture(scope="module")
def model():
    return deepseek_v41_step.small(CPU)


def run(*args):
    return CliRunner().invoke(cli.app, ["bench", "forward", "--device", "cpu", "--model", NAME, *map(str, args)])


@pytest.mark.parametrize(
    ("routing", "cases"),
    [("real", {"prefill=40": 40, "decode=3*1@100": 3, "mix=30,8*1@128": 38, "verify=2*3@40:2": 6, "hit=5@20,2@90c": 7}),
     ("balanced", {"mix=30,8*1@128": 38})],
)  # fmt: skip
def test_every_kind_of_case_has_the_same_bits(routing, cases, tmp_path):
    """Packed tokens: the cases that a transformers model must refuse are among them."""
    out = tmp_path / "r.json"
    words = [word for text in cases for word in ("--case", text)]
    result = run(*words, "--rounds", 4, "--routing", routing, "--json", out)
    assert result.exit_code in (cli.OK, cli.SLOWER), result.output  # a tiny model's times are noise, its bits are not
    content = json.loads(out.read_text())
    assert content["complete"]
    assert [(r["case"], r["T"], r["K"], r["H"], r["dtype"], r["weights_dtype"]) for r in content["rows"]] == [
        (text.split("=")[0], T, 3, 64, "bfloat16", "float32") for text, T in cases.items()
    ]
    for row in content["rows"]:
        assert row["differing_bits"] == 0 and row["repeat_bits"] == 0
        assert set(row["arms"]) == {"separate", "fused", "control"} and row["tail"]["layers"] == 6


def test_a_wrong_bit_of_an_arm_is_found(monkeypatch):
    real = Arm.boundary

    def wrong(self, output, tp, **streams):
        h, residual = real(self, output, tp, **streams)
        return (torch.nextafter(h, torch.tensor(9.0, dtype=h.dtype)) if self.fuses else h), residual

    monkeypatch.setattr(Arm, "boundary", wrong)
    with monkeypatch.context() as patch:
        patch.setattr(DeepseekV41Model, "tails", lambda *_: None)
        result = run("--case", "prefill=16", "--rounds", 4)
    assert result.exit_code == cli.SLOWER and "bits differ: no speed counts" in result.output
    result = run("--case", "prefill=16", "--rounds", 4)
    assert result.exit_code == cli.FAILED and "tails of the arms differ" in " ".join(result.output.split())


def test_the_arm_in_use_runs_and_no_other(model, monkeypatch):
    ran, real = [], Arm.moe
    monkeypatch.setattr(Arm, "moe", lambda self, layer, x: ran.append(self) or real(self, layer, x))
    step = model.build(parse_case("x=2*1@9"), "real")
    for name in ("fused", "separate", "here_side"):
        model.use(name)
        ran.clear()
        step.restore()
        step.forward()
        assert ran == [step.arms[name]] * 6
    assert [(arm.fuses, arm.passes_on, arm.side_stream) for arm in map(step.arms.get, model.arms)] == [
        (False, True, False), (True, True, False), (True, False, False),
        (False, True, True), (True, True, True), (True, False, True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="^arm must be one of separate, fused, here, .* got 'stock'$"):
        model.use("stock")


def test_what_it_refuses(model):
    with pytest.raises(ValueError, match="^case x: KV length must be <= the model's 4096 positions, got 4097$"):
        model.check(parse_case("x=1@4097"))
    with pytest.raises(ValueError, match="routing must be"):
        model.build(parse_case("x=8"), "even")
    result = run("--case", "long=1@5000")
    assert result.exit_code == cli.USAGE and "4096 positions, got 5000" in " ".join(result.output.split())


def test_the_logits_are_those_of_the_last_and_draft_tokens(model):
    step = model.build(parse_case("x=2*3@40:2,5"), "real")
    logits, hidden = step.forward()
    assert hidden.shape == (11, 64) and logits.shape == (7, 300)
    assert step.logit_rows.tolist() == [0, 1, 2, 3, 4, 5, 10]
    step.restore()
    again = step.forward()
    assert_same_bits(again[0], logits)
    assert_same_bits(again[1], hidden)


def test_balanced_routing_is_the_steps_and_not_its_contexts(model):
    case = parse_case("x=8*2@40")
    steps = {routing: model.build(case, routing) for routing in ("real", "balanced")}
    assert steps["real"].packed.expert_ids is None
    counts = torch.bincount(steps["balanced"].packed.expert_ids.reshape(-1))
    assert counts.tolist() == [6] * 8
    assert_same_bits(steps["balanced"].context.kv, steps["real"].context.kv)
    assert (steps["balanced"].forward()[1] != steps["real"].forward()[1]).any()


def test_the_context_that_is_left_out_is_out_of_reach(model):
    """A prefix of 90 tokens: 51 of them are computed. As close as all 90 are to each other in other chunks."""
    model.use("fused")
    case = parse_case("x=3@93")
    step = model.build(case, "balanced")
    assert step.lengths.tolist() == [90] and step.context.kv.shape[1] == 7 + 51
    trimmed = step.forward()[1]
    # The same ids at the same positions behind 39 others.
    row = model._row(case, 0, case.requests[0])
    assert (len(row.prefix), len(row.query), row.start) == (51, 3, 39)
    older = torch.randint(0, 290, (39,))
    context = model.decoder.context([51])
    for part in (older, row.prefix):
        model.decoder.forward_stage(Packed.of([part]), context, ARMS["fused"])
    want = model.decoder.forward(step.packed, context, ARMS["fused"])
    torch.testing.assert_close(trimmed, want)


def test_one_layer_fewer_of_context_would_be_missed(model, monkeypatch):
    """The test above can see: a context of three layers' reach changes the outputs."""
    case = parse_case("x=3@93")
    want = model.build(case, "balanced").forward()[1]
    monkeypatch.setattr(model, "config", deepseek_v41_config.small(num_hidden_layers=3))
    short = model.build(case, "balanced").forward()[1]
    assert (short.float() - want.float()).abs().max() > 0.1


def bench_on_ranks(group):
    model = deepseek_v41_step.small(CPU)
    assert model.tp.size == group.size()
    with pytest.raises(ValueError, match="must have at most 8192 tokens, got 8200"):
        model.check(parse_case("x=100*82"))
    settings = forward.Settings(("separate", "fused"), rounds=4)
    result = forward.run_case(model, parse_case("mix=9,3*1@30"), settings, model.ranks)
    return result.differing_bits, result.world_size, len(result.tails.samples["fused"])


def test_two_ranks():
    with Ranks(2) as ranks:
        assert ranks.run(bench_on_ranks) == [(0, 2, 20)] * 2


def bench_of_stages(group):
    model = deepseek_v41_step.small_two_stages(CPU)
    assert (model.tp.size, model.pipeline.stage, model.pipeline.size) == (1, group.rank(), 2)
    settings = forward.Settings(("separate", "fused"), rounds=4)
    result = forward.run_case(model, parse_case("mix=9,3*1@30"), settings, model.ranks)
    step = model.build(parse_case("mix=9,3*1@30"), "real")
    return result.differing_bits, result.world_size, [tuple(t.shape) for t in step.forward()]


def test_two_stages(model):
    """The first sends its streams; the last has the logits and the hidden states of the model that is one stage."""
    with Ranks(2) as ranks:
        first, last = ranks.run(bench_of_stages)
    assert first == (0, 2, [(12, 4, 64), (12, 4)]) and last == (0, 2, [(4, 300), (12, 64)])


def test_the_tails_of_a_step(model, monkeypatch):
    """Six attentions' and six layers' ends, two of which only finish, before an Engram."""
    step = model.build(parse_case("mix=30,8*1@128"), "real")
    recording = RecordingArm(False)
    model.decoder.forward(step.packed, step.context, recording)
    calls = recording.calls
    assert [type(call) for call in calls] == [Attention, MoE] * 6 and not recording.pending
    assert [call.streams is None for call in calls[1::2]] == [True, False, True, False, False, False]
    handed = {}
    for name in ("separate", "fused", "here"):
        types = handed[name] = []

        def boundary(self, output, tp, types=types, **streams):
            types.append(type(output).__name__)
            return (self.finished(output, tp),)

        monkeypatch.setattr(Arm, "boundary", boundary)
        for call in calls:
            deepseek_v41_tails.run(call, step.arms[name], model.decoder.plan, model.tp)
    monkeypatch.undo()
    passed = ["Partial", "Partial", "MoEOutput"]
    assert handed["separate"] == ["Partial"] * 10
    assert handed["fused"] == [*passed, *passed, "Partial", "MoEOutput", "Partial", "Tensor"]
    assert handed["here"] == [name.replace("MoEOutput", "Tensor") for name in handed["fused"]]
    tails = model.tails(step)
    assert set(tails.samples) == set(model.arms) and tails.layers == 6 and tails.T == 38
    assert torch.equal(step.context.lengths, step.lengths)


def test_the_full_size_model_is_the_released_one_but_for_its_depth_and_table(monkeypatch):
    made = []
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    monkeypatch.setattr(deepseek_v41_step, "Decoder", lambda config, *a, **k: made.append((config, k)))
    for make in (
        deepseek_v41_step.flash_4_layers,
        deepseek_v41_step.flash_8_layers,
        deepseek_v41_step.flash_4_limit_16,
    ):
        make(CPU)
    for config, options in made:
        changed = {name for name, value in vars(config).items() if value != getattr(deepseek_v41_config.FLASH, name)}
        assert changed == {"num_hidden_layers", "engram_vocab_size"} and options["engram_on_cpu"]
    assert [config.num_hidden_layers for config, _ in made] == [4, 8, 4]
    plan = plan_tails(made[2][1]["facts"], WorldFacts(4096))
    assert [plan.place(2, T) for T in (16, 17)] == [Place.NEXT_LAYER, Place.MOE_LAYER]


@pytest.mark.parametrize(
    ("device", "free", "says"),
    [("cpu", {"cpu": 114.9e9}, r"parameters take 115\.0 GB, got 114\.9 GB free on cpu"),
     ("cuda", {"cuda": 80e9, "cpu": 1e12}, r"parameters take 113\.0 GB, got 80\.0 GB free on cuda"),
     ("cuda", {"cuda": 140e9, "cpu": 1e9}, r"parameters take 2\.0 GB, got 1\.0 GB free on cpu")],
    ids=["ram", "gpu", "the-tables-of-a-gpu-in-ram"],
)  # fmt: skip
def test_a_machine_without_the_memory_is_refused_before_anything_is_allocated(monkeypatch, device, free, says):
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(free[device.type]))
    monkeypatch.setattr(deepseek_v41_step, "Decoder", lambda *a, **k: pytest.fail("allocates"))
    monkeypatch.setattr(deepseek_v41_step.TensorParallel, "of", lambda *a: pytest.fail("allocates"))
    with pytest.raises(ValueError, match=f"^model deepseek-v4.1-flash, 4 layers must fit in memory: its {says}"):
        deepseek_v41_step.flash_4_layers(torch.device(device))


def test_free_memory_of_a_host():
    assert 2**20 < memory.free_bytes(CPU) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.gpu
def test_free_memory_of_a_gpu_counts_what_the_allocator_keeps():
    gpu = torch.device("cuda", 0)
    before = memory.free_bytes(gpu)
    x = torch.empty(2**30, dtype=torch.int8, device=gpu)
    held = before - memory.free_bytes(gpu)
    del x
    freed = before - memory.free_bytes(gpu)  # the allocator has not given it back to the driver
    assert 2**30 <= held < 2**30 + 2**26 and freed < 2**26


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["decode=3*1@100", "mix=30,8*1@128"])
def test_graphs_of_both_arms_have_the_same_bits(text):
    """Captured: no host sync, static shapes, and the table in host memory. Eager mode gives the same."""
    model = deepseek_v41_step.small(torch.device("cuda"))
    result = forward.run_case(model, parse_case(text), forward.Settings(("separate", "fused"), rounds=4))
    assert result.differing_bits == 0 and result.repeat_bits == 0 and result.graph_rms < 1e-6
