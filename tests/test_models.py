"""Which model a name means, and the one sentence where it means none."""

import json

import pytest
import torch

from moetail.bench import models

CPU = torch.device("cpu")
TINY = models.BUILT_IN["glm4-moe-mini"] | {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip

FACTORIES = """
import torch

class Whole:
    name, arms = "whole", ("a", "b")
    def __init__(self, device): self.device = device
    def use(self, arm): ...
    def check(self, case): ...
    def build(self, case, routing): ...
    def tails(self, step): return None

class Partial:
    name, arms, build = "partial", ("a", "b"), None
    def __init__(self, device): pass
    def use(self, arm): ...
    def check(self, case): ...

number = 3
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox")
    return path


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "some_factories.py").write_text(FACTORIES)
    (tmp_path / "broken_factories.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_config_is_a_transformers_model_with_the_bytes_of_the_text(config, text):
    model = models.load(str(config), CPU, text)
    assert (model.name, model.arms, model.device) == (str(config), ("stock", "moetail"), CPU)
    assert model.tokens.tolist() == list(text.read_bytes())


def test_a_checkpoint_folder_keeps_its_weights(config, tmp_path):
    model, tokens = models.load_transformers(str(config), CPU), torch.arange(20)[None]
    model.save_pretrained(tmp_path / "checkpoint")
    again = models.load_transformers(str(tmp_path / "checkpoint"), CPU, seed=1)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_a_factory_is_called_with_the_device(factories, text):
    model = models.load("some_factories:Whole", CPU, text)
    assert model.name == "whole" and model.device is CPU


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "model must be one of glm4-moe-mini.*module:function, got 'nothing'"),
        ("no_such_module:make", "got 'no_such_module:make': there is no module no_such_module"),
        ("broken_factories:make", "importing broken_factories raised ZeroDivisionError: division by zero"),
        ("some_factories:make", "some_factories has no make"),
        (":make", "module:function"),
        ("some_factories:number", "'some_factories:number', of type int"),
        ("some_factories:Partial", "must be a StepModel .*whose Partial has no device, build, tails"),
    ],
)
def test_names_that_mean_no_model(factories, text, name, says):
    with pytest.raises(ValueError, match=says):
        models.load(name, CPU, text)


def test_a_model_larger_than_memory_is_one_sentence(config):
    config.write_text(json.dumps(TINY | {"vocab_size": 2**44}))
    with pytest.raises(
        ValueError, match=f"model {config} does not fit in memory: an allocation of {2**51} bytes failed"
    ):
        models.load_transformers(str(config), CPU)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "case a does not fit in "
         "memory: an allocation of 2.50 GiB failed"),
        (torch.OutOfMemoryError("of another kind"), "case a does not fit in memory"),
        (MemoryError(), "case a does not fit in memory"),
        (RuntimeError("Storage size calculation overflowed with sizes=[1]"), "case a does not fit in memory"),
    ],
)  # fmt: skip
def test_what_says_that_memory_does_not_suffice(error, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        with models.fits_in_memory("case a"):
            raise error


def test_other_errors_stay_what_they_are():
    for error in (RuntimeError("shape mismatch"), TypeError("no"), ValueError("case must")):
        with pytest.raises(type(error)) as seen:
            with models.fits_in_memory("case a"):
                raise error
        assert seen.value is error


@pytest.mark.gpu
def test_a_model_larger_than_the_gpu_is_one_sentence(config):
    config.write_text(json.dumps(TINY | {"vocab_size": 2**40}))
    with pytest.raises(ValueError, match="does not fit in memory: an allocation of [0-9.]+ GiB failed"):
        models.load_transformers(str(config), torch.device("cuda"))
