"""bench kernels, its contenders, the ceiling, and what the commands print and refuse."""

import json

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import ceiling, contenders, kernels
from moetail.bench.contenders_finalize import OP as FINALIZE
from moetail.numerics import Numerics
from moetail.ops import finalize as op

CPU = torch.device("cpu")


def run(*args):
    return CliRunner().invoke(cli.app, [*map(str, args)])


def test_a_shape_is_measured(tmp_path):
    out, svg = tmp_path / "k.json", tmp_path / "k.svg"
    shapes = ("--shape", "9,6,64", "--shape", "3,17,64")
    result = run("bench", "kernels", *shapes, "--device", "cpu", "--l2", "warm", "--rounds", 4, "--json", out,
                 "--svg", svg)  # fmt: skip
    assert result.exit_code == cli.OK, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(r["T"], r["device"]) for r in rows] == [(9, "cpu"), (3, "cpu")]
    first = rows[0]
    # K rows, shared and out of 64 bf16 columns; a map of int32 and weights of fp32
    assert first["bytes"] == 9 * (6 + 2) * 64 * 2 + 9 * 6 * (4 + 4)
    assert first["arms"]["moetail TRTLLM"]["bits"] == "TRTLLM"
    assert first["arms"]["torch eager"]["bits"] == "TRANSFORMERS"
    assert set(first["ratios"]) == {"torch eager", "inductor"}
    assert "vllm moe_sum + add" in first["not_installed"] and "sgl moe_sum_reduce + add" in first["not_installed"]
    assert "moetail TRANSFORMERS" not in rows[1]["arms"]  # K 17: no bits to be compared with
    assert b"<svg" in svg.read_bytes()
    assert result.output.count("inductor") >= 1


def test_finalize_norm_is_measured(tmp_path):
    out = tmp_path / "k.json"
    args = ("--op", "finalize_norm", "--shape", "9,6,64", "--device", "cpu", "--l2", "warm", "--rounds", 4)
    result = run("bench", "kernels", *args, "--json", out)
    assert result.exit_code == cli.OK, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["op"] == "finalize_norm" and row["arms"]["moetail TRTLLM"]["bits"] == "TRTLLM"
    assert row["bytes"] == 9 * (6 + 4) * 64 * 2 + 9 * 6 * (4 + 4)  # the residual is read and written besides
    part = row["arms"]["finalize alone"]["median_us"]
    assert row["over_part_us"] == row["arms"]["moetail TRTLLM"]["median_us"] - part
    assert "over its first part" in result.output
    assert set(row["ratios"]) == {
        "finalize alone", "finalize, then torch add and norm", "torch eager",
        "finalize, then inductor's add and norm", "inductor",
    }  # fmt: skip


def test_finalize_mhc_is_measured(tmp_path):
    out = tmp_path / "k.json"
    args = ("--op", "finalize_mhc", "--shape", "9,6,64", "--device", "cpu", "--l2", "warm", "--rounds", 4)
    result = run("bench", "kernels", *args, "--json", out)
    assert result.exit_code == cli.OK, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["op"] == "finalize_mhc" and row["arms"]["moetail TRTLLM"]["bits"] == "TRTLLM"
    assert row["bytes"] == 9 * (6 + 2 + 8) * 64 * 2 + 9 * 6 * (4 + 4)  # four streams are read and written besides
    assert len(row["ratios"]) == 5


def test_the_quantized_op_is_measured(tmp_path):
    out = tmp_path / "k.json"
    args = ("--op", "finalize_norm_fp8", "--shape", "9,6,128", "--device", "cpu", "--l2", "warm", "--rounds", 4)
    result = run("bench", "kernels", *args, "--json", out)
    assert result.exit_code == cli.OK, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["arms"]["moetail TRTLLM"]["bits"] == row["arms"]["finalize_norm alone"]["bits"] == "TRTLLM"
    assert row["over_part_us"] is not None and len(row["ratios"]) == 3
    assert row["not_installed"] == ["finalize_norm, then vllm per_token_group_fp8_quant"]


def test_the_baselines_compute_what_we_do():
    """A baseline that did less would be none. By their RMS: Inductor leaves out the roundings between, up to 0.4 %."""
    for case in (kernels.OPS["finalize_norm"], kernels.OPS["finalize_mhc"]):
        x = case.inputs(5, 4, 128, CPU)
        want = case.reference(x, Numerics.TRTLLM).float()
        for contender in case.contenders()[0]:
            if contender.name not in kernels.PARTS:
                off = (contender.bind(x)().float() - want).norm() / want.norm()
                assert off < 0.01, f"{contender.name}: {off}"


def test_no_speed_for_wrong_bits(monkeypatch):
    real = op._op_out
    monkeypatch.setattr(op, "_op_out", lambda *args: (real(*args), args[-1].view(torch.int16).bitwise_xor_(1)))
    result = run("bench", "kernels", "--shape", "4,2,32", "--device", "cpu", "--l2", "warm")
    assert result.exit_code == cli.SLOWER
    assert "moetail TRTLLM has wrong bits and is not timed" in " ".join(result.output.split())
    assert "B/s" not in result.output


