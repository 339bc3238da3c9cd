"""bench forward on a tiny model: the numbers it must get right, the input it must refuse, and what the tool prints."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import forward, memory, models, stats, tables, tail
from moetail.bench.cases import parse_case
from moetail.bench.transformers_step import IMPLEMENTATIONS
from moetail.numerics import Numerics

TINY = models.BUILT_IN["glm4-moe-mini"] | {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 3)
    return path


@pytest.fixture
def loaded(config, text):
    case = parse_case("x=4*1@32")
    return forward.load(str(config), text, [case], torch.device("cpu"))


def run(*args):
    return CliRunner().invoke(cli.app, ["bench", "forward", *map(str, args)])


def test_prefill_and_decode_have_the_same_bits(config, text, tmp_path):
    out = tmp_path / "r.json"
    cases = ("--case", "prefill=48", "--case", "decode=3*1@20", "--case", "hit=5@20")
    result = run("--model", config, "--text", text, *cases, "--rounds", 4, "--json", out)  # fmt: skip
    assert result.exit_code in (cli.OK, cli.SLOWER), result.output  # a tiny model's times are noise, its bits are not
    content = json.loads(out.read_text())
    assert content["complete"] and content["kind"] == "forward"
    assert [(r["case"], r["T"], r["K"], r["H"], r["weights_dtype"]) for r in content["rows"]] == [
        ("prefill", 48, 8, 64, "float32"), ("decode", 3, 8, 64, "float32"), ("hit", 5, 8, 64, "float32"),
    ]  # fmt: skip
    for row in content["rows"]:
        assert row["differing_bits"] == 0
        assert row["tail"]["layers"] == 2
        assert set(row["arms"]) == {"stock", "moetail", "control"}
        assert len(row["arms"]["stock"]["samples_us"]) == 8
        assert row["arms"]["moetail"]["peak_bytes"] <= row["arms"]["stock"]["peak_bytes"]
        assert row["verdict"] in result.output
    assert "0 bits differ" in result.output and "routing real" in result.output


def test_a_wrong_bit_is_found_and_fails(config, text, monkeypatch):
    real = torch.ops.moetail.finalize.default
    wrong = lambda *args: torch.nextafter(real(*args), torch.tensor(torch.inf, dtype=torch.bfloat16))  # noqa: E731
    monkeypatch.setattr("moetail.contract.torch.ops.moetail.finalize", SimpleNamespace(default=wrong))
    result = run("--model", config, "--text", text, "--case", "prefill=16", "--rounds", 4)
    assert result.exit_code == cli.SLOWER
    assert "bits differ: no speed counts" in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--case", "decode=8*"], "case must be NAME="),
        (["--case", "mix=8,2*1@8"], "query lengths must be equal"),
        (["--case", "long=1@129"], "KV length must be <= the model's 128 positions, got 129"),
        (["--case", "p=8", "--arms", "stock,fused"], "arms must be two of stock, moetail"),
        (["--case", "p=8", "--arms", "stock"], "arms must be two of"),
        (["--device", "tpu"], "device must be cpu"),
        (["--case", "p=8", "--routing", "even"], "routing must be"),
        (["--case", "p=8", "--case", "p=9"], "p"),
        (["--fail-if", "slow"], "fail-if must be a list of faster, same, slower, void, implausible, got 'slow'"),
        (["--shapes", "/nonexistent.json"], "shapes must be a file of cases, JSON or"),
        (["--profile-dir", "/proc/nowhere"], "profile-dir must be a folder to write into, got /proc/nowhere (No such"),
        (["--case", "p=8", "--kv-len-jitter", "2"], "kv"),
        (["--case", "p=8", "--resume"], "got no --json"),
        (["--case", "[/]=100000000000"], "positions, got 100000000000"),
        (["--json", "/proc/nowhere/r.json"], "json must be a file to write, got /proc/nowhere/r.json (No such file"),
        (["--model", "nothing"], "model must be one of glm4-moe-mini"),
        (
            ["--text", "/nonexistent", "--case", "short=16"],
            "text must be a file with content, got /nonexistent (No such",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(config, text, args, says):
    result = run("--model", config, "--text", text, "--rounds", 4, *args)
    assert result.exit_code == cli.USAGE
    assert says in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
          "num_attention_heads": 2, "vocab_size": 300}, "without any"),
        ({"model_type": "no_such_model"}, "known model_type"),
        ({"hidden_size": 32}, "known model_type"),
        ("{", "known model_type"),
        (TINY | {"vocab_size": 200}, "vocabulary of 256 or more"),
        ("[]", "known model_type"),
        (TINY | {"hidden_size": "x"}, "known model_type"),
    ],
)  # fmt: skip
def test_bad_configs(config, text, content, says):
    config.write_text(content if isinstance(content, str) else json.dumps(content))
    result = run("--model", config, "--text", text, "--case", "prefill=8")
    assert result.exit_code == cli.USAGE
    assert says in " ".join(result.output.split())


def test_differing_bits():
    a = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    b = a.clone()
    assert forward.differing_bits((a,), (b,)) == 0
    b.view(torch.int16)[1] ^= 5
    assert forward.differing_bits((a,), (b,)) == 2
    assert forward.differing_bits((a,), (-a,)) == 2
    with pytest.raises(RuntimeError, match="not finite"):
        forward.differing_bits((a,), (b * float("nan"),))


@pytest.mark.parametrize("arms", [("stock", "moetail"), ("moetail", "stock")])
def test_each_arm_runs_its_own_experts_and_the_ratio_is_second_over_first(loaded, arms, monkeypatch):
    """A clock that charges the moetail experts a quarter of the stock ones."""
    price = {"grouped_mm": 4000.0, "moetail": 1000.0}

    def priced_arm(name, program, prepare):
        def run():
            prepare()
            program()
            return price[loaded.model.config._experts_implementation]

        return forward.timing.Arm(name, run)

    monkeypatch.setattr(forward.timing, "cpu_arm", priced_arm)
    monkeypatch.setattr(tail, "measure", lambda *a, **k: {n: [1.0] * 4 for n in ("stock", "moetail", "masks")})
    result = forward.run_case(loaded, parse_case("prefill=16"), forward.Settings(arms, rounds=4))
    assert result.median_us("stock") == 4000.0 and result.median_us("moetail") == 1000.0
    assert result.ratio.value == (0.25 if arms[0] == "stock" else 4.0)
    assert result.median_us("control") == price[IMPLEMENTATIONS[arms[0]]] and result.aa.value == 1.0


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_tails_are_stock_bits(device, weights_dtype):
    index = torch.stack([torch.randperm(16)[:6] for _ in range(20)]).to(device)
    x = tail.TailInputs.random(index, torch.rand(20, 6).to(weights_dtype).to(device), 96, 64, torch.bfloat16)
    assert torch.equal(tail.stock_tail(x), tail.moetail_tail(x))


def test_the_stock_tail_is_what_transformers_runs(loaded):
    """The baseline is copied work: it must stay what grouped_mm_experts_forward does behind its second GEMM."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    from moetail.integrations.transformers import expert_rows

    experts = loaded.model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(20, 64).bfloat16(), torch.rand(20, 8)
    index = torch.stack([torch.randperm(64)[:8] for _ in range(20)])
    with torch.no_grad():
        routed = expert_rows(experts, hidden, index, weights)
        order = torch.argsort(routed.row_map.reshape(-1))
        shared = torch.randn(20, 64).bfloat16()
        x = tail.TailInputs(routed.rows, order, weights, shared, routed.num_valid_rows, shared)
        assert torch.equal(tail.stock_tail(x), grouped_mm_experts_forward(experts, hidden, index, weights) + x.shared)


