"""bench forward --base: two versions in two processes, told apart by their time and by their bits."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_forward import TINY
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import base, forward

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def other_version(folder, old, new):
    """This tree with one line of a step changed."""
    shutil.copytree(ROOT / "moetail", folder / "moetail", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "moetail" / "bench" / "transformers_step.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return folder


def run_case(folder, config):
    return base.run_case(
        folder, "then", str(config), ROOT / "README.md", "p=16", torch.device("cpu"), None, 4, "real"
    )  # fmt: skip


def test_a_slower_base_is_seen(tmp_path, config):
    sleep = "import time; time.sleep(0.1); return out.logits, seen[-1]"
    result = run_case(other_version(tmp_path / "then", "return out.logits, seen[-1]", sleep), config)
    assert result.verdict.word in ("faster", "void")  # void: a busy machine's control
    assert result.ratio.value < 0.7 and result.differing_bits == 0
    assert set(result.samples) == {"then", base.HERE, forward.CONTROL}
    assert result.median_us("then") > 100_000


def test_other_bits_are_seen(tmp_path, config):
    result = run_case(
        other_version(tmp_path / "then", "return out.logits, seen[-1]", "return out.logits * 2, seen[-1]"), config
    )
    assert result.verdict.word == "slower" and result.differing_bits > 0 and result.repeat_bits == 0


def test_the_command(config, tmp_path):
    args = ["bench", "forward", "--base", "HEAD", "--model", str(config), "--case", "p=16", "--case", "d=2*1@9"]
    result = CliRunner().invoke(cli.app, [*args, "--rounds", "4", "--json", str(tmp_path / "r.json")])
    assert result.exit_code in (cli.OK, cli.SLOWER), result.output  # a tiny model's times are noise, its bits are not
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["case"], row["differing_bits"]) for row in rows] == [("p", 0), ("d", 0)]
    assert set(rows[0]["arms"]) == {"HEAD", base.HERE, "control"}
    trees = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "moetail-base-" not in trees


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--base", "no-such-commit"], "base must be a commit of this checkout"),
        (["--base", "HEAD", "--kv-len-jitter", "0.1"], "base must be used without"),
        (["--base", "HEAD", "--arms", "stock,moetail"], "arms must be the one arm of both commits with --base"),
        (["--base", "HEAD", "--arms", "fused"], "arms must be two of"),
    ],
)
def test_bad_input(config, args, says):
    result = CliRunner().invoke(cli.app, ["bench", "forward", "--model", str(config), "--case", "p=16", *args])
    assert result.exit_code == cli.USAGE and says in " ".join(result.output.split()), result.output


def test_a_commit_before_the_worker(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for args in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "old"]):
        subprocess.run([*git, *args], cwd=tmp_path, check=True)
    monkeypatch.setattr(base, "_ROOT", tmp_path)
    with pytest.raises(ValueError, match="base must be a commit with moetail/bench/worker.py, got HEAD"):
        with base.worktree("HEAD"):
            pass


def test_a_worker_that_dies(monkeypatch):
    worker = base.Worker(ROOT)
    worker.process.kill()
    with pytest.raises(RuntimeError, match="died"):
        worker.ask(do="run")
