"""The conformance suite names the profile of an implementation, and says what it cannot take."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import moetail
from moetail import Numerics, cli, conformance

IMPLEMENTATIONS = {
    "TRTLLM": lambda r, m, w, s: moetail.finalize(r, m, w, s),
    "PREWEIGHTED": lambda r, m, w, s: moetail.finalize(r, m, w, s, numerics=Numerics.PREWEIGHTED),
    "TRANSFORMERS": lambda r, m, w, s: moetail.finalize(r, m, w, s, numerics=Numerics.TRANSFORMERS),
    "FLASHINFER": lambda r, m, w, s: moetail.finalize(r, m, w, s, numerics=Numerics.FLASHINFER),
    "SINGLE_ROUNDING": lambda r, m, w, s: moetail.finalize(r, m, w, s, numerics=Numerics.SINGLE_ROUNDING),
}


def torch_expression(rows, row_map, weights, shared):
    routed = (rows[row_map.long()] * weights.unsqueeze(-1)).sum(dim=1).to(rows.dtype)
    return routed if shared is None else routed + shared


def no_profile(rows, row_map, weights, shared):
    return torch_expression(rows, row_map, weights, shared) * 1.25


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_each_preset_is_told_from_the_others(name):
    report = conformance.run(name, IMPLEMENTATIONS[name], "cpu")
    assert report.profiles == (name,)
    assert all(outcome[name] == "same" for outcome in report.outcome.values())


def test_torchs_own_expression():
    report = conformance.run("torch", torch_expression, "cpu", ("TRTLLM", "TRANSFORMERS"))
    assert report.profiles == ("TRANSFORMERS",)
    assert report.outcome["absent-slots"]["TRANSFORMERS"].startswith(("differs", "refused"))  # it reads what is absent


def test_command(tmp_path):
    out = tmp_path / "c.json"
    args = ["conformance", "--numerics", "TRANSFORMERS", "--json", str(out), "--impl"]
    result = CliRunner().invoke(cli.app, [*args, f"{__name__}:torch_expression"])
    assert result.exit_code == cli.OK, result.output
    assert json.loads(out.read_text())["rows"][0]["profiles"] == ["TRANSFORMERS"]
    assert all(case.name in result.output for case in conformance.CASES)  # a pipe gets whole names
    result = CliRunner().invoke(cli.app, [*args, f"{__name__}:no_profile"])
    assert result.exit_code == cli.SLOWER
    assert "none of the presets tried" in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--impl", "nocolon"], "impl must be module:function"),
        (["--impl", "no.such.module:f"], "there is no module no (is its folder"),
        (["--impl", "torch:no_such_function"], "torch has no no_such_function"),
        (["--impl", "torch:float32"], "impl must be module:function, got 'torch:float32', of type dtype"),
        (["--impl", "moetail:finalize", "--numerics", "EXACT"], "numerics must be among TRTLLM"),
    ],
)
def test_bad_input(args, says):
    result = CliRunner().invoke(cli.app, ["conformance", *args])
    assert result.exit_code == cli.USAGE
    assert says in " ".join(result.output.split())


@pytest.mark.gpu
def test_on_a_gpu():
    report = conformance.run("ours", IMPLEMENTATIONS["TRANSFORMERS"], "cuda")
    assert report.profiles == ("TRANSFORMERS",)


@pytest.mark.gpu
def test_an_implementation_that_takes_the_context_down_is_reported(tmp_path):
    """torch's gather asserts on a row that is not there: in a process of its own, so that only that one ends."""
    out = tmp_path / "c.json"
    command = [sys.executable, "-m", "moetail.cli", "conformance", "--device", "cuda", "--json", str(out), "--impl",
               "test_conformance:torch_expression"]  # fmt: skip
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": ".:tests"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == cli.OK, done.stderr[-2000:]
    row = json.loads(out.read_text())["rows"][0]
    assert row["profiles"] == ["TRANSFORMERS"]
    assert row["outcome"]["absent-slots"]["TRTLLM"].startswith(("refused", "not run"))
    assert row["outcome"]["every-slot-absent"]["TRTLLM"].startswith("not run: absent-slots took the CUDA context")
