"""Config lookup: exact, bucket, heuristic, stale; and that a config is time and never bits."""

import importlib
import json
import warnings
from dataclasses import replace

import pytest
import torch

from moetail import reference, tuning
from moetail.numerics import Numerics
from moetail.testing import assert_same_bits, finalize_inputs
from moetail.tuning import Bucket, Key, Shape

SHAPE = Shape("finalize", (("K", 6), ("H", 5120)))
KEY = Key(SHAPE, "NVIDIA Test", "aaaa", "3.6.0")
SMALL, LARGE = {"block": 512, "warps": 4}, {"block": 2048, "warps": 8}
FIELDS = {
    "op": {"shape": Shape("finalize_norm", SHAPE.dims)},
    "dims": {"shape": Shape("finalize", (("K", 8), ("H", 5120)))},
    "dtype": {"shape": Shape("finalize", SHAPE.dims, "float16")},
    "gpu": {"gpu": "other"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


def write(folder, key=KEY):
    """T 1 to 63 measured at 1, 64 to 128 at 64; then a gap; 256 to 300 at 256."""
    buckets = [
        (Bucket(a, b, T, tuple(config.items())), {})
        for a, b, T, config in ((64, 128, 64, LARGE), (1, 63, 1, SMALL), (256, 300, 256, LARGE))
    ]
    (folder / "gpu.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": [tuning.entry(key, buckets)]}))


@pytest.mark.parametrize(
    ("T", "how", "config", "why"),
    [(1, "exact", SMALL, "measured at 1"), (2, "bucket", SMALL, "measured at 1"),
     (63, "bucket", SMALL, "measured at 1"),
     (64, "exact", LARGE, "measured at 64"), (128, "bucket", LARGE, "measured at 64"),
     (129, "heuristic", None, "not measured here"), (301, "heuristic", None, "above the largest bucket, 300")],
)  # fmt: skip
def test_lookup(folder, T, how, config, why):  # B55, B61
    write(folder)
    answer = tuning.lookup(KEY, T)
    assert (answer.how, answer.why) == (how, why)
    assert answer.config == (None if config is None else tuple(sorted(config.items())))


def test_segments_answer_as_lookup_does(folder):
    write(folder)
    parts = tuning.segments(KEY, 1, 400)
    assert [(p.min_T, p.max_T, p.answer.how) for p in parts] == [
        (1, 1, "exact"), (2, 63, "bucket"), (64, 64, "exact"), (65, 128, "bucket"), (129, 255, "heuristic"),
        (256, 256, "exact"), (257, 300, "bucket"), (301, 400, "heuristic"),
    ]  # fmt: skip
    for part in parts:
        for T in (part.min_T, part.max_T):
            assert tuning.lookup(KEY, T) == part.answer
    (only,) = tuning.segments(KEY, 70, 80)
    assert (only.min_T, only.max_T, only.answer.how) == (70, 80, "bucket")


