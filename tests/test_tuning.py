"""Config lookup: exact, bucket, heuristic, stale; and that a config is time and never bits."""

import json
import warnings

import pytest
import torch

from moetail import reference, tuning
from moetail.numerics import Numerics
from moetail.testing import assert_same_bits, finalize_inputs
from moetail.tuning import Answer, Key

KEY = Key("finalize", "NVIDIA Test", 6, 5120, "bfloat16", "aaaa", "3.6.0")
SMALL, LARGE = {"block": 512, "warps": 4}, {"block": 2048, "warps": 8}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOETAIL_CONFIGS", str(tmp_path))
    tuning.buckets.cache_clear()
    yield tmp_path
    tuning.buckets.cache_clear()


def write(folder, key=KEY):
    entry = tuning.entry(key, [(1, SMALL), (64, LARGE)], last_T=128)
    (folder / "gpu.json").write_text(json.dumps({"schema": 1, "entries": [entry]}))


@pytest.mark.parametrize(
    ("T", "how", "config"),
    [(1, "exact", SMALL), (2, "bucket", SMALL), (63, "bucket", SMALL), (64, "exact", LARGE), (128, "bucket", LARGE),
     (129, "heuristic", None)],
)  # fmt: skip
def test_lookup(folder, T, how, config):
    write(folder)
    assert tuning.lookup(KEY, T) == Answer(how, None if config is None else tuple(sorted(config.items())))


@pytest.mark.parametrize("field", ["op", "gpu", "K", "H", "dtype"])
def test_another_call_is_not_covered(folder, field):
    write(folder, Key(**{**vars(KEY), field: 8 if field in ("K", "H") else "other"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.lookup(KEY, 1).how == "heuristic"


@pytest.mark.parametrize("field", ["source", "triton"])
def test_a_stale_entry_is_reported_and_not_used(folder, field):
    write(folder, Key(**{**vars(KEY), field: "old"}))
    with pytest.warns(RuntimeWarning, match="stale.*run moetail tune finalize"):
        assert tuning.lookup(KEY, 1).how == "heuristic"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        tuning.lookup(KEY, 1)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2, "entries": []}', '{"schema": 1}'])
def test_a_file_that_is_none_is_an_error(folder, content):
    (folder / "gpu.json").write_text(content)
    with pytest.raises(ValueError, match=r"^config file .*gpu\.json must be"):
        tuning.lookup(KEY, 1)


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
    from moetail.bench import tune

    check_configs("cuda", tune.CANDIDATES, shape)


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
def test_tune_writes_what_lookup_reads(folder):
    from moetail.bench import tune
    from moetail.ops import finalize_triton

    device = torch.device("cuda", 0)
    monkey = tune.TOKENS
    tune.TOKENS = (1, 64)
    try:
        entry = tune.tune_shape(3, 384, device)
    finally:
        tune.TOKENS = monkey
    (folder / "gpu.json").write_text(json.dumps({"schema": 1, "entries": [entry]}))
    key = finalize_triton.tuning_key(device, 3, 384, torch.bfloat16)
    assert [tuning.lookup(key, T).how for T in (1, 2, 64, 100)] == ["exact", "bucket", "exact", "bucket"]
    assert finalize_triton.config_for(device, 64, 3, 384, torch.bfloat16) in finalize_triton.every_config(
        device, 3, 384, torch.bfloat16
    )


@pytest.mark.gpu
def test_the_packaged_configs_are_not_stale():
    from moetail.ops import finalize_triton

    name = torch.cuda.get_device_name()
    for path in tuning.PACKAGED.glob("*.json"):
        for entry in tuning.read(path):
            if entry["gpu"] == name:
                key = finalize_triton.tuning_key(torch.device("cuda", 0), entry["K"], entry["H"], torch.bfloat16)
                assert (entry["source"], entry["triton"]) == (key.source, key.triton)
