"""Which experts the tokens of a step go to: what a transformers model's routers chose, or a balanced assignment.

Random weights route unevenly: a few experts get most tokens. *Balanced* is what a trained router aims at, and the same
for every model: slot k of token t goes to expert (t*K + k) mod E. Every expert is chosen equally often within 1, and no
expert twice for a token. The routing weights stay what the router gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

ROUTINGS = ("real", "balanced")


class Routed(NamedTuple):
    """One call of an experts module; index and weights are [T, K]."""

    experts: Any
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor


def check_routing(routing: str) -> None:
    """Raises: ValueError for another routing."""
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be {' or '.join(ROUTINGS)}, got {routing!r}")


def experts_modules(model: Any) -> list[Any]:
    """The modules that `set_experts_implementation` acts on, which take (hidden [T, H], index [T, K], weights)."""
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[list[Routed]]:
    """What each MoE layer's experts are called with inside the block, in order."""
    seen: list[Routed] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, weights = (*args, *kwargs.values())[:3]
        seen.append(Routed(module, index, weights))

    with contextlib.ExitStack() as hooks:
        for module in experts_modules(model):
            hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield seen


def balanced_index(T: int, K: int, num_experts: int, device: torch.device) -> torch.Tensor:
    """int64 [T, K], for K <= num_experts."""
    return (torch.arange(T * K, device=device) % num_experts).view(T, K)


def balanced_tables(model: Any, T: int) -> dict[Any, torch.Tensor]:
    """The balanced top_k_index of each experts module for a step of T tokens: what `replaced` takes.

    One token is run through the model: its config has no one name for the top-k of a layer.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), recorded(model) as probed:
        model(torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    return {
        experts: balanced_index(T, index.shape[1], experts.num_experts, device).to(index.dtype)
        for experts, index, _ in probed
    }


@contextlib.contextmanager
def replaced(tables: dict[Any, torch.Tensor]) -> Iterator[None]:
    """Experts called inside the block see the index of their table. Pointers only: nothing is computed or waited for.

    Raises (the call): RuntimeError where a call has another number of tokens or slots than its table.
    """

    def replace(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [*range(len(args)), *kwargs]  # the index is the second argument, whatever a model calls it
        values = [*args, *kwargs.values()]
        table = tables[module]
        if values[1].shape != table.shape:
            raise RuntimeError(
                f"experts must be called with an index of shape {tuple(table.shape)} for the balanced routing of this "
                f"step, got {tuple(values[1].shape)}"
            )
        values[1] = table
        return tuple(values[: len(args)]), dict(zip(names[len(args) :], values[len(args) :], strict=True))

    with contextlib.ExitStack() as hooks:
        for module in tables:
            # First in line, so that `recorded` around this block sees what the experts see.
            handle = module.register_forward_pre_hook(replace, with_kwargs=True, prepend=True)
            hooks.callback(handle.remove)
        yield