@pytest.mark.parametrize("other", FIELDS.values(), ids=FIELDS)
def test_another_call_is_not_covered(folder, other):
    write(folder, Key(**{**vars(KEY), **other}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = tuning.lookup(KEY, 1)
    assert (answer.how, answer.why) == ("heuristic", "this shape was never tuned")


@pytest.mark.parametrize("field", ["source", "triton"])
def test_a_stale_entry_is_reported_and_not_used(folder, field):
    write(folder, Key(**{**vars(KEY), field: "old"}))
    says = r"K=6 H=5120 bfloat16 .* stale.*with: moetail tune --stale --out .*gpu\.json$"
    with pytest.warns(RuntimeWarning, match=says):
        answer = tuning.lookup(KEY, 1)
    assert (answer.how, answer.config) == ("stale", None) and "old" in answer.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once, and coverage asks without
        tuning.lookup(KEY, 1)
        assert [p.answer.how for p in tuning.segments(KEY, 1, 900)] == ["stale"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": 1, "entries": []}', '{"schema": 2, "entries": {}}', '{"schema": 2}']
)
def test_a_file_that_is_none_is_an_error(folder, content):
    (folder / "gpu.json").write_text(content)
    with pytest.raises(ValueError, match=r"^config file .*gpu\.json must be"):
        tuning.lookup(KEY, 1)


BROKEN = {
    "no-gpu": (lambda e: e.pop("gpu"), "entry 1 must have gpu of type str, got no such field"),
    "dims-a-list": (lambda e: e.update(dims=[6]), r"entry 1 must have dims of type dict, got \[6\]"),
    "no-config": (
        lambda e: e["buckets"][2].pop("config"),
        r"entry 1 \(finalize K=6 H=5120 on NVIDIA Test\): bucket 2 must have config of type dict, got no such field",
    ),
    "T-a-string": (lambda e: e["buckets"][0].update(max_T="9"), "bucket 0 must have max_T of type int, got '9'"),
}


@pytest.mark.parametrize(("damage", "says"), BROKEN.values(), ids=BROKEN)
def test_an_entry_that_is_not_whole_is_named(folder, damage, says):
    write(folder)
    content = json.loads((folder / "gpu.json").read_text())
    content["entries"].append(json.loads(json.dumps(content["entries"][0])))
    damage(content["entries"][1])
    (folder / "gpu.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^config file .*gpu\.json: .*{says}"):
        tuning.read(folder / "gpu.json")


def test_a_gpu_is_named_by_a_part_of_its_name(folder):
    write(folder)
    assert tuning.gpu_named("test") == ("NVIDIA Test", "3.6.0")
    content = json.loads((folder / "gpu.json").read_text())
    (folder / "new.json").write_text(json.dumps({**content, "entries": [{**content["entries"][0], "triton": "3.9.0"}]}))
    assert tuning.gpu_named("test, Triton 3.6") == ("NVIDIA Test", "3.6.0")
    with pytest.raises(ValueError, match=r"NVIDIA Test, Triton 3\.6\.0; NVIDIA Test, Triton 3\.9\.0\), got 'test'"):
        tuning.gpu_named("test")
    with pytest.raises(ValueError, match=r"^gpu must name one GPU of the config files \(.*NVIDIA Test.*\), got 'h900'"):
        tuning.gpu_named("h900")


def test_ranks_that_read_other_files_are_told(folder, monkeypatch):  # B60
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: KEY.gpu)
    gpu = torch.device("cuda", 0)
    nothing = tuning.digest(gpu)
    write(folder)
    ours = tuning.digest(gpu)
    write(folder, Key(**{**vars(KEY), "gpu": "other"}))
    assert tuning.digest(gpu) == nothing != ours  # another GPU's entries are not read
    assert tuning.digest(torch.device("cpu")) == ""
    tuning.check_ranks([ours, ours])
    with pytest.raises(ValueError, match=rf"^configs must be the same on every rank .*'{ours}' on rank 0.*on rank 2"):
        tuning.check_ranks([ours, ours, nothing])


def test_a_kernel_edit_changes_the_hash():
    def before(x):
        return x + 1

    first = tuning.source_hash(before)

    def before(x):
        return x + 2

    assert tuning.source_hash(before) != first


def test_a_launch_gets_the_tuned_config_and_compiles_it(folder, monkeypatch):
    """From the file's JSON to each op's config class, for a CUDA device that need not be there."""
    from moetail import coverage
    from moetail.ops import (
        epilogue_triton,
        finalize_mhc_triton,
        finalize_norm_triton,
        finalize_triton,
        grouped_gemm_triton,
        permute_triton,
        route_triton,
    )
    from moetail.routing import Router

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: KEY.gpu)
    gpu, bf16 = torch.device("cuda", 0), torch.bfloat16
    row, gemm = epilogue_triton.RowConfig(32), grouped_gemm_triton.CANDIDATES[5]
    wanted = [
        (finalize_triton, (3, 777, bf16), finalize_triton.FinalizeConfig(64, 2, True)),
        (finalize_norm_triton, (3, 777, bf16), row),
        (finalize_mhc_triton, (3, 777, bf16, 4), row),
        (grouped_gemm_triton, (4, 2, 64, 64, 16, True, True), gemm),
        (permute_triton, (4, 2, 16), permute_triton.PermuteConfig(2, 32)),
        (route_triton, (4, Router(2, "sigmoid"), bf16), route_triton.RouteConfig(4)),
    ]
    entries = []
    for module, facts, config in wanted:
        key = coverage.key_of(module.tuned_shape(*facts), KEY.gpu, tuning.triton_version())
        entries.append(tuning.entry(key, [(Bucket(5, 9, 5, tuple(tuning.as_dict(config).items())), {})]))
    (folder / "gpu.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    tuning.forget()
    for module, facts, config in wanted:
        shape = module.tuned_shape(*facts)
        assert tuning.tuned(type(config), gpu, shape, module.kernel_hash(), 9) == config
        assert tuning.tuned(type(config), gpu, shape, module.kernel_hash(), 10) is None
        assert tuning.tuned(type(config), torch.device("cpu"), shape, module.kernel_hash(), 9) is None
        assert tuning.every_tuned(type(config), gpu, shape, module.kernel_hash()) == (config,)
        if hasattr(module, "config_for"):
            assert module.config_for(gpu, 9, *facts) == config != module.config_for(gpu, 10, *facts)
            assert config in module.every_config(gpu, *facts)


@pytest.mark.parametrize("op", ["finalize", "finalize_mhc", "finalize_norm"])
def test_a_new_file_is_seen_after_forget(folder, monkeypatch, op):
    """By what a launch asks, which has a cache of its own in front of the lookup."""
    from moetail import coverage

    module = importlib.import_module(f"moetail.ops.{op}_triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: KEY.gpu)
    gpu, facts = torch.device("cuda", 0), (3, 777, torch.bfloat16, *([4] if op == "finalize_mhc" else []))
    guess = module.config_for(gpu, 9, *facts)
    config = replace(guess, warps=32)
    key = coverage.key_of(module.tuned_shape(*facts), KEY.gpu, tuning.triton_version())
    entry = tuning.entry(key, [(Bucket(9, 9, 9, tuple(tuning.as_dict(config).items())), {})])
    (folder / "gpu.json").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": [entry]}))
    assert module.config_for(gpu, 9, *facts) == guess != config
    tuning.forget()
    assert module.config_for(gpu, 9, *facts) == config


def test_the_heuristic_answers_everywhere():
    from moetail.ops import finalize_triton

    for H in (1, 96, 2048, 5120, 7168):
        for size in (2, 4):
            for T in (1, 2, 17, 256, 4096, 100_000, 10**7):
                config = finalize_triton.heuristic(T, H, size)
                assert config.block & (config.block - 1) == 0 and 32 * config.warps >= 32
                assert config.block < 2 * max(H, 2)


@pytest.mark.parametrize("block", [64, 128, 1024])
def test_a_config_changes_no_bit_in_the_interpreter(block):
    from moetail.ops.finalize_triton import FinalizeConfig

    check_configs("cpu", [FinalizeConfig(block, 1), FinalizeConfig(block, 4, columns_first=True)], (3, 6, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 6, 5120), (5, 10, 2048), (64, 8, 1000)], ids=str)
def test_a_config_changes_no_bit(shape):  # S7
    from moetail.bench import tune_ops

    check_configs("cuda", tune_ops.FINALIZE, shape)


def check_configs(device, configs, shape):
    from moetail.ops import finalize_triton

    x = finalize_inputs(*shape, absent=0.1, device=device)
    for numerics in (Numerics.TRTLLM, Numerics.TRANSFORMERS, Numerics.FLASHINFER):
        n = numerics.resolve(*shape, "cuda", torch.bfloat16, torch.float32)
        want = reference.finalize(x.rows, x.row_map, x.weights, x.shared, numerics=n)
        for config in configs:
            out = torch.full_like(x.shared, float("nan"))
            finalize_triton.launch(x.rows, x.row_map, x.weights, x.shared, None, None, 1.0, n, out, config)
            assert_same_bits(out, want)


@pytest.mark.gpu
def test_the_packaged_configs_are_not_stale():
    from moetail import coverage

    name = torch.cuda.get_device_name()
    for path in tuning.PACKAGED.glob("*.json"):
        for entry in tuning.read(path):
            if entry["gpu"] == name:
                key = coverage.key_of(tuning.shape_of(entry), name, tuning.triton_version())
                assert (entry["source"], entry["triton"]) == (key.source, key.triton), key.shape


def test_a_folder_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="MOETAIL_CONFIGS must be a folder, got "):
        tuning.config_files()
