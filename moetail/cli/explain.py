"""`moetail explain`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from moetail.cli import terminal
from moetail.cli.app import app
from moetail.cli.arguments import model_facts
from moetail.cli.terminal import fail

if TYPE_CHECKING:
    from moetail.models import ModelFacts
    from moetail.plan import Plan


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="deepseek-v4.1-flash, a built-in model, a config.json or its folder")],
    tp: Annotated[int, typer.Option(help="tensor-parallel ranks")] = 1,
    pp: Annotated[int, typer.Option(help="pipeline stages")] = 1,
    max_tokens: Annotated[int, typer.Option(help="the largest call")] = 8192,
    tb_per_s: Annotated[float, typer.Option(help="the memory bandwidth that the estimate assumes")] = 4.2,
) -> None:
    """Where each layer's calls are finalized, and why: the plan, one row a layer and range of tokens.

    "saves" is an estimate: the bytes of T rows that one pass over finalize and shared add does not move, at that
    bandwidth. What a fused all-reduce or boundary saves on top is not in it.
    """
    from moetail.plan import WorldFacts, plan_tails

    errors = Console(stderr=True)
    try:
        if not 0 < tb_per_s < math.inf:
            raise ValueError(f"tb-per-s must be above 0, got {tb_per_s}")
        facts = model_facts(model)
        plan = plan_tails(facts.layers, WorldFacts(max_tokens, tp, facts.stage_starts(pp)))
        facts.check_tp(tp)
    except (ValueError, ModuleNotFoundError) as error:
        fail(errors, str(error))
    out = terminal.out()
    out.print(_table(plan, facts, tb_per_s))
    out.print(
        f"{facts.name}, K={facts.K} H={facts.H}, tp {tp}, pp {pp}. 'saves': an estimate of what one pass over finalize "
        f"and shared add saves a layer at the most tokens of the row: bytes at {tb_per_s:g} TB/s, bf16. "
        f"Only `moetail bench forward` measures.",
        highlight=False,
    )


def _table(plan: Plan, facts: ModelFacts, tb_per_s: float) -> Table:
    from moetail.plan import Place

    table = Table(box=None, pad_edge=False)
    for heading, justify in (("layer", "right"), ("tokens", "right"), ("finalized", "left"), ("saves at most", "right"),
                             ("why", "left")):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for first, last, ranges in plan.folded():
        name = f"{first}" if first == last else f"{first}-{last}"
        if not ranges:
            table.add_row(name, "", "no experts", "", "")
        for part in ranges:
            slots = plan.layers[first].shared_slots
            nothing = slots or part.place is Place.EXPERTS  # with slots there is no add to save
            saves = "-" if nothing else f"{_saved_us(part.max_T, facts, tb_per_s):.2f} us"
            why = part.reason.value + (f"; shared experts as slots: {slots}" if slots else "")
            table.add_row(
                name, f"{part.min_T}-{part.max_T}", part.place.value.removeprefix("finalized "), saves, why
            )  # fmt: skip
    return table


def _saved_us(T: int, facts: ModelFacts, tb_per_s: float) -> float:
    """One layer's: the step is not known here, so it bounds nothing."""
    from moetail.bench import ceiling

    return ceiling.from_bytes(T, facts.K, facts.H, tb_per_s, layers=1, step_us=math.inf).gain_us
