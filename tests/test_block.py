"""bench kernels of what stands before the tail: its arithmetic, its baselines, and that nothing wrong is timed."""

import json

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import block, contenders_block, contenders_fused_experts
from moetail.bench.block import CASES
from moetail.bench.contenders_block import Size

CPU = torch.device("cpu")
TINY = Size(5, 8, 3, 64, 48)


def run(*args):
    return CliRunner().invoke(cli.app, ["bench", "kernels", *map(str, args)])


@pytest.mark.parametrize("op", ["permute", "grouped_gemm", "experts", "fused_experts"])
def test_an_op_is_measured(op, tmp_path):
    out = tmp_path / "k.json"
    result = run("--op", op, "--shape", "5,8,3,64,48", "--device", "cpu", "--rounds", 4, "--json", out)
    assert result.exit_code == cli.OK, result.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == {"permute": 1, "grouped_gemm": 4, "experts": 2, "fused_experts": 1}[op]
    for row in rows:
        assert {"moetail", "control", "copy", "matmul"} < set(row["arms"])
        by_bytes, by_flops = row["bytes"] / row["copy_tb_per_s"], row["flops"] / row["matmul_tflop_per_s"]
        assert row["floor_us"] == pytest.approx(max(by_bytes, by_flops) / 1e6)
        assert row["share_of_floor"] == pytest.approx(row["floor_us"] / row["us"])
        assert row["bound_by"] == ("bytes" if row["share_of_copy"] == row["share_of_floor"] else "flops")
        assert list(row["ratios"]) == {"permute": ["torch sort"], "experts": ["torch grouped_mm", "block 64"]}.get(
            op, ["torch grouped_mm"]
        )
    text = " ".join(result.output.split())
    assert rows[0]["case"] in text and "but the definition in torch" in text
    assert {row["device"] for row in rows} == {"cpu"}


@pytest.mark.parametrize("op", ["route", "moe_block"])
def test_ops_with_a_compiled_baseline(op):
    """Not timed here, which takes a minute: the cases are right, and have their arms."""
    with torch.no_grad():
        case = CASES[op](TINY, CPU, "random", "")
        case.check()
        outputs = [arm[0]() for name, arm in case.arms.items() if name != "inductor"]
    assert (
        set(case.arms)
        == {
            "route": {"moetail", "transformers", "inductor"},
            "moe_block": {"moetail", "moetail in transformers", "transformers", "inductor"},
        }[op]
    )
    assert case.missing == (["vllm topk_softplus_sqrt"] if op == "route" else [])
    if op == "route":
        (weights, ids), (other_weights, other_ids) = outputs
        for row, other in zip(ids.tolist(), other_ids.tolist(), strict=True):
            assert set(row) == set(other)
        assert torch.allclose(weights.sum(1), other_weights.sum(1))
    else:
        assert case.allowed > max(contenders_block._distance(out, outputs[0]) for out in outputs)


def test_bytes_are_the_weights_of_the_experts_that_are_hit():
    case = CASES["experts"](Size(2, 8, 3, 64, 48), CPU, "balanced", "")
    assert case.experts_hit == 6 and case.num_bytes == 6 * 3 * 48 * 64 * 2 and case.flops == 2 * 6 * 3 * 48 * 64
    case = CASES["experts"](Size(50, 8, 3, 64, 48), CPU, "balanced", "")
    assert case.experts_hit == 8
    first = CASES["grouped_gemm"](Size(2, 8, 3, 64, 48), CPU, "balanced", "first")
    assert first.num_bytes == 2 * (6 * 96 * 64 + 2 * 64 + 6 * 48)  # weights, hidden states, rows
    second = CASES["grouped_gemm"](Size(2, 8, 3, 64, 48), CPU, "balanced", "second")
    assert second.num_bytes == 2 * (6 * 64 * 48 + 6 * 48 + 6 * 64)


def test_balanced_sets_hit_other_experts():
    sets = contenders_block._choices(Size(1, 384, 6, 8, 8), "balanced", CPU)
    assert torch.cat(sets).unique().numel() == 6 * contenders_block.SETS
    assert contenders_block._choices(Size(4, 8, 3, 8, 8), "random", CPU)[0].shape == (4, 3)


