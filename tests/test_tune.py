"""moetail tune: what it measures first, what it keeps, and what an interrupted, limited or failing run leaves."""

import itertools
import json
import shlex
from dataclasses import dataclass

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli, coverage, tuning
from moetail.bench import timing, tune, tune_ops
from moetail.bench.tune_ops import Bench
from moetail.coverage import Launch, key_of
from moetail.models import deepseek_v41_facts
from moetail.tuning import Shape

CPU = torch.device("cpu")
SHAPE = Shape("finalize", (("K", 3), ("H", 64)))


@dataclass(frozen=True)
class Config:
    us: float
    bits: int = 7
    fails: str = ""


class OutOfResources(Exception):  # as Triton's is called
    pass


def bench(guess, *candidates, want=7):
    def outputs(config):
        if config.fails == "memory":
            raise torch.OutOfMemoryError("no memory")
        if config.fails == "resources":
            raise OutOfResources("shared memory")
        if config.fails:
            raise TypeError(config.fails)
        return [torch.tensor([config.bits])]

    return Bench(guess, candidates, lambda config: config.us, outputs, [torch.tensor([want])])


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A config takes the time that it says."""
    monkeypatch.setattr(timing, "cuda_graph_arm", lambda name, us: timing.Arm(name, lambda: us))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Test")


@pytest.mark.parametrize(
    ("candidates", "kept"),
    [((Config(90.0), Config(80.0), Config(120.0)), 80.0), ((Config(98.0),), 100.0), ((Config(101.0),), 100.0),
     ((), 100.0), ((*tuple(Config(200.0 + i) for i in range(9)), Config(50.0)), 50.0)],
    ids=["the-fastest", "not-by-2-percent", "never-slower", "alone", "the-last"],
)  # fmt: skip
def test_a_config_must_win_by_3_percent(candidates, kept):  # B60
    found = tune._best(bench(Config(100.0), *candidates), rounds=4)
    assert found.config == vars(Config(kept)) and (found.note.startswith("the heuristic")) == (kept == 100.0)
    assert (found.measured["heuristic_us"], found.measured["us"]) == (100.0, kept)


@pytest.mark.parametrize(
    ("loser", "says"),
    [(Config(1.0, bits=8), "DIFFERS IN BITS"), (Config(1.0, fails="memory"), "out of memory"),
     (Config(1.0, fails="resources"), "out of shared memory")],
    ids=["bits", "memory", "resources"],
)  # fmt: skip
def test_a_config_that_fails_is_reported_and_left_out(loser, says):  # B62
    found = tune._best(bench(Config(100.0), loser, Config(90.0)), rounds=4)
    assert found.config == vars(Config(90.0)) and says in found.note and says in found.measured["left_out"][0]


def test_a_heuristic_whose_bits_differ_is_said_and_sets_the_bits():
    found = tune._best(bench(Config(100.0, bits=8), Config(90.0, bits=7), Config(80.0, bits=8)), rounds=4)
    assert found.config == vars(Config(80.0, bits=8)) and found.note.count("DIFFERS IN BITS") == 2


def test_an_error_that_is_no_lack_of_memory_is_raised():
    with pytest.raises(TypeError, match="a bug"):
        tune._best(bench(Config(100.0), Config(1.0, fails="a bug")), rounds=4)


def test_the_grouped_gemms_at_few_and_many_tokens_come_first():
    launches = coverage.launches(deepseek_v41_facts.facts(), tp=2, max_tokens=8192)
    jobs = tune.jobs(launches)
    gemms = [job for job in jobs if job.shape.op == "grouped_gemm"]
    early = [job for job in gemms if job.T in tune.FIRST]
    main = [job for job in early if job.shape["E"] == 384]
    assert jobs[: len(main)] == main and len(early) == 2 * len(main) == 2 * 2 * 6
    assert [job.later for job in jobs] == sorted(job.later for job in jobs)
    assert [(job.T, job.shape["E"], job.shape["N"]) for job in jobs[:5]] == [
        (8, 384, 2304), (8, 384, 5120), (1, 384, 2304), (1, 384, 5120), (16, 384, 2304)
    ]  # fmt: skip
    assert list(dict.fromkeys(job.T for job in early)) == list(tune.FIRST)
    others = [job for job in jobs[len(main) :] if job.T in tune.FIRST and not job.later]
    assert jobs[len(main) : len(main) + len(others)] == others  # route and permute there, before any other T
    for launch in launches:  # together the intervals are the launch's, without a gap
        mine = sorted((job.min_T, job.max_T, job.T) for job in jobs if job.shape == launch.shape)
        if launch.tunable:
            assert (mine[0][0], mine[-1][1]) == (launch.min_T, launch.max_T)
            assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(mine))
            assert all(a <= T <= b for a, b, T in mine)


def run(path, resume=False, go_on=lambda: True, notes=None, shape=SHAPE, max_T=40):
    notes = [] if notes is None else notes
    jobs = tune.jobs([Launch(shape, 1, max_T)])
    return tune.tune(jobs, CPU, path, resume, go_on, lambda done, note: notes.append((done, note)))


@pytest.fixture
def measured(monkeypatch):
    """The T that were measured; `measured.stop_at`: the one at which the user interrupts."""

    class Measured(list):
        stop_at = None

    seen = Measured()

    def make(shape, T, device):
        if seen.stop_at == T:
            raise KeyboardInterrupt
        if T == 4:
            raise torch.OutOfMemoryError("no memory for the inputs")
        seen.append(T)
        return bench(Config(100.0), Config(10.0 + T))

    monkeypatch.setitem(tune_ops.MAKERS, "finalize", make)
    return seen


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


def answers(*tokens, shape=SHAPE):
    tuning.forget()
    key = key_of(shape, "NVIDIA Test", tuning.triton_version())
    return [
        (a.how, None if a.config is None else dict(a.config)["us"]) for a in (tuning.lookup(key, T) for T in tokens)
    ]


def test_lookup_reads_what_tune_writes(folder, measured):
    notes = []
    assert run(folder / "gpu.json", notes=notes) == []
    content = json.loads((folder / "gpu.json").read_text())
    assert content["complete"] and content["missing"] == []
    assert answers(1, 3, 5, 8, 9, 32, 40, 41) == [
        ("exact", 11.0), ("bucket", 12.0), ("heuristic", None), ("exact", 18.0), ("bucket", 18.0), ("exact", 42.0),
        ("bucket", 42.0), ("heuristic", None),
    ]  # fmt: skip
    assert [done for done, _ in notes] == list(range(7)) and any("do not fit in memory" in note for _, note in notes)


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(folder, measured):
    path = folder / "gpu.json"
    measured.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        run(path)
    assert measured == [8, 1, 16]
    assert [m["T"] for m in json.loads(path.read_text())["missing"]] == [2, 4, 32]
    assert answers(1, 2, 8, 15, 16, 31, 32) == [
        ("exact", 11.0), ("heuristic", None), ("exact", 18.0), ("bucket", 18.0), ("exact", 26.0), ("bucket", 26.0),
        ("heuristic", None),
    ]  # fmt: skip
    measured.stop_at = None
    measured.clear()
    assert run(path, resume=True) == [] and measured == [2, 32]
    assert answers(1, 2, 16)[0] == ("exact", 11.0) and json.loads(path.read_text())["complete"]


def test_a_stale_file_is_measured_again(folder, measured):
    path = folder / "gpu.json"
    run(path)
    content = json.loads(path.read_text())
    content["entries"][0]["source"] = "another kernel"
    path.write_text(json.dumps(content))
    measured.clear()
    run(path, resume=True)
    assert measured == [8, 1, 16, 2, 32]


@pytest.mark.parametrize("resume", [False, True], ids=["anew", "resume"])
def test_another_shape_keeps_the_files_other_entries(folder, measured, resume):
    path, other, notes = folder / "gpu.json", Shape("finalize", (("K", 8), ("H", 64))), []
    run(path)
    measured.clear()
    assert run(path, resume, shape=other, notes=notes) == [] and measured == [8, 1, 16, 2, 32]
    assert answers(1, 8, 40)[0] == answers(1, shape=other)[0] == ("exact", 11.0)
    assert notes[0] == (0, f"{path}: kept are 1 of other shapes")
    content = json.loads(path.read_text())
    content["entries"] += [{**content["entries"][0], "gpu": "another"}, {**content["entries"][0], "triton": "another"}]
    path.write_text(json.dumps(content))
    measured.clear()
    run(path, resume, notes=notes)
    assert measured == ([] if resume else [8, 1, 16, 2, 32]) and len(json.loads(path.read_text())["entries"]) == 4


def test_what_another_run_did_not_reach_stays_missing(folder, measured):
    path = folder / "gpu.json"
    run(path, go_on=lambda: len(measured) < 2)
    run(path, shape=Shape("finalize", (("K", 8), ("H", 64))))
    content = json.loads(path.read_text())
    assert not content["complete"] and [(m["dims"]["K"], m["T"]) for m in content["missing"]] == [
        (3, 16), (3, 2), (3, 4), (3, 32)
    ]  # fmt: skip
    run(path, resume=True)
    assert json.loads(path.read_text())["complete"]


def test_a_resumed_run_of_fewer_tokens_keeps_what_lies_above(folder, measured):
    path = folder / "gpu.json"
    run(path)
    measured.clear()
    run(path, resume=True, max_T=9)
    assert measured == [] and answers(8, 10, 16, 40) == [
        ("exact", 18.0), ("heuristic", None), ("exact", 26.0), ("bucket", 42.0)
    ]  # fmt: skip
    run(path, resume=True)
    assert measured == [] and answers(10, 40) == [("bucket", 18.0), ("bucket", 42.0)]


def test_a_file_that_is_not_of_configs_is_not_overwritten(folder, measured):
    (folder / "gpu.json").write_text("mine")
    with pytest.raises(ValueError, match=r"^config file .*gpu\.json must be JSON of schema"):
        run(folder / "gpu.json")
    assert (folder / "gpu.json").read_text() == "mine" and measured == []


@pytest.mark.parametrize("field", ["source", "triton"])
def test_the_command_of_the_stale_warning_measures_again_what_is_stale(folder, measured, monkeypatch, field):
    path = folder / "a folder" / "gpu.json"
    monkeypatch.setenv("MOETAIL_CONFIGS", str(path.parent))
    other = Shape("finalize", (("K", 8), ("H", 64)))
    run(path)
    run(path, shape=other)
    content = json.loads(path.read_text())
    content["entries"][0][field] = "another"
    path.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="are stale") as warned:
        assert answers(8, 3) == [("stale", None)] * 2
    command = shlex.split(str(warned[0].message).partition("with: moetail ")[2])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for stop_at, code, seen in ((2, cli.INTERRUPTED, [8, 1, 16]), (None, cli.OK, [2, 32]), (None, cli.OK, [])):
        measured.clear()
        measured.stop_at = stop_at
        result = CliRunner().invoke(cli.app, command)
        assert (result.exit_code, measured) == (code, seen), result.output
        assert ("the same command goes on" in result.output) == (code == cli.INTERRUPTED)
        assert ("nothing of this GPU is stale" in result.output) == (seen == [])
    assert answers(8, 3, 40) == [("exact", 18.0), ("bucket", 12.0), ("bucket", 42.0)]
    assert answers(8, shape=other) == [("exact", 18.0)] and json.loads(path.read_text())["complete"]
    assert len(json.loads(path.read_text())["entries"]) == (2 if field == "source" else 3)


def test_the_time_limit_begins_nothing_new(folder, measured):
    left = run(folder / "gpu.json", go_on=lambda: len(measured) < 2)
    assert measured == [8, 1] and [job.T for job in left] == [16, 2, 4, 32]
    assert not json.loads((folder / "gpu.json").read_text())["complete"]


def test_within():
    assert timing.within(None)() and timing.within(60.0)() and not timing.within(0.0)()


@pytest.mark.parametrize(
    ("args", "says"),
    [(["finalize", "--stale"], "stale must be without an op"), (["attention"], "op must be one of"),
     ([], "op must be named where there is no --model, got neither"),
     (["route", "--shape", "8,2"], "model must be given to tune route"), (["finalize"], "shape must be K,H"),
     (["grouped_gemm", "--shape", "8,2"], "shape must be E,K,H,I"),
     (["finalize", "--shape", "6,5120"], "needs a CUDA GPU"),
     (["--model", "deepseek-v4.1-flash", "--shape", "6,5120"], "shape must be left out"),
     (["--model", "deepseek-v4.1-flash", "--tp", "5"], "tp must divide"), (["--model", "nothing"], "model must be")],
)  # fmt: skip
def test_bad_input(args, says, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.app, ["tune", *args, "--out", str(tmp_path / "c.json")])
    assert result.exit_code == cli.USAGE and says in " ".join(result.output.split())


SMALL = {"finalize": (3, 160), "finalize_norm": (3, 160), "finalize_mhc": (3, 160, 2), "permute": (4, 2),
         "grouped_gemm": (4, 2, 64, 32)}  # fmt: skip


@pytest.mark.parametrize("op", [*SMALL, "route"])
def test_every_op_has_a_bench_whose_configs_have_the_same_bits(op, monkeypatch):
    """In the interpreter: real inputs, real launches, every candidate."""

    def arm(name, program):
        program()
        return timing.Arm(name, lambda: 1.0)

    monkeypatch.setattr(timing, "cuda_graph_arm", arm)
    monkeypatch.setattr(tune_ops.edges, "produce", lambda source, rows: rows.copy_(source))
    monkeypatch.setattr(tune_ops.edges, "consume", lambda y, residual, out: torch.add(y, residual, out=out))
    monkeypatch.setattr(tune_ops, "_SETS_BYTES", 1)
    if op == "route":
        launches = [one for one in coverage.launches(deepseek_v41_facts.facts(), 2, 3) if one.shape.op == "route"][:1]
    else:
        launches = coverage.launches_of(op, SMALL[op], 20)
    assert {one.shape.op for one in launches} == {op}
    for launch in launches:
        found = tune.best(tune.jobs([launch])[0], CPU, rounds=4)
        assert found.note.startswith("the heuristic") and found.measured["left_out"] == []
        made = tune_ops.MAKERS[op](launch.shape, launch.min_T, CPU)
        assert type(made.heuristic)(**found.config) == made.heuristic


GPU_SHAPES = [
    *(one for op, sizes in (("finalize", (3, 384)), ("finalize_norm", (3, 384)), ("finalize_mhc", (3, 384, 4)),
                            ("permute", (8, 2)), ("grouped_gemm", (8, 2, 256, 128)))
      for one in coverage.launches_of(op, sizes, 64)),
    *(one for one in coverage.launches(deepseek_v41_facts.facts(), 2, 4) if one.shape.op == "route"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("launch", GPU_SHAPES, ids=lambda one: f"{one.shape}-{one.max_T}")
def test_every_op_is_tuned_on_a_gpu(launch, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    jobs = [job for job in tune.jobs([launch]) if job.T in (launch.min_T, 16, 64)]
    left = tune.tune(jobs, torch.device("cuda", 0), tmp_path / "gpu.json", False, lambda: True, lambda done, note: None)
    tuning.forget()
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert left == [] and content["complete"]
    for bucket in content["entries"][0]["buckets"]:
        assert bucket["us"] <= bucket["heuristic_us"]
        assert not any("BITS" in why for why in bucket["left_out"]), bucket["left_out"]
    key = key_of(launch.shape, torch.cuda.get_device_name(), tuning.triton_version())
    assert tuning.lookup(key, jobs[0].T).how == "exact"
    tuning.forget()
