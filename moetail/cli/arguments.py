"""From the text of an argument to its value. Raises: ValueError naming the argument."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moetail.models import ModelFacts


def parse_shape(text: str) -> tuple[int, int, int]:
    T, K, H = numbers("shape", text, "T,K,H")
    return T, K, H


def numbers(name: str, text: str, form: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != len(form.split(",")) or not all(n.strip().isdecimal() and int(n) > 0 for n in parts):
        raise ValueError(f"{name} must be {form}, numbers above 0, got {text!r}")
    return tuple(map(int, parts))


def parse_device(text: str | None) -> torch.device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text is None:
        return torch.device("cuda" if count else "cpu")
    known = ("cpu", *("cuda",)[:count], *(f"cuda:{i}" for i in range(count)))
    if text not in known:
        why = "here" if count else "here, where torch finds no CUDA GPU"
        raise ValueError(f"device must be {' or '.join(known)} {why}, got {text!r}")
    return torch.device(text)


def parse_verdicts(text: str) -> frozenset[str]:
    from moetail.bench.stats import VERDICTS

    words = frozenset(word for word in text.split(",") if word)
    if not words <= set(VERDICTS):
        raise ValueError(f"fail-if must be a list of {', '.join(VERDICTS)}, got {text!r}")
    return words


def model_facts(model: str) -> ModelFacts:
    """What is known of deepseek-v4.1-flash, a built-in model, a config.json or a folder with one.

    Raises: ValueError, ModuleNotFoundError.
    """
    from moetail.models import deepseek_v41_facts

    if model == deepseek_v41_facts.NAME:
        return deepseek_v41_facts.facts()
    from moetail.bench import models as bench_models

    config = bench_models.load_config(model, deepseek_v41_facts.NAME)
    from moetail.integrations import layer_facts

    return layer_facts.from_config(model, config)


def readme_text() -> Path:
    """The default input text: this project's README, from a checkout or from the installed package's metadata."""
    checkout = Path(__file__).resolve().parent.parent.parent / "README.md"
    if checkout.exists():
        return checkout
    from importlib import metadata

    return Path(
        str(metadata.distribution("moetail").locate_file(f"moetail-{metadata.version('moetail')}.dist-info/METADATA"))
    )
