"""bench serve without vLLM: what a profile of interleaved runs says, and what is compared."""

import json
import types

import pytest
from typer.testing import CliRunner

from moetail.bench import engines, serve, serve_models
from moetail.bench.profile import Activity
from moetail.bench.ranks import Ranks
from moetail.bench.serve import Case, parse_case, segments
from moetail.cli import app

MS = 1_000_000


def kernel(start_ms, ms, name="k"):
    return Activity(name, int(start_ms * MS), int((start_ms + ms) * MS), int(ms * MS))


def test_cases():
    assert parse_case("decode=8") == Case("decode8", 8, True)
    assert parse_case("prefill=2048").steps == 1
    for text in ("decode", "decode=0", "decode=x", "mix=3"):
        with pytest.raises(ValueError, match="case must be decode=BATCH or prefill=TOKENS"):
            parse_case(text)


def test_runs_are_told_apart_by_pauses():
    one = [kernel(0, 2), kernel(1, 30), kernel(40, 1)]  # 9 ms of host between the last two, and one inside another
    two = [kernel(100, 1)]
    assert segments(two + one, 2) == [one, two]
    with pytest.raises(RuntimeError, match="must show 3 runs, got 2"):
        segments(one + two, 3)
    with pytest.raises(RuntimeError, match="must show 1 runs, got 0"):
        segments([], 1)


def fake(arm, said):
    return types.SimpleNamespace(arm=arm, tokens=said)


def row(stock_ms, ours_ms, said=((1, 0.0),), profile_dir=None):
    """Of a prefill whose runs take these milliseconds, eight rounds."""
    pair = fake("stock", {"p": [(1, 0.0)]}), fake("moetail", {"p": list(said)})
    runs, walls = [], {label: [] for label in serve._LABELS}
    for i in range(16):
        for label, engine in serve._LABELS.items():
            ms = (stock_ms, ours_ms)[engine] * (1 + i % 3 / 1000)
            runs.append((label, [kernel(0, ms, "moe_sum"), kernel(ms / 2, ms / 2, "overlapped")]))
            walls[label].append(ms + 1)
    return serve._row(pair, Case("prefill9", 9, False), 8, Ranks(), profile_dir, runs, walls)


def test_the_row_of_a_case(tmp_path):
    found = row(2.0, 1.8, profile_dir=tmp_path)
    assert found["verdict"] == "faster" and found["ratio"]["b_over_a"] == pytest.approx(0.9)
    assert found["arms"]["stock"]["median_us"] == pytest.approx(2002)  # overlapping kernels count once
    assert found["kernels"][0]["name"] == "moe_sum"
    assert found["kernels"][0]["moetail_us"] - found["kernels"][0]["stock_us"] == pytest.approx(-200, rel=0.01)
    assert json.loads((tmp_path / "prefill9.stock.rank0.kernels.json").read_text())["activities"] == 2
    assert row(2.0, 2.0)["verdict"] == "same"
    assert row(2.0, 2.1)["verdict"] == "slower"
    assert len(json.dumps(found)) > 0


@pytest.mark.parametrize("said", [[(2, 0.0)], [(1, 0.5)], [(1, 0.0), (1, 0.0)], []])
def test_another_token_or_log_probability_counts_for_more_than_speed(said):
    found = row(2.0, 1.0, said)
    assert found["verdict"] == "slower" and found["differing_bits"] == 1


def test_a_request_that_only_one_engine_answered_differs():
    assert engines.differing(fake("a", {"x": [(1, 0.0)]}), fake("b", {})) == 1


def test_configs(tmp_path):
    for name in serve_models.SHAPES:
        config = json.loads((serve_models.folder(name, tmp_path, 4, "fp8-block") / "config.json").read_text())
        assert config["num_hidden_layers"] == 4 and config["quantization_config"]["weight_block_size"] == [128, 128]
        assert config["intermediate_size"] % 128 == 0
    own = serve_models.folder("glm4-moe", tmp_path)
    assert serve_models.folder(str(own), tmp_path) == own
    for args, message in (
        (("gpt", tmp_path), "model must be"),
        (("glm4-moe", tmp_path, 1), "layers must be 2 or more"),
        (("glm4-moe", tmp_path, 4, "int4"), "quant must be fp8-block"),
    ):
        with pytest.raises(ValueError, match=message):
            serve_models.folder(*args)


def test_bad_input_is_one_sentence():
    for args, message in ((["--case", "mix=1"], "case must be"), (["--fail-if", "bad"], "fail-if must be"),
                          (["--extra", "{"], "extra must be a JSON object of arguments of vllm.LLM, got '{': "),
                          (["--extra", "[1]"], "moetail: extra must be a JSON object")):  # fmt: skip
        done = CliRunner().invoke(app, ["bench", "serve", *args])
        assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("said", "says"),
    [([], r"^model must have MoE layers .*, got 'mine' without any"),
     (["a: stock (its runner is MoERunner)"], r"^vLLM must have loaded the plugin .*, got \['a: stock")],
    ids=["no-moe-layers", "no-plugin"],
)  # fmt: skip
def test_an_engine_without_a_layer_of_ours_is_refused(said, says):
    with pytest.raises(ValueError, match=says):
        serve.check_layers(said, "mine")
    serve.check_layers([*said, "b: reduction without the copy"], "mine")
