"""The command line: argument parsing and printing only; every command is a function call a notebook can make."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The tail of a Mixture-of-Experts layer, as one kernel, with the same bits.")  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measure: a claim is a ratio with an interval, a control and its bits.")
app.add_typer(bench, name="bench")

OK, SLOWER, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130


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
        _fail(errors, f"{error}; pip install 'moetail[transformers,bench,cpu]'")
    results: list[bench_forward.Result] = []
    interrupted = False
    try:
        chosen = bench_forward.check_arms(tuple(arms.split(",")))
        cases = [parse_case(c) for c in case]
        target = _device(device)
        source = text or _readme()
        _check_writable(json)
        with _progress(errors) as progress:
            task = progress.add_task(f"loading {model}", total=None)
            loaded, tokens = bench_forward.load(model, source, cases, target)
            for one in cases:
                progress.reset(task, description=f"{one.name}: warm-up", total=None)
                show = functools.partial(_show, progress, task, one.name)
                results.append(bench_forward.run_case(loaded, model, one, tokens, chosen, rounds, show))
    except (ValueError, OSError) as error:
        _fail(errors, str(error))
    except RuntimeError as error:
        _fail(errors, str(error), FAILED)
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


@bench.command()
def kernels(
    shape: Annotated[list[str] | None, typer.Option(help="T,K,H; may be given more than once")] = None,
    mode: Annotated[str, typer.Option(help="chained, producer, or both: chained,producer")] = "chained",
    l2: Annotated[str, typer.Option(help="the L2 cache: cold, warm, or both: cold,warm")] = "cold",
    rounds: Annotated[int, typer.Option(min=4)] = 20,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
    svg: Annotated[Path | None, typer.Option(help="draw the roofline here")] = None,
) -> None:
    """The finalize kernel against the ones people use today: microseconds, bandwidth, bits.

    Exit code: 0; 1 where our own bits fail (and then nothing is printed); 2 for bad input.
    """

    errors = Console(stderr=True)
    try:
        from moetail.bench import kernels as bench_kernels
        from moetail.bench import picture, record, tables
    except ModuleNotFoundError as error:
        _fail(errors, f"{error}; pip install 'moetail[bench,cpu]'")
    rows = []
    try:
        target = _device(device)
        _check_writable(json)
        _check_writable(svg)
        shapes = [_shape(text) for text in shape] if shape else bench_kernels.DEFAULT
        runs = [(one, how, state) for how in mode.split(",") for state in l2.split(",") for one in shapes]
        with _progress(errors) as progress:
            task = progress.add_task("kernels", total=len(runs))
            for done, (one, how, state) in enumerate(runs):
                progress.update(task, description=f"T,K,H={one} {how} {state}", completed=done)
                rows.append(bench_kernels.run_shape(*one, target, how, state, rounds).row())
    except (ValueError, OSError) as error:
        _fail(errors, str(error))
    except RuntimeError as error:
        _fail(errors, str(error), SLOWER)
    content = record.record("kernels", rows, complete=True)
    if json is not None:
        record.write(json, content)
    if svg is not None:
        picture.roofline(content, svg)
    Console(soft_wrap=True, width=None if Console().is_terminal else 240).print(tables.kernels_table(rows))
    if rows[0]["not_installed"]:
        errors.print(f"not installed here, so not compared: {', '.join(rows[0]['not_installed'])}", highlight=False)


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="the op to tune: finalize")],
    out: Annotated[Path, typer.Option(help="the config file to write")],
    shape: Annotated[list[str] | None, typer.Option(help="K,H; may be given more than once")] = None,
) -> None:
    """Measure a kernel's configs on this GPU and write those that beat its heuristic; Ctrl-C keeps what it has."""
    import torch

    errors = Console(stderr=True)
    if op != "finalize":
        _fail(errors, f"op must be finalize, got {op!r}")
    if not torch.cuda.is_available():
        _fail(errors, "tune needs a CUDA GPU, got none: the CPU kernel has nothing to tune")
    from moetail import tuning
    from moetail.bench import kernels as bench_kernels
    from moetail.bench import record
    from moetail.bench import tune as bench_tune

    try:
        shapes = [_numbers("shape", text, "K,H") for text in shape] if shape else list(bench_kernels.SHAPES)
    except ValueError as error:
        _fail(errors, str(error))
    entries: list[dict[str, Any]] = []
    with _progress(errors) as progress:
        task = progress.add_task("tune", total=None)
        try:
            for K, H in shapes:

                def show(done: int, total: int, note: str, name: str = f"K={K} H={H}") -> None:
                    progress.update(task, description=name, completed=done, total=total)
                    progress.print(f"{name} {note}", highlight=False)

                entries.append(bench_tune.tune_shape(K, H, torch.device("cuda", 0), show))
        except KeyboardInterrupt:
            errors.print(f"interrupted: {len(entries)} of {len(shapes)} shapes are kept", style="bold red")
    record.write(out, {"schema": tuning.SCHEMA, "machine": record.machine(), "entries": entries})


