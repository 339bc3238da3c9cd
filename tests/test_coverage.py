"""Coverage: the list is what the ops look up, every call is answered, and the command says what is not covered."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import moetail
from moetail import cli, coverage, plan, tuning
from moetail.models import ExpertsFacts, ModelFacts, deepseek_v41_facts
from moetail.ops import finalize_triton, grouped_gemm_triton, permute_triton, route_triton
from moetail.ops import grouped_gemm as gemm_op
from moetail.ops import permute as permute_op
from moetail.plan import LayerFacts
from moetail.routing import Router
from moetail.tuning import Bucket

FLASH = deepseek_v41_facts.facts()
GPU, TRITON = "NVIDIA Test", "3.6.0"


def run(*args):
    return CliRunner().invoke(cli.app, ["coverage", *map(str, args)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "none")
    tuning.forget()
    yield tmp_path
    tuning.forget()


def write(folder, launches, max_T=None, **changes):
    """A file that measured each tunable launch at its first T and its last, at most max_T; `changes` to its keys."""
    entries = []
    for one in launches:
        if one.tunable:
            key = replace(coverage.key_of(one.shape, GPU, TRITON), **changes)
            last = one.max_T if max_T is None else min(one.max_T, max_T)
            buckets = [(Bucket(one.min_T, last - 1, one.min_T, ()), {}), (Bucket(last, last, last, ()), {})]
            entries.append(tuning.entry(key, buckets))
    (folder / "gpu.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    tuning.forget()


@pytest.mark.parametrize("max_tokens", [1, 682, 683, 8192, 100_000])
def test_every_call_has_one_block(max_tokens):
    for E, K in ((384, 6), (128, 3), (1, 1), (8, 2)):
        ranges = gemm_op.block_ranges(K, E, max_tokens)
        assert ranges[0][1] == 1 and ranges[-1][2] == max_tokens
        assert all(a[2] + 1 == b[1] for a, b in itertools.pairwise(ranges))
        for block, first, last in ranges:
            assert {gemm_op.block_for(T, K, E) for T in (first, (first + last) // 2, last)} == {block}


def test_the_list_is_what_the_kernels_ask_for(monkeypatch):
    """A small model's launches in the interpreter, at every block: the shapes they look up are the list's."""
    kind = ExpertsFacts(E=4, K=2, H=64, I=32, router=Router(2, "sqrtsoftplus", renormalize=True))
    facts = ModelFacts("small", (LayerFacts(0, can_stop=True, has_shared_experts=True),), 2, 64, experts=(kind,))
    asked = set()
    monkeypatch.setattr(tuning, "tuned", lambda kind, device, shape, source, T: asked.add((shape, T)))
    finalize_triton.config_for.cache_clear()
    up, down = torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    tokens = (1, 5, 20, 90)
    for T in tokens:
        hidden, logits = torch.randn(T, 64).bfloat16(), torch.randn(T, 4)
        weights, ids = torch.empty(T, 2), torch.empty(T, 2, dtype=torch.int32)
        route_triton.launch(logits, None, kind.router, weights, ids)
        block = moetail.block_for(T, 2, 4)
        p = permute_op._new(ids, 4, block)
        permute_triton.launch(ids, None, 4, block, *p)
        row_map, source, block_expert = p[:3]
        h, rows = torch.empty(source.numel(), 32).bfloat16(), torch.empty(source.numel(), 64).bfloat16()
        place = (None, source, block_expert, T, 2, block)
        grouped_gemm_triton.launch(hidden, up, *place, True, "swiglu", None, h)
        grouped_gemm_triton.launch(h, down, *place, False, None, None, rows)
        finalize_triton.launch(rows, row_map, weights, hidden, None, None, 1.0, moetail.Numerics.TRTLLM, hidden.clone())
    finalize_triton.config_for.cache_clear()
    launches = coverage.launches(facts, tp=1, max_tokens=100)
    assert all(one.tunable for one in launches) and len(launches) == 1 + 3 * 3 + 1
    assert asked == {(one.shape, T) for one in launches for T in tokens if one.min_T <= T <= one.max_T}


def test_every_tuned_op_has_a_hash_of_its_own():
    launches = [one for one in coverage.launches(FLASH, 2, 64) if one.tunable]
    launches += coverage.launches_of("finalize_norm", (6, 5120), 64) + coverage.launches_of(
        "finalize_mhc", (6, 5120, 4), 64
    )
    hashes = {one.shape.op: coverage.key_of(one.shape, GPU, TRITON).source for one in launches}
    assert len(set(hashes.values())) == len(hashes) == 6


def test_the_plan_knows_every_word():
    assert plan.COVERAGE == tuning.HOW


def test_the_packaged_files_are_of_these_kernels():
    """After an edit of a kernel its entries are dead weight: tune it again, or take them out."""
    for path in tuning.PACKAGED.glob("*.json"):
        for entry in tuning.read(path):
            shape = tuning.shape_of(entry)
            assert entry["source"] == coverage.key_of(shape, entry["gpu"], entry["triton"]).source, (
                f"{path.name}: {shape}"
            )


def test_ranks_split_the_experts():
    gemms = {
        (one.shape["N"], one.shape["Kd"]) for one in coverage.launches(FLASH, 2, 64) if one.shape.op == "grouped_gemm"
    }
    assert gemms == {(2304, 5120), (5120, 1152)}
    with pytest.raises(ValueError, match=r"^tp must divide the experts' 2304 columns, got 5"):
        coverage.launches(FLASH, 5, 64)
    with pytest.raises(ValueError, match=r"^model must have experts"):
        coverage.launches(replace(FLASH, experts=()), 2, 64)


def test_a_covered_model(folder):
    write(folder, coverage.launches(FLASH, 2, 8192))
    result = run("deepseek-v4.1-flash", "--tp", 2, "--max-tokens", 8192, "--gpu", "test")
    assert result.exit_code == cli.OK, result.output
    text = " ".join(result.output.split())
    assert f"on {GPU}, Triton {TRITON}" in text and "heuristic 0.0%, stale 0.0%" in text
    assert (
        "grouped_gemm E=384 K=6 N=2304 Kd=5120 block=16 gather=1 swiglu=1 transposed=0 1-682 bucket measured at 1, 682"
        in text
    )
    assert "one config each, and nothing to tune: finalize_all_reduce, finalize_all_reduce_mhc" in text


@pytest.mark.parametrize(
    ("made", "says", "allow"),
    [({"max_T": 4096}, "4097-8192 heuristic above the largest bucket, 4096", "heuristic"),
     ({"source": "edited"}, "stale gpu.json: tuned with kernel edited", "stale")],
    ids=["above-the-largest-bucket", "after-a-kernel-edit"],
)  # fmt: skip
def test_what_is_not_covered_fails(folder, made, says, allow):
    write(folder, coverage.launches(FLASH, 2, 8192), **made)
    args = ("deepseek-v4.1-flash", "--tp", 2, "--gpu", "test")
    result = run(*args)
    assert result.exit_code == cli.SLOWER and says in " ".join(result.output.split())
    assert run(*args, "--allow", allow).exit_code == cli.OK
    other = {"heuristic": "stale", "stale": "heuristic"}[allow]
    assert run(*args, "--allow", other).exit_code == cli.SLOWER


def test_another_size_is_not_covered(folder):
    write(folder, coverage.launches(FLASH, 2, 8192))
    result = run("deepseek-v4.1-flash", "--tp", 4, "--gpu", "test")
    assert result.exit_code == cli.SLOWER and "this shape was never tuned" in result.output


def test_a_transformers_model(folder):
    from moetail.bench import models
    from moetail.integrations import layer_facts

    facts = layer_facts.from_config("glm4-moe-mini", models.load_config("glm4-moe-mini", ""))
    assert facts.experts == (ExpertsFacts(64, 8, 2048, 512),)
    write(folder, coverage.launches(facts, 1, 300))
    assert run("glm4-moe-mini", "--max-tokens", 300, "--gpu", "test").exit_code == cli.OK


@pytest.mark.parametrize(
    ("args", "says"),
    [(["nothing", "--gpu", "test"], "model must be"), (["deepseek-v4.1-flash"], "gpu must name"),
     (["deepseek-v4.1-flash", "--gpu", "h900"], "gpu must name one GPU of the config files (NVIDIA Test"),
     (["deepseek-v4.1-flash", "--gpu", "test", "--allow", "all"], "allow must be a list of heuristic, stale")],
)  # fmt: skip
def test_bad_input(folder, args, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(folder, coverage.launches(FLASH, 2, 64))
    result = run(*args)
    assert result.exit_code == cli.USAGE and says in " ".join(result.output.split())