def test_no_speed_for_wrong_results(monkeypatch):
    real = contenders_block.TritonExperts.__call__

    def wrong(self, hidden, ids, weights):
        out = real(self, hidden, ids, weights)
        out.rows.neg_()
        return out

    monkeypatch.setattr(contenders_block.TritonExperts, "__call__", wrong)
    result = run("--op", "experts", "--shape", "5,8,3,64,48", "--device", "cpu", "--rounds", 4)
    assert result.exit_code == cli.SLOWER and "moetail is off by" in " ".join(result.output.split())
    assert "of floor" not in result.output


@pytest.mark.parametrize(
    ("text", "size"), [("16", Size(16, 384, 6, 5120, 1152)), ("5,8,3,64,48", TINY)], ids=["T", "all"]
)
def test_shapes(text, size):
    assert block.parse("experts", text) == size
    assert block.parse("moe_block", "16").E == 64


@pytest.mark.parametrize(
    "text", ["5,8,3", "0", "x", "5,2,3,64,48", "²", "5,1025,3,64,48", "5,64,33,64,48", "5,8,3,60,48", "5,8,3,64,4"]
)
def test_bad_shapes(text):
    with pytest.raises(ValueError, match=r"^shape must"):
        block.parse("experts", text)


@pytest.mark.parametrize("op", block.DEFAULTS)
def test_sizes_larger_than_memory_are_refused_before_any_is_measured(op, monkeypatch):
    monkeypatch.setattr(block, "run", lambda *_: pytest.fail("measured"))
    result = run("--op", op, "--shape", "8,8,3,64,48", "--shape", "99999999999,1000,3,64,48", "--device", "cpu")
    assert result.exit_code == cli.USAGE, result.exception
    says = f"shape T=99999999999 E=1000 K=3 H=64 I=48 must fit in memory: the least that {op} holds takes "
    assert says in " ".join(result.stderr.split())


def test_the_least_bytes_are_the_weights():
    size = Size(8, 384, 6, 5120, 1152)
    assert block.least_bytes("experts", size) == 384 * 3 * 1152 * 5120 * 2 + 8 * 6 * 5120 * 2
    assert block.least_bytes("permute", size) == 4 * 4 * 8 * 6


def test_the_defaults_begin_with_what_is_asked_first(monkeypatch):
    monkeypatch.setattr(block.memory, "free_bytes", lambda device: 2**40)
    names = list(block.runs("experts", [], CPU, 4))
    assert names[0] == "experts T=8 E=384 K=6 H=5120 I=1152 balanced" and len(names) == 12
    assert [name.split()[1] for name in block.runs("moe_block", [], CPU, 4)][:2] == ["T=8", "T=4096"]


@pytest.mark.gpu
@pytest.mark.parametrize("op", list(block.DEFAULTS))
def test_on_a_gpu(op):
    size = Size(64, 16, 4, 512, 256)
    for measure in block.runs(op, [size], torch.device("cuda", 0), 4).values():
        row = measure()
        assert 0 < row["share_of_floor"] < 1.5 and 0.1 < row["copy_tb_per_s"] < 20 and row["us"] > 0


def test_what_vllm_tunes_is_as_much_as_what_we_tune():
    from moetail.ops.grouped_gemm import BLOCKS
    from moetail.ops.grouped_gemm_triton import candidates

    ours = [len(candidates(block)) for block in BLOCKS]
    assert len(contenders_fused_experts.DECODE) + 1 >= ours[0]
    assert len(contenders_fused_experts.PREFILL) + 1 >= max(ours[1:])


@pytest.mark.gpu
def test_fused_experts_names_what_is_not_installed_or_measures_it():
    import importlib.util

    device = torch.device("cuda")
    with torch.no_grad():
        case = CASES["fused_experts"](Size(8, 16, 4, 256, 128), device, "random", "")
        case.check()
    there = importlib.util.find_spec("vllm") is not None
    assert ("vllm fused_experts" in case.arms) == there and (case.missing == []) == there
