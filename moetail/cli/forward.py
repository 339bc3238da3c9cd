"""`moetail bench forward`."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moetail.cli import records, terminal
from moetail.cli.app import FAILED, INTERRUPTED, SLOWER, bench
from moetail.cli.arguments import parse_device, parse_verdicts, readme_text
from moetail.cli.terminal import fail, progress_bar, show


@bench.command()
def forward(
    model: Annotated[
        str, typer.Option(help="a built-in model, a config.json, a folder with one, or module:function")
    ] = "glm4-moe-mini",
    case: Annotated[
        list[str] | None, typer.Option(help="NAME=REQS, a comma list of [N*]Q[@K][c][:D]; default: prefill=512")
    ] = None,
    shapes: Annotated[Path | None, typer.Option(help="cases from a JSON or YAML file")] = None,
    kv_len_jitter: Annotated[float, typer.Option(help="spread of the prefix lengths, a share of them")] = 0.0,
    routing: Annotated[str, typer.Option(help="real (the router's own) or balanced")] = "real",
    arms: Annotated[str | None, typer.Option(help="two arms, the baseline first; default: the model's own")] = None,
    rounds: Annotated[int | None, typer.Option(min=4, help="rounds a case; default: about 40 s of them")] = None,
    text: Annotated[Path | None, typer.Option(help="a file whose bytes are the input tokens")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    profile_dir: Annotated[Path | None, typer.Option(help="write Perfetto traces and kernels.json here")] = None,
    fail_if: Annotated[str, typer.Option(help="verdicts with exit code 1")] = "slower,implausible",
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
    resume: Annotated[bool, typer.Option(help="go on with the partial record in --json")] = False,
    base: Annotated[
        str | None, typer.Option(help="a commit: measure one arm there and here, instead of two arms here")
    ] = None,
) -> None:
    """A model's forward step before and after: milliseconds, bits, and whether the difference is real.

    With --base the arm (--arms ARM; default: the model's second) of another commit is the baseline of this tree's.
    Under torchrun every rank runs it; the slowest one counts. The record is written after each case, marked partial
    until the last.
    Exit code: 0; 1 where a case has a verdict of --fail-if; 2 for bad input; 3 where the model itself failed; 130 where
    interrupted.
    """
    errors = Console(stderr=True)
    try:
        from moetail.bench import base as bench_base
        from moetail.bench import cases as bench_cases
        from moetail.bench import forward as bench_forward
        from moetail.bench import ranks as bench_ranks
        from moetail.bench import record, tables
        from moetail.bench import routing as bench_routing
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; pip install 'moetail[transformers,bench,cpu]'")
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        failing = parse_verdicts(fail_if)
        texts = case or ([] if shapes else ["prefill=512"])
        cases = [bench_cases.parse_case(c) for c in texts] + (bench_cases.load_shapes(shapes) if shapes else [])
        bench_cases.check_names(cases)
        cases = [bench_cases.jitter(one, kv_len_jitter, None) for one in cases]
        bench_routing.check_routing(routing)
        records.check_writable(json)
        records.check_folder(profile_dir, "profile-dir")
        source = text or readme_text()
        asked = {
            "model": model, "cases": texts, "shapes": str(shapes), "arms": arms, "rounds": rounds, "routing": routing,
            "kv_len_jitter": kv_len_jitter, "base": base,
        }  # fmt: skip
        if resume:
            rows = records.unfinished(json, "forward", asked)
        with contextlib.ExitStack() as stack:
            ranks, target = stack.enter_context(bench_ranks.join(parse_device(device)))
            progress = stack.enter_context(progress_bar(errors, ranks.rank))
            task = progress.add_task(f"loading {model}", total=None)
            if base is None:
                loaded = bench_forward.load(model, source, cases, target)
                chosen = bench_forward.check_arms(tuple(arms.split(",")) if arms else loaded.arms[:2], loaded)
                settings = bench_forward.Settings(chosen, rounds, routing, profile_dir)
            else:
                _check_alone(ranks.world_size, arms, shapes, kv_len_jitter, profile_dir)
                tree = stack.enter_context(bench_base.worktree(base))
            for done in range(len(rows), len(cases)):
                one = cases[done]
                progress.reset(task, description=f"{one.name}: warm-up", total=None)
                on_round = functools.partial(show, progress, task, one.name)
                if base is None:
                    result = bench_forward.run_case(loaded, one, settings, ranks, on_round)
                else:
                    result = bench_base.run_case(
                        tree, base, model, source, texts[done], target, arms, rounds, routing, on_round
                    )
                rows.append(result.row())
                whole = done + 1 == len(cases)
                if ranks.rank == 0:
                    records.write(json, record.record("forward", rows, whole, ranks.world_size, asked))
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), FAILED)
    except KeyboardInterrupt:
        interrupted = True
        errors.print(f"interrupted: {len(rows)} of {len(cases)} cases are below{records.resume_hint(json)}",
                     style="bold red")  # fmt: skip
        if not rows:
            raise typer.Exit(INTERRUPTED) from None
    if ranks.rank == 0:
        content = record.record("forward", rows, complete=not interrupted, world_size=ranks.world_size)
        machine = content["machine"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads, eager"
        of_ranks = f", {ranks.world_size} ranks" if ranks.world_size > 1 else ""
        out = terminal.out()
        out.print(tables.forward_table(rows, f"{model} on {where}{of_ranks}; routing {routing}"))
        for row in rows:
            out.print(tables.forward_details(row), highlight=False, markup=False, soft_wrap=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(row["verdict"] in failing for row in rows):
        raise typer.Exit(SLOWER)


def _check_alone(
    world_size: int, arms: str | None, shapes: Path | None, kv_len_jitter: float, profile_dir: Path | None
) -> None:
    """Raises: ValueError for what --base does not take."""
    if arms is not None and "," in arms:
        raise ValueError(f"arms must be the one arm of both commits with --base, got {arms!r}")
    if world_size > 1:
        raise ValueError(f"base must be used in one process, got {world_size} ranks")
    if shapes is not None or kv_len_jitter or profile_dir is not None:
        raise ValueError("base must be used without --shapes, --kv-len-jitter and --profile-dir, got one of them")
