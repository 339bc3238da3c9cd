"""The gate gives every plant its verdict: alone, on two ranks, on a GPU; and the selftest can fail."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import forward, selftest, stats
from moetail.bench.ranks import Ranks

pytestmark = pytest.mark.alone


def check(record, world_size):
    assert record["kind"] == "selftest" and record["world_size"] == world_size and record["complete"]
    said = {row["case"]: (row["verdict"], row["caught"]) for row in record["rows"]}
    assert said == {plant: (wanted, True) for plant, (wanted, _) in selftest.PLANTS.items()}, record["rows"]


def test_one_process(tmp_path):
    result = CliRunner().invoke(cli.app, ["bench", "selftest", "--device", "cpu", "--json", str(tmp_path / "r.json")])
    assert result.exit_code == cli.OK, result.output
    assert "4 of 4 plants got their verdict" in result.output
    check(json.loads((tmp_path / "r.json").read_text()), 1)


def test_two_ranks(tmp_path):
    out = tmp_path / "r.json"
    done = torchrun("bench", "selftest", "--device", "cpu", "--json", str(out))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    assert done.stdout.count("4 of 4 plants got their verdict") == 1  # one rank prints
    check(json.loads(out.read_text()), 2)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    outcomes = selftest.run(torch.device("cuda", 0), Ranks())
    assert [(o.plant, o.caught) for o in outcomes] == [(plant, True) for plant in selftest.PLANTS], [
        o.result.verdict for o in outcomes
    ]


@pytest.mark.parametrize(
    "blind",
    [
        "slower_producer",  # a gate that calls a slower step the same
        "same_program",  # one that calls a pair of equals faster
        "gain_from_nothing",  # one without the plausibility check
        "wrong_bit",  # one that does not compare
    ],
)
def test_a_blind_gate_is_found(blind, monkeypatch):
    real = stats.judge

    def judge(ratio, aa, bits, base_us, ceiling_us):
        truth = real(ratio, aa, bits, base_us, ceiling_us)
        if blind == "slower_producer" and truth.word == "slower" and not bits:
            return stats.Verdict("same", "blind")
        if blind == "same_program" and truth.word == "same":
            return stats.Verdict("faster", "blind")
        if blind == "gain_from_nothing":
            return real(ratio, aa, bits, base_us, None)
        if blind == "wrong_bit":
            return real(ratio, aa, 0, base_us, ceiling_us)
        return truth

    monkeypatch.setattr(forward.stats, "judge", judge)
    monkeypatch.setattr(selftest, "PLANTS", {blind: selftest.PLANTS[blind]})
    monkeypatch.setattr(selftest, "_ATTEMPTS", 2)  # a blind gate misses each: the last one, which counts, has 24 rounds
    result = CliRunner().invoke(cli.app, ["bench", "selftest", "--device", "cpu", "--rounds", "12"])
    assert result.exit_code == cli.SLOWER and "0 of 1" in result.output and "MISSED" in result.output


def test_a_killed_rank_is_one_clear_error(tmp_path):
    """Rank 1 dies in the middle; rank 0 says so, and leaves no record that looks whole."""
    out = tmp_path / "r.json"
    done = torchrun("bench", "selftest", "--device", "cpu", "--json", str(out), KILLED="1")
    assert done.returncode != 0
    assert "rank 0 lost another rank of 2" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr.split("rank 0 lost")[0] and not out.exists()


DRIVER = """
import os, signal, sys
from moetail import cli
from moetail.bench import timing
if os.environ.get("KILLED") == os.environ["RANK"]:
    timing.interleave = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("WRONG") == os.environ["RANK"]:
    from moetail.bench import collectives
    real = collectives.finalize_all_reduce
    collectives.finalize_all_reduce = lambda *a, **k: real(*a, **k).neg_()
sys.exit(cli.app())
"""


def torchrun(*args, **environment):
    """Two processes with torchrun's variables, without its agent, which would kill rank 0 before it can speak."""
    port = 20000 + os.getpid() % 20000
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": ".",
              "OMP_NUM_THREADS": "1", **environment}  # fmt: skip
    started = [
        subprocess.Popen([sys.executable, "-c", DRIVER, *args], env={**common, "RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=400) for process in started]
    code = max(abs(process.returncode) for process in started)
    return subprocess.CompletedProcess(args, code, *("".join(texts) for texts in zip(*outputs, strict=True)))