def test_an_interrupted_run_is_partial_and_goes_on(tmp_path, monkeypatch):
    out = tmp_path / "k.json"
    args = ("bench", "kernels", "--shape", "2,2,32", "--shape", "3,2,32", "--device", "cpu", "--l2", "2", "--json", out)
    real, measured = kernels.run_shape, []

    def once(*shape):
        if measured:
            raise KeyboardInterrupt
        measured.append(shape[0])
        return real(*shape)

    monkeypatch.setattr(kernels, "run_shape", once)
    result = run(*args, "--rounds", 4)
    assert result.exit_code == cli.INTERRUPTED and "--resume" in result.output
    content = json.loads(out.read_text())
    assert content["complete"] is False and [r["T"] for r in content["rows"]] == [2] and content["rows"][0]["sets"] == 2

    monkeypatch.setattr(kernels, "run_shape", lambda *shape: measured.append(shape[0]) or real(*shape))
    result = run(*args, "--rounds", 5, "--resume")
    assert result.exit_code == cli.USAGE and "settings was" in " ".join(result.output.split())
    assert run(*args, "--rounds", 4, "--resume").exit_code == cli.OK
    assert measured == [2, 3]  # the first shape was not measured again
    content = json.loads(out.read_text())
    assert content["complete"] and [r["T"] for r in content["rows"]] == [2, 3]
    result = run(*args, "--rounds", 4, "--resume")
    assert result.exit_code == cli.USAGE and "got the complete" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--shape", "4,2,8", "--resume"], "got no --json"),
        (["--shape", "4,2"], "shape must be T,K,H"),
        (["--shape", "4,2,x"], "shape must be T,K,H"),
        (["--shape", "4,2,8", "--mode", "producer"], "mode must be one of chained, producer"),
        (["--shape", "4,2,8", "--mode", "fast"], "mode must be one of"),
        (["--shape", "4,2,8", "--l2", "tepid"], "l2 must be one of cold, warm"),
        (["--shape", "4,2,8", "--l2", "2049"], "or a number of sets from 1 to 2048, got '2049'"),
        (["--shape", "4,2,8", "--l2", "²"], "l2 must be one of cold, warm"),
        (["--shape", "²,2,8"], "shape must be T,K,H"),
        (["--shape", "4,2,8", "--l2", "2,"], "l2 must be one of cold, warm or a number of sets from 1 to 2048, got ''"),
        (["--shape", "4,2,8", "--mode", "chained,"], "mode must be one of"),
        (["--shape", "4,2,8", "--shape", "4,65,8"], "shape must have K <= 64 slots, got K=65"),
        (["--op", "finalise"], "op must be one of finalize, "),
        (["--shape", "4,2,8", "--ranks", "2"], "ranks must be left out with --op finalize, got 2"),
        (["--op", "permute", "--shape", "4", "--mode", "producer"], "mode must be left out with --op permute"),
        (["--op", "permute", "--shape", "4", "--l2", "warm"], "l2 must be left out with --op permute"),
        (["--op", "route", "--shape", "4", "--svg", "x.svg"], "svg must be left out with --op route"),
        (["--shape", "4,2,8", "--mode", "producer", "--svg", "x.svg"], "svg must be left out where no mode is chained"),
        (["--device", "gpu"], "device must be cpu"),
        (["--device", "cpu:1"], "device must be cpu"),
    ],
)
def test_bad_input(args, says, monkeypatch):
    """Before anything is measured, also what the last of several shapes, modes or L2 states has."""
    monkeypatch.setattr(kernels, "run_shape", lambda *_: pytest.fail("measured"))
    result = run("bench", "kernels", "--device", "cpu", *args)
    assert result.exit_code == cli.USAGE
    assert says in " ".join(result.output.split())


@pytest.mark.parametrize("shape", ["9999999999999,2,64", "99999999999999999999,2,64"])
def test_a_shape_larger_than_memory_is_one_sentence(shape):
    result = run("bench", "kernels", "--device", "cpu", "--shape", shape)
    assert result.exit_code == cli.USAGE, result.exception
    assert f"shape {shape} must fit in memory: one set of its expert rows takes " in " ".join(result.stderr.split())