@app.command()
def conformance(
    impl: Annotated[str, typer.Option(help="module:function, f(rows, row_map, weights, shared) -> [T, H]")],
    numerics: Annotated[list[str] | None, typer.Option(help="a preset to try; default: all")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
) -> None:
    """Which numerics a finalize implementation has, bit by bit, and what it cannot take.

    Exit code: 0 where it has one of the presets tried; 1 where it has none; 2 for bad input.
    """
    from moetail import conformance as suite
    from moetail.bench import record, tables

    errors, out = Console(stderr=True), Console()
    try:
        report = suite.run(impl, suite.load(impl), device, tuple(numerics or ()))
    except ValueError as error:
        _fail(errors, str(error))
    if json is not None:
        record.write(json, record.record("conformance", [report.row()], complete=True))
    out.print(tables.conformance_table(report.row()))
    out.print(f"{impl}: {' and '.join(report.profiles) or 'none of the presets tried'}", highlight=False)
    if not report.profiles:
        raise typer.Exit(SLOWER)


@app.command()
def ceiling(
    layers: Annotated[int, typer.Option(help="MoE layers of the model")],
    step_ms: Annotated[float, typer.Option(help="the whole step, in milliseconds")],
    separate_us: Annotated[float | None, typer.Option(help="one layer's tail as separate kernels")] = None,
    fused_us: Annotated[float | None, typer.Option(help="one layer's tail as one kernel")] = None,
    shape: Annotated[str | None, typer.Option(help="T,K,H: from the bytes instead of measured times")] = None,
    tb_per_s: Annotated[float, typer.Option(help="with --shape: the memory bandwidth")] = 4.2,
) -> None:
    """The most that fusing a tail can take off a model's step. A claim above it needs no measurement to be wrong."""
    from moetail.bench import ceiling as bench_ceiling

    errors = Console(stderr=True)
    try:
        if shape is not None and separate_us is None and fused_us is None:
            answer = bench_ceiling.from_bytes(*_shape(shape), tb_per_s, layers, step_ms * 1e3)
        elif shape is None and separate_us is not None and fused_us is not None:
            answer = bench_ceiling.Ceiling(separate_us, fused_us, layers, step_ms * 1e3)
        else:
            raise ValueError("ceiling must have either --separate-us and --fused-us, or --shape")
    except ValueError as error:
        _fail(errors, str(error))
    Console().print(str(answer), highlight=False, soft_wrap=True)


@bench.command()
def readme(root: Annotated[Path, typer.Argument(help="the checkout")] = Path(".")) -> None:
    """Make the README's tables and picture anew from the committed records."""
    from moetail.bench import picture, tables

    path = root / "README.md"
    path.write_text(tables.with_tables(path.read_text(), root))
    picture.draw([root / "results" / name for name in PICTURED], root / "docs" / "step.svg")


PICTURED = ("forward-h200-deepseek-v3-width.json", "forward-cpu-glm4-moe-mini.json")


def _shape(text: str) -> tuple[int, int, int]:
    T, K, H = _numbers("shape", text, "T,K,H")
    return T, K, H


def _numbers(name: str, text: str, form: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if len(numbers) != len(form.split(",")) or not all(n.strip().isdigit() and int(n) > 0 for n in numbers):
        raise ValueError(f"{name} must be {form}, numbers above 0, got {text!r}")
    return tuple(map(int, numbers))


def _device(text: str | None) -> torch.device:
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if text.partition(":")[0] not in kinds:
        raise ValueError(f"device must be {' or '.join(kinds)} here, got {text!r}")
    return torch.device(text)


def _check_writable(path: Path | None) -> None:
    """Before anything is measured. Raises: OSError."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _fail(errors: Console, sentence: str, code: int = USAGE) -> NoReturn:
    errors.print(f"moetail: {sentence}", style="bold red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)


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
