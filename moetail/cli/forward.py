"""`moetail bench forward`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli.app import FAILED, INTERRUPTED, SLOWER, bench
from moetail.cli.arguments import check_writable, parse_device, readme_text
from moetail.cli.terminal import fail, progress_bar, show


@bench.command()
def forward(
    model: Annotated[str, typer.Option(help="a built-in model, a config.json, or a folder with one")] = "glm4-moe-mini",
    case: Annotated[list[str], typer.Option(help="NAME=[N*]Q[@K]; may be given more than once")] = ["prefill=512"],  # noqa: B006
    arms: Annotated[str, typer.Option(help="two arms, the baseline first")] = "stock,moetail",
    rounds: Annotated[int | None, typer.Option(min=4, help="rounds a case; default: about 40 s of them")] = None,
    text: Annotated[Path | None, typer.Option(help="a file whose bytes are the input tokens")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
) -> None:
    """A model's forward step before and after: milliseconds, bits, and whether the difference is real.

    Exit code: 0; 1 where a case is slower or a bit differs; 2 for bad input; 3 where the model itself failed.
    """
    errors = Console(stderr=True)
    try:
        from moetail.bench import forward as bench_forward
        from moetail.bench import record, tables
        from moetail.bench.cases import parse_case
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[transformers,bench,cpu]'")
    results: list[bench_forward.Result] = []
    interrupted = False
    try:
        chosen = bench_forward.check_arms(tuple(arms.split(",")))
        cases = [parse_case(c) for c in case]
        target = parse_device(device)
        source = text or readme_text()
        check_writable(json)
        with progress_bar(errors) as progress:
            task = progress.add_task(f"loading {model}", total=None)
            loaded = bench_forward.load(model, source, cases, target)
            for one in cases:
                progress.reset(task, description=f"{one.name}: warm-up", total=None)
                on_round = functools.partial(show, progress, task, one.name)
                results.append(bench_forward.run_case(loaded, one, chosen, rounds, on_round))
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), FAILED)
    except KeyboardInterrupt:
        interrupted = True
        errors.print("interrupted: what is below is not the whole run", style="bold red")

    rows = [result.row() for result in results]
    content = record.record("forward", rows, complete=not interrupted)
    if json is not None:
        record.write(json, content)
    where = content["machine"]["gpu"] or f"{content['machine']['cpu']}, {content['machine']['threads']} threads, eager"
    out = Console()
    out.print(tables.forward_table(rows, f"{model} on {where}; experts GEMM in both arms: torch grouped_mm"))
    for row in rows:
        out.print(tables.forward_details(row), highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(result.verdict.word == "slower" for result in results):
        raise typer.Exit(SLOWER)