def test_an_allocation_that_fails_is_one_sentence(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    monkeypatch.setattr(kernels, "run_shape", full)
    result = run("bench", "kernels", "--device", "cpu", "--shape", "4,2,8")
    assert result.exit_code == cli.USAGE, result.exception
    assert "shape T,K,H=(4, 2, 8) chained cold does not fit in memory: an allocation of 2.50 GiB failed" in (
        " ".join(result.stderr.split())
    )


@pytest.mark.parametrize(
    ("num_bytes", "l2", "sets"),
    [(10, "cold", 30), (10, "warm", 2), (1, "warm", 8), (25, "warm", 1), (26, "warm", 12), (1000, "cold", 2)],
)
def test_rotation(num_bytes, l2, sets):
    assert kernels._num_sets(num_bytes, 100, l2) == sets


def test_contenders_have_the_bits_they_claim():
    x = contenders.KernelInputs.random(12, 5, 96, CPU)
    found, missing = FINALIZE.contenders()
    assert kernels._bits(FINALIZE, next(c for c in found if c.name == "torch eager"), x) == "TRANSFORMERS"
    for numerics in (Numerics.TRTLLM, Numerics.PREWEIGHTED, Numerics.TRANSFORMERS):
        assert kernels._bits(FINALIZE, FINALIZE.ours(numerics), x) == numerics.name
    wrong = contenders.Contender("theirs", Numerics.TRTLLM, lambda x: lambda: x.shared)
    assert kernels._bits(FINALIZE, wrong, x) == "differs"
    assert missing


@pytest.mark.gpu
@pytest.mark.parametrize("mode", kernels.MODES)
def test_on_a_gpu(mode):
    result = kernels.run_shape(64, 6, 1024, torch.device("cuda"), mode, rounds=4)
    row = result.row()
    assert (row["tb_per_s"] is None) if mode == "producer" else (0.1 < row["tb_per_s"] < 4.9)
    assert ("edges alone" in row["arms"]) == (mode == "producer")
    if mode == "producer":
        assert result.median_us("edges alone") < result.median_us("moetail TRTLLM")


def test_ceiling_is_arithmetic():
    c = ceiling.Ceiling(separate_us=10.0, fused_us=4.0, layers=40, step_us=7349.0)
    assert c.gain_us == 240.0 and c.gain == pytest.approx(240 / 7349)
    assert c.allows(0.03) and not c.allows(0.05)
    # the seed's decode step: finalize and adds were 2.6 % of it, fused 1.2 %: 2.1 % cannot be
    seed = ceiling.Ceiling(separate_us=0.026 * 7349 / 40, fused_us=0.012 * 7349 / 40, layers=40, step_us=7349.0)
    assert seed.gain == pytest.approx(0.014) and not seed.allows(0.021)
    slower = ceiling.Ceiling(5.0, 6.0, 4, 1000.0)
    assert slower.gain < 0 and slower.allows(0.0) and not slower.allows(0.001)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--step-ms nan --shape 1,2,3", "step-ms must be a number above 0, got nan"),
        ("--step-ms inf --shape 1,2,3", "step-ms must be a number above 0, got inf"),
        ("--step-ms 5 --shape 1,2,3 --tb-per-s 0", "tb-per-s must be a number above 0, got 0.0"),
        ("--step-ms 5 --separate-us inf --fused-us 3", "separate-us must be a number above 0, got inf"),
        ("--step-ms 5 --separate-us 5 --fused-us -1", "fused-us must be a number above 0, got -1.0"),
        ("--step-ms 5 --fused-us 3", "or --shape, got --fused-us"),
        ("--step-ms 5", "or --shape, got none of them"),
        ("--step-ms 5 --shape 1,2", "shape must be T,K,H"),
        ("--step-ms 0.001 --shape 4096,8,7168", "step_us must be at least the tails alone"),
    ],
)
def test_bad_ceilings(args, says):
    result = run("ceiling", "--layers", 3, *args.split())
    assert result.exit_code == cli.USAGE and says in result.stderr


def test_ceiling_from_bytes():
    c = ceiling.from_bytes(4096, 6, 5120, 4.0, layers=40, step_us=62190.0)
    assert c.separate_us / c.fused_us == pytest.approx(1.25)  # (K + 4) / (K + 2)
    assert c.fused_us == pytest.approx(8 * 4096 * 5120 * 2 / 4e6)


@pytest.mark.parametrize("field", ["separate_us", "fused_us", "layers", "step_us"])
def test_ceiling_refuses(field):
    with pytest.raises(ValueError, match=f"^{field} must"):
        ceiling.Ceiling(**{"separate_us": 2.0, "fused_us": 1.0, "layers": 2, "step_us": 100.0, field: 0})
    with pytest.raises(ValueError, match="^step_us must be at least"):
        ceiling.Ceiling(50.0, 1.0, 4, 100.0)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--separate-us", 10, "--fused-us", 4], cli.OK, "240.0 us of a step of 7.349 ms: at most 3.27% less time"),
        (["--shape", "8,6,5120"], cli.OK, "less time"),
        (["--shape", "8,6,5120", "--fused-us", 4], cli.USAGE, "either"),
        ([], cli.USAGE, "either"),
        (["--shape", "8,6,5120", "--tb-per-s", 0], cli.USAGE, "tb-per-s must be a number above 0"),
    ],
)
def test_ceiling_command(args, code, says):
    result = run("ceiling", "--layers", 40, "--step-ms", 7.349, *args)
    assert result.exit_code == code, result.output
    assert says in " ".join(result.output.split())
