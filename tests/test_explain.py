"""`moetail explain`: the plan as rows, the facts of real configs, and what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import models
from moetail.cli import explain
from moetail.integrations import layer_facts
from moetail.models import deepseek_v41_facts
from moetail.plan import RoutedScale

ROOT = Path(__file__).resolve().parent.parent


def run(*args):
    return CliRunner().invoke(cli.app, ["explain", *map(str, args)])


def rows(result):
    """(layer, tokens, the rest) of each line of the table."""
    assert result.exit_code == cli.OK, result.output
    lines = result.stdout.splitlines()[1:-1]
    return [tuple(" ".join(line.split()).split(" ", 2)) for line in lines]


def test_deepseek_v41_at_four_ranks():
    result = run("deepseek-v4.1-flash", "--tp", 4, "--pp", 2, "--max-tokens", 4096)
    assert rows(result) == [
        ("0", "0-4096", "here 19.97 us the next layer's Engram reads the finished state"),
        ("1-12", "0-256", "in the next layer 1.25 us the next layer's boundary finalizes"),
        ("1-12", "257-4096", "here 19.97 us more tokens than the next layer's boundary takes"),
        ("13", "0-4096", "here 19.97 us the next layer's Engram reads the finished state"),
        ("14-18", "0-256", "in the next layer 1.25 us the next layer's boundary finalizes"),
        ("14-18", "257-4096", "here 19.97 us more tokens than the next layer's boundary takes"),
        ("19", "0-4096", "here 19.97 us last local layer of the pipeline stage"),
        ("20-38", "0-256", "in the next layer 1.25 us the next layer's boundary finalizes"),
        ("20-38", "257-4096", "here 19.97 us more tokens than the next layer's boundary takes"),
        ("39", "0-4096", "here 19.97 us last layer of the model"),
        ("40", "0-4096", "in the experts - a drafter layer never asks its experts to stop early"),
    ]
    assert "estimate" in result.stdout and "4.2 TB/s" in result.stdout


def test_the_estimate_follows_the_bandwidth():
    # two rows of 5120 bf16 columns for each of 1000 tokens
    (row,) = [r for r in rows(run("deepseek-v4.1-flash", "--max-tokens", 1000, "--tb-per-s", 2)) if r[0] == "1-12"]
    assert row[2].startswith(f"in the next layer {2 * 1000 * 5120 * 2 / 2e6:.2f} us")


def test_shared_experts_as_slots(monkeypatch):
    """A row of their own, which says so and saves no add."""
    facts = deepseek_v41_facts.facts()
    slots = tuple(
        replace(layer, has_shared_experts=False, shared_slots=1) if layer.index in (5, 6, 39) else layer
        for layer in facts.layers
    )
    monkeypatch.setattr(explain, "model_facts", lambda model: replace(facts, layers=slots))
    got = {layer: rest for layer, tokens, rest in rows(run("any", "--max-tokens", 64)) if tokens == "0-64"}
    assert got["5-6"] == "in the next layer - the next layer's boundary finalizes; shared experts as slots: 1"
    assert got["39"] == "here - last layer of the model; shared experts as slots: 1"
    assert got["1-4"].endswith("us the next layer's boundary finalizes") and got["7-12"] == got["1-4"]


def test_deepseek_v41_needs_no_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from moetail.cli import app; app(['explain', 'deepseek-v4.1-flash', '--tp', '4'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "before" not in done.stderr and "Engram" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_without_its_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nimport moetail.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == cli.USAGE and done.stderr.count("\n") == 1
    assert done.stderr.startswith("moetail: ") and "pip install 'moetail[bench]'" in done.stderr


def test_a_config_of_transformers(tmp_path):
    config = models.BUILT_IN["deepseek-v3-mini"] | {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        assert rows(run(name, "--tp", 2, "--max-tokens", 64)) == [
            ("0-1", "no", "experts"),
            ("2-3", "0-64", "here 0.12 us the next layer's boundary takes finished input only"),
            ("4", "0-64", "here 0.12 us last layer of the model"),
        ]


@pytest.mark.parametrize("name", models.BUILT_IN)
def test_built_in_models(name):
    facts = layer_facts.from_config(name, models.load_config(name, ""))
    assert (len(facts.layers), facts.K, facts.H) == (4, 8, models.BUILT_IN[name]["hidden_size"])
    assert all(layer.is_moe and layer.can_stop and layer.has_shared_experts for layer in facts.layers)


def test_families_have_their_own_facts():
    from transformers import AutoConfig

    def layers(model_type, **changes):
        return layer_facts.from_config(model_type, AutoConfig.for_model(model_type, **changes)).layers

    mixtral = layers("mixtral", num_hidden_layers=2)
    assert [layer.has_shared_experts for layer in mixtral] == [False, False]
    sparse = layers("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2)
    assert [layer.is_moe for layer in sparse] == [False, True, False, True]
    llama4 = layers("llama4_text", num_hidden_layers=2)  # weights on the experts' input, in a class of its own
    assert [(layer.is_moe, layer.can_stop) for layer in llama4] == [(True, False), (True, False)]
    double = layers("longcat_flash", num_layers=3)  # two attentions a layer, so num_hidden_layers is 6
    assert [layer.is_moe for layer in double] == [True] * 3
    latent = layers("nemotron_h", moe_latent_size=64)
    assert {layer.routed_scale for layer in latent if layer.is_moe} == {RoutedScale.RUNNER}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere"], "model must be one of glm4-moe-mini"),
        (["deepseek-v4.1-flash", "--tp", 0], "tp must be 1 or more, got 0"),
        (["deepseek-v4.1-flash", "--pp", 4], "pp must cut deepseek-v4.1-flash at layers 1, 2, 8, 14, 20 only, got 4"),
        (["deepseek-v4.1-flash", "--pp", 0], "pp must be from 1 to the 40 layers"),
        (["deepseek-v4.1-flash", "--tp", 7], "tp must divide the experts' 2304 columns, got 7"),
        (["glm4-moe-mini", "--tp", 3], "tp must divide the experts' 512 columns, got 3"),
        (["deepseek-v4.1-flash", "--max-tokens", 0], "max_tokens must be 1 or more, got 0"),
        (["deepseek-v4.1-flash", "--tb-per-s", 0], "tb-per-s must be above 0, got 0.0"),
        (["deepseek-v4.1-flash", "--tb-per-s", "nan"], "tb-per-s must be above 0, got nan"),
    ],
)
def test_bad_arguments_are_one_error(args, says):
    result = run(*args)
    assert result.exit_code == cli.USAGE
    assert result.stderr.startswith(f"moetail: {says}") and result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_model_without_experts_is_refused(tmp_path):
    llama = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    result = run(tmp_path)
    assert result.exit_code == cli.USAGE and "must have Mixture-of-Experts layers" in result.stderr
    (tmp_path / "config.json").write_text("{")
    result = run(tmp_path)
    assert result.exit_code == cli.USAGE
    assert result.stderr.startswith("moetail: model must be a built-in model, a transformers config.json")
