"""The command line: argument parsing and printing only; every command is a function call a notebook can make."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The tail of a Mixture-of-Experts layer, as one kernel, with the same bits.")  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measure: a claim is a ratio with an interval, a control and its bits.")
app.add_typer(bench, name="bench")

OK, SLOWER, USAGE, INTERRUPTED = 0, 1, 2, 130


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

    Exit code: 0; 1 where a case is slower or a bit differs; 2 for bad input.
    """
    import torch

    errors = Console(stderr=True)
    try:
        from moetail.bench import forward as bench_forward
        from moetail.bench import record, tables
        from moetail.bench.cases import parse_case
    except ModuleNotFoundError as error:
        _fail(errors, f"{error}; pip install 'moetail[transformers,bench,cpu]'")
    results: list[bench_forward.Result] = []
    interrupted = False
    try:
        chosen = bench_forward.check_arms(tuple(arms.split(",")))
        cases = [parse_case(c) for c in case]
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        source = text or _readme()
        with _progress(errors) as progress:
            task = progress.add_task(f"loading {model}", total=None)
            loaded, tokens = bench_forward.load(model, source, cases, target)
            for one in cases:
                progress.reset(task, description=f"{one.name}: warm-up", total=None)
                show = functools.partial(_show, progress, task, one.name)
                results.append(bench_forward.run_case(loaded, model, one, tokens, chosen, rounds, show))
    except (ValueError, OSError) as error:
        _fail(errors, str(error))
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
        out.print(tables.forward_details(row), highlight=False, soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(result.verdict.word == "slower" for result in results):
        raise typer.Exit(SLOWER)


@bench.command()
def readme(root: Annotated[Path, typer.Argument(help="the checkout")] = Path(".")) -> None:
    """Make the README's tables and picture anew from the committed records."""
    from moetail.bench import picture, tables

    path = root / "README.md"
    path.write_text(tables.with_tables(path.read_text(), root))
    picture.draw([root / "results" / name for name in PICTURED], root / "docs" / "step.svg")


PICTURED = ("forward-h200-deepseek-v3-width.json", "forward-cpu-glm4-moe-mini.json")


def _fail(errors: Console, sentence: str) -> NoReturn:
    errors.print(f"moetail: {sentence}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(USAGE)


def _show(progress: Progress, task: TaskID, name: str, done: int, total: int) -> None:
    progress.update(task, description=name, completed=done, total=total)


def _progress(console: Console) -> Progress:
    """Shown on stderr while it lasts, and gone afterwards."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip


def _readme() -> Path:
    """The default input text: this project's README, from a checkout or from the installed package's metadata."""
    checkout = Path(__file__).resolve().parent.parent / "README.md"
    if checkout.exists():
        return checkout
    from importlib import metadata

    return Path(
        str(metadata.distribution("moetail").locate_file(f"moetail-{metadata.version('moetail')}.dist-info/METADATA"))
    )


if __name__ == "__main__":
    app()
