"""`moetail bench serve`."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moetail.cli import records
from moetail.cli.app import FAILED, SLOWER, bench
from moetail.cli.arguments import parse_verdicts
from moetail.cli.terminal import fail, progress_bar, show

_PROMPT = 128  # tokens of the prompts whose answers are compared


@bench.command()
def serve(
    model: Annotated[
        str, typer.Option(help="deepseek-v2-lite, qwen1.5-moe, glm4-moe, or a folder with config.json")
    ] = "deepseek-v2-lite",
    case: Annotated[list[str] | None, typer.Option(help="decode=BATCH or prefill=TOKENS; default: decode=8")] = None,
    layers: Annotated[int | None, typer.Option(help="fewer layers than the model has")] = None,
    quant: Annotated[str | None, typer.Option(help="fp8-block")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="greedy tokens of 8 prompts that must be the same")] = 512,
    rounds: Annotated[int, typer.Option(min=4, help="rounds a case: each runs both engines four times")] = 8,
    eager: Annotated[bool, typer.Option(help="neither compile nor CUDA graphs")] = False,
    memory: Annotated[float, typer.Option(help="of the GPU, for each of the two engines")] = 0.4,
    extra: Annotated[str, typer.Option(help="JSON of further arguments of vllm.LLM")] = "{}",
    profile_dir: Annotated[Path | None, typer.Option(help="write kernels.json of each arm here")] = None,
    fail_if: Annotated[str, typer.Option(help="verdicts with exit code 1")] = "slower",
    json: Annotated[Path | None, typer.Option(help="write the record here")] = None,
) -> None:
    """vLLM with the plugin off and on: tokens, step time (kernel busy time), throughput, kernels. Needs a GPU and vLLM.

    Two engines in one process, dummy weights, steps interleaved. Under torchrun the ranks are one tensor-parallel
    group (vLLM's external_launcher).
    Exit code: 0; 1 where a case has a verdict of --fail-if; 2 for bad input; 3 where an engine or the profile failed.
    """
    errors = Console(stderr=True)
    try:
        import torch

        from moetail.bench import engines, record, serve_models
        from moetail.bench import ranks as bench_ranks
        from moetail.bench import serve as bench_serve

        failing = parse_verdicts(fail_if)
        cases = [bench_serve.parse_case(text) for text in case or ["decode=8"]]
        further = bench_serve.parse_extra(extra)
        if not torch.cuda.is_available():
            raise ValueError("bench serve must run on a machine with a CUDA GPU, got none")
        records.check_writable(json)
        asked = {"model": model, "cases": case, "layers": layers, "quant": quant, "tokens": tokens, "rounds": rounds,
                 "eager": eager, "extra": further}  # fmt: skip
        rows: list[dict[str, Any]] = []
        with contextlib.ExitStack() as stack:
            ranks, _ = stack.enter_context(bench_ranks.join(torch.device("cuda")))
            root = Path(tempfile.gettempdir()) / "moetail-serve"  # the same again: vLLM's compile cache knows the path
            options = engines.Options(
                serve_models.folder(model, root, layers, quant),
                max(_PROMPT + tokens, *(_longest(one, rounds, bench_serve) for one in cases)),
                (8, *(one.size for one in cases if one.decode)), ranks.world_size, eager, memory, further,
            )  # fmt: skip
            pair = engines.Engine("stock", options), engines.Engine("moetail", options)
            out = Console(soft_wrap=True)
            bench_serve.check_layers(pair[1].layers(), model)
            rows.append(bench_serve.tokens_row(pair, 8, _PROMPT, tokens, ranks))
            said = pair[1].layers()  # with the calls that it saw
            if ranks.rank == 0:
                out.print(*said, sep="\n", highlight=False, markup=False)
                out.print(_line(rows[-1]), highlight=False, markup=False)
            progress = stack.enter_context(progress_bar(errors, ranks.rank))
            task = progress.add_task("serve", total=None)
            for one in cases:
                on_round = functools.partial(show, progress, task, one.name)
                rows.append(bench_serve.run_case(pair, one, rounds, ranks, profile_dir, on_round))
                content = record.record(
                    "serve", rows, one is cases[-1], ranks.world_size, {**asked, "layers_run": said}
                )
                if ranks.rank == 0:
                    records.write(json, content)
                    out.print(_line(rows[-1]), highlight=False, markup=False)
    except ModuleNotFoundError as error:
        fail(errors, f"{error}; bench serve needs vLLM")
    except (ValueError, OSError) as error:
        fail(errors, str(error))
    except RuntimeError as error:
        fail(errors, str(error), FAILED)
    if any(row["verdict"] in failing for row in rows):
        raise typer.Exit(SLOWER)


def _longest(case: Any, rounds: int, bench_serve: Any) -> int:
    """Tokens of the longest request."""
    return max(2048, bench_serve.CONTEXT + bench_serve.most_tokens(case, rounds) if case.decode else case.size + 64)


def _line(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        speed = ", ".join(f"{arm} {a['tokens_per_s']:.0f} tokens/s, first after {a['ttft_ms']:.1f} ms"
                          for arm, a in row["arms"].items())  # fmt: skip
        return f"{row['case']}: {row['why']} ({row['distinct_tokens']} distinct); {speed}"
    stock, ours = (row["arms"][arm] for arm in ("stock", "moetail"))
    r = row["ratio"]
    changed = "; ".join(f"{k['name'][:60]} {k['moetail_us'] - k['stock_us']:+.1f} us" for k in row["kernels"][:4])
    return (
        f"{row['case']}: {stock['median_us']:.1f} -> {ours['median_us']:.1f} us busy, "
        f"{r['b_over_a']:.4f} [{r['low']:.4f}, {r['high']:.4f}], wall {stock['wall_ms']:.3f} -> {ours['wall_ms']:.3f} "
        f"ms, {row['differing_bits']} tokens differ, {row['verdict']}: {row['why']} | {changed}"
    )
