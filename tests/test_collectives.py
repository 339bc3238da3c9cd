"""bench kernels --op finalize_all_reduce: on gloo ranks here, on virtual ranks on a GPU."""

import json

import pytest
import torch
from test_selftest import torchrun
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import collectives
from moetail.bench.ranks import Ranks

ARGS = ("bench", "kernels", "--op", "finalize_all_reduce", "--shape", "3,2,64", "--shape", "5,3,40", "--rounds", "4")


def test_two_gloo_ranks(tmp_path):
    out = tmp_path / "k.json"
    done = torchrun(*ARGS, "--device", "cpu", "--json", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(out.read_text())
    assert content["complete"] and content["world_size"] == 2
    assert [(r["T"], r["mode"], r["world_size"]) for r in content["rows"]] == [(3, "ranks", 2), (5, "ranks", 2)]
    assert set(content["rows"][0]["ratios"]) == {"finalize + gloo", "finalize alone"}
    assert done.stdout.count("finalize + gloo") == 1  # one rank prints


def test_no_speed_for_wrong_bits():
    done = torchrun(*ARGS, "--device", "cpu", WRONG="1")
    assert done.returncode != 0
    assert "moetail TRTLLM has wrong bits and is not timed" in " ".join(done.stderr.split())
    assert "us a call" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("W", [2, 3])
def test_virtual_ranks(W):
    row = collectives.run_shape(16, 6, 1024, torch.device("cuda", 0), Ranks(), W, rounds=4)
    assert set(row["ratios"]) == {"finalize alone", f"finalize on {W} streams"}
    assert row["ratios"]["finalize alone"]["value"] < 1  # the protocol costs something


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "must run under torchrun, or with --ranks W on a GPU"),
        (("--ranks", "2"), "ranks must be given in one process on a GPU"),
        (("--op", "reduce"), "grouped_gemm, experts, fused_experts, moe_block, got 'reduce'"),
    ],
)
def test_bad_input(args, says):
    result = CliRunner().invoke(cli.app, [*ARGS, "--device", "cpu", *args])
    assert result.exit_code == cli.USAGE and says in " ".join(result.output.split())
