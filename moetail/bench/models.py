"""The models a bench can run: four built in (random weights, every layer MoE), a config file, a checkpoint folder, or
any `StepModel` that a `module:function` makes.

Imports transformers (the `transformers` extra) when such a model is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moetail import module_function
from moetail.bench import files
from moetail.bench.step import StepModel

_COMMON = {
    "vocab_size": 4096, "num_hidden_layers": 4, "num_experts_per_tok": 8, "max_position_embeddings": 65536,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_COMMON, "model_type": "deepseek_v3", "n_routed_experts": 64, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip

# Widths of one expert follow published models: I/H 0.25 as Ling-mini-2.0 and Qwen3-Next, 0.28 as DeepSeek-V3, 0.69 as
# Qwen1.5-MoE-A2.7B. Fewer experts and layers, so that they fit a laptop.
BUILT_IN: dict[str, dict[str, Any]] = {
    "glm4-moe-mini": {
        **_COMMON, "model_type": "glm4_moe", "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 512, "n_routed_experts": 64, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    },
    "qwen2-moe-mini": {
        **_COMMON, "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 64,
        "num_attention_heads": 16, "num_key_value_heads": 16, "decoder_sparse_step": 1,
    },
    "deepseek-v3-mini": {
        **_DEEPSEEK_V3, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 576,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
    },
    "deepseek-v3-width": {
        **_DEEPSEEK_V3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    },
}  # fmt: skip


# How torch says that memory does not suffice: CUDA and CPU allocators, and sizes beyond 64 bits.
_NO_MEMORY = re.compile(
    r"tried to allocate (?P<wanted>[\d.]+ \w+)|storage size calculation overflowed|overflow when unpacking",
    re.IGNORECASE,
)


def load(name: str, device: torch.device, text: Path) -> StepModel:
    """The model of `bench forward`.

    `name`: what `load_transformers` takes, with the file `text` as its input tokens; or `module:function`, a factory
    that is called with the device and returns a StepModel.

    Raises: ValueError as `load_transformers`, `read_content` and `input_tokens` do, where the factory cannot be
    imported, and where what it returned lacks a member of StepModel.
    """
    if ":" in name and not Path(name).exists():
        return _from_factory(name, device)
    from moetail.bench.transformers_step import TransformersModel

    content = read_content(text)  # before the model, which may take minutes to load
    model = load_transformers(name, device)
    return TransformersModel(name, model, input_tokens(model, name, content))


@contextlib.contextmanager
def fits_in_memory(what: str) -> Iterator[None]:
    """Raises: ValueError naming `what` and the bytes wanted, where an allocation inside the block failed."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:
        match = _NO_MEMORY.search(str(error))
        if match is None and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        wanted = "" if match is None or match["wanted"] is None else f": an allocation of {match['wanted']} failed"
        raise ValueError(f"{what} does not fit in memory{wanted}") from error


def load_transformers(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    """A causal language model with MoE layers, in eval mode, experts on `grouped_mm`.

    `name`: a built-in model, a config.json (random weights), or a folder with config.json (its weights where it has
    safetensors files, random ones otherwise).

    Raises: ValueError where the name is none of these, the config has no MoE layers, or memory does not suffice.
    """
    from transformers import AutoModelForCausalLM

    path = Path(name)
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    config = load_config(name, "module:function")
    with fits_in_memory(f"model {name}"):
        if has_weights:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, device_map={"": device}, experts_implementation="grouped_mm", local_files_only=True
            )
        else:
            torch.manual_seed(seed)
            with device:
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not any(hasattr(module, "_apply_gate") for module in model.modules()):
        raise ValueError(f"model must have Mixture-of-Experts layers, got {name!r} ({config.model_type}) without any")
    model.set_experts_implementation("grouped_mm")
    return model.eval()


def load_config(name: str, or_else: str) -> Any:
    """The transformers config of a built-in model, a config.json or a folder with one; `or_else`: what else the caller
    takes, for the error.

    Raises: ValueError where the name is none of these.
    """
    from transformers import AutoConfig

    path = Path(name)
    if name in BUILT_IN:
        return AutoConfig.for_model(**BUILT_IN[name])
    if name and path.exists():
        return _read_config(path / "config.json" if path.is_dir() else path)
    raise ValueError(f"model must be one of {', '.join(BUILT_IN)}, a folder, a config.json or {or_else}, got {name!r}")


def read_content(text: Path) -> bytes:
    """Raises: ValueError where the file cannot be read or is empty."""
    content = files.read_bytes("text", text, "a file with content")
    if not content:
        raise files.not_a("text", text, "a file with content", "it is empty")
    return content


def input_tokens(model: Any, name: str, content: bytes) -> torch.Tensor:
    """int64 [n]: the whole text under the model's own tokenizer where the folder has one, its bytes otherwise.

    Raises: ValueError where the vocabulary has fewer than 256 entries.
    """
    if Path(name).is_dir() and any(Path(name).glob("tokenizer*")):
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(name, local_files_only=True)(content.decode(errors="replace"))["input_ids"]
    else:
        ids = list(content)
        vocabulary = model.get_input_embeddings().num_embeddings
        if vocabulary < 256:
            raise ValueError(f"model must have a vocabulary of 256 or more to read bytes, got {vocabulary}")
    return torch.tensor(ids, dtype=torch.int64, device=next(model.parameters()).device)


def _from_factory(name: str, device: torch.device) -> StepModel:
    factory = module_function.load("model", name)
    try:
        inspect.signature(factory).bind(device)
    except TypeError as error:
        what = "model must be a factory that takes the device and returns a StepModel"
        raise ValueError(f"{what}, got {name!r}: TypeError: {error}") from error
    except ValueError:  # a builtin does not say what it takes
        pass
    model = factory(device)
    methods = [member for member, value in vars(StepModel).items() if callable(value) and not member.startswith("_")]
    missing = [m for m in StepModel.__annotations__ if not hasattr(model, m)]
    missing += [m for m in methods if not callable(getattr(model, m, None))]
    if missing:
        raise ValueError(
            f"model must be a StepModel (moetail.bench.step), got {name!r}, whose {type(model).__name__} has no "
            f"{', '.join(missing)}"
        )
    return model


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    what = "a built-in model, a transformers config.json with a known model_type or a folder with one"
    content = files.read_json("model", path, what)
    try:
        if not isinstance(content, dict) or "model_type" not in content:
            raise ValueError("it has no model_type")
        return AutoConfig.for_model(content.pop("model_type"), **content)
    except Exception as error:  # a config class may raise anything at values it does not like
        raise files.not_a("model", path, what, str(error)) from error