def test_a_tail_with_wrong_bits_is_not_timed(monkeypatch):
    monkeypatch.setattr(Numerics, "TRANSFORMERS", Numerics.TRTLLM)
    index = torch.stack([torch.randperm(16)[:6] for _ in range(50)])
    with pytest.raises(RuntimeError, match="differ in their bits"):
        tail.measure(index, torch.rand(50, 6).bfloat16(), 96, 64, torch.bfloat16, rounds=2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_peak_bytes(device):
    mib = 2**20

    def program():
        a = torch.zeros(4 * mib, dtype=torch.uint8, device=device)
        b = torch.zeros(2 * mib, dtype=torch.uint8, device=device)
        del a
        return b, torch.zeros(mib, dtype=torch.uint8, device=device)

    assert memory.peak_bytes(program, torch.device(device)) == 6 * mib


ROW = {
    "model": "m", "case": "c", "T": 8, "arms": {n: {"median_us": us, "peak_bytes": 1} for n, us in
    (("stock", 2000.0), ("moetail", 1000.0), ("control", 2000.0))}, "ratio": {"b_over_a": 0.5, "low": 0.4, "high": 0.6},
    "aa": {"b_over_a": 1.0, "low": 0.99, "high": 1.01}, "differing_bits": 0, "verdict": "faster",
    "arrives": 0.9, "ceiling_us": 1000.0,
    "tail": {"stock": {"median_us": 300.0}, "moetail": {"median_us": 50.0}, "layers": 4},
}  # fmt: skip
RECORD = {
    "schema": 1,
    "kind": "forward",
    "complete": True,
    "world_size": 1,
    "machine": {"gpu": None, "threads": 2, "date": "2026-11-30", "commit": "abc"},
    "rows": [ROW],
}


def test_readme_tables_come_from_records(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(RECORD))
    made = tables.with_tables("before\n<!-- table: r.json -->\nstale\n<!-- end -->\nafter", tmp_path)
    assert "| m | 2 CPU cores | c | 8 | 2.000 | 1.000 | 0.500 [0.400, 0.600] | 0 | faster |" in made
    assert "stale" not in made and made.startswith("before\n") and made.endswith("<!-- end -->\nafter")
    assert tables.with_tables(made, tmp_path) == made


def test_picture(tmp_path):
    from moetail.bench import picture

    (tmp_path / "r.json").write_text(json.dumps(RECORD))
    picture.draw([tmp_path / "r.json"], tmp_path / "a.svg")
    picture.draw([tmp_path / "r.json"], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"2.00 ms" in (tmp_path / "a.svg").read_bytes() or b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_a_case_outlives_its_profile(config, text, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("3 replays must do the same work")

    monkeypatch.setattr(forward.profile, "capture", broken)
    out = tmp_path / "r.json"
    result = run("--model", config, "--text", text, "--case", "p=16", "--rounds", 4, "--json", out,
                 "--profile-dir", tmp_path / "prof")  # fmt: skip
    assert result.exit_code in (cli.OK, cli.SLOWER)
    (row,) = json.loads(out.read_text())["rows"]
    assert "no profile: 3 replays must do the same work" in row["why"] and row["verdict"] in row["why"] + result.output


def test_profiles_are_written(config, text, tmp_path):
    folder = tmp_path / "prof"
    result = run("--model", config, "--text", text, "--case", "d=2*1@16", "--rounds", 4, "--profile-dir", folder)
    assert result.exit_code in (cli.OK, cli.SLOWER), result.output
    names = {f"d.{arm}.rank0.{kind}" for arm in ("stock", "moetail") for kind in ("kernels.json", "trace.json.gz")}
    assert {path.name for path in folder.iterdir()} == names
    assert "kernels a step" in result.output


def test_interrupted_and_resumed(config, text, tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    args = ("--model", config, "--text", text, "--case", "a=8", "--case", "b=9", "--rounds", 4, "--json", out)
    real, measured = forward.run_case, []

    def once(model, case, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(case.name)
        return real(model, case, *rest)

    monkeypatch.setattr(forward, "run_case", once)
    result = run(*args)
    assert result.exit_code == cli.INTERRUPTED and "1 of 2 cases" in result.output and "--resume" in result.output
    content = json.loads(out.read_text())
    assert content["complete"] is False and [r["case"] for r in content["rows"]] == ["a"]
    monkeypatch.setattr(forward, "run_case", real)
    assert run(*args, "--resume").exit_code in (cli.OK, cli.SLOWER)
    content = json.loads(out.read_text())
    assert content["complete"] and [r["case"] for r in content["rows"]] == ["a", "b"]


def test_a_full_disk_is_one_error_and_no_whole_record(config, text, tmp_path, monkeypatch):
    from moetail.bench import record

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "replace", full)
    out = tmp_path / "r.json"
    result = run("--model", config, "--text", text, "--case", "a=8", "--rounds", 4, "--json", out)
    assert result.exit_code == cli.FAILED
    assert "could not be written" in " ".join(result.output.split()) and not out.exists()


def test_fail_if(config, text, monkeypatch):
    monkeypatch.setattr(forward.stats, "judge", lambda *a: stats.Verdict("void", "said so"))
    args = ("--model", config, "--text", text, "--case", "a=8", "--rounds", 4)
    assert run(*args).exit_code == cli.OK
    assert run(*args, "--fail-if", "void").exit_code == cli.SLOWER


def test_a_kernel_compiled_among_the_rounds_fails(loaded, monkeypatch):
    import numba

    real = forward.timing.interleave

    def interleave(*args, **kwargs):
        numba.njit(lambda x: x + 1)(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(forward.timing, "interleave", interleave)
    with pytest.raises(RuntimeError, match="no_jit: numba compiled"):
        forward.run_case(loaded, parse_case("prefill=4"), forward.Settings(("stock", "moetail"), 4))


def test_a_baseline_that_seldom_repeats_its_bits_is_void(loaded, monkeypatch):
    """The seventh run after the rounds is another: one more run of the baseline would not have seen it."""
    real, runs = forward.TimedArm.outputs, []

    def outputs(arm):
        logits, hidden = real(arm)
        runs.append(arm)
        if len(runs) == 7:
            logits.view(torch.int16)[0, 0, 0] ^= 1
        return logits, hidden

    monkeypatch.setattr(forward.TimedArm, "outputs", outputs)
    result = forward.run_case(loaded, parse_case("prefill=4"), forward.Settings(("stock", "moetail"), 4))
    assert result.differing_bits == 0 and result.repeat_bits == 1
    assert result.verdict.word == "void" and "two runs of stock differ in 1 bits" in result.verdict.why


@pytest.mark.parametrize("throttled", [True, False, None])
def test_a_throttled_machine_rests_before_each_run(loaded, monkeypatch, throttled):
    pauses = []
    monkeypatch.setattr(forward.timing.time, "sleep", pauses.append)
    monkeypatch.setattr(forward.machine_state, "read", lambda device: {"throttled": throttled})
    result = forward.run_case(loaded, parse_case("prefill=4"), forward.Settings(("stock", "moetail"), 4))
    assert (result.rest_us > 0) == bool(throttled) and result.row()["rest_us"] == result.rest_us
    assert pauses[: 4 * 6] == [result.rest_us / 1e6] * 4 * 6  # four rounds of three arms, twice each


def test_an_arm_takes_its_captures_in_turn(monkeypatch):
    """Each run's time and outputs are those of one capture, and all captures come as often."""
    made = []

    def cuda_graph_arm(name, program, prepare):
        program()
        made.append(len(made))
        return forward.timing.Arm(name, lambda us=float(made[-1]): us)

    monkeypatch.setattr(forward.timing, "cuda_graph_arm", cuda_graph_arm)
    calls = itertools.count()
    work = SimpleNamespace(forward=lambda: (torch.tensor([float(next(calls))]),), restore=lambda: None)
    model = SimpleNamespace(use=lambda arm: None, device=torch.device("cuda"))
    timed = forward.timed_arm(model, "a", "a", work, forward.Ranks(), captures=3)
    runs = [(timed.arm.run(), float(timed.held[-1][0])) for _ in range(6)]
    assert runs == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)] * 2
    assert float(timed.outputs()[0]) == 0.0


@pytest.mark.parametrize(
    ("device", "peak", "free", "captures"), [("cuda", 10, 80, 4), ("cuda", 11, 80, 1), ("cpu", 1, 10**9, 1)]
)
def test_captures_leave_half_of_the_memory(device, peak, free, captures, monkeypatch):
    monkeypatch.setattr(forward.memory, "free_bytes", lambda device: free)
    assert forward.num_captures(peak, forward.Ranks(), torch.device(device)) == captures
