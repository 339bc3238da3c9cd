"""`moetail ceiling`."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Console

from moetail.cli.app import app
from moetail.cli.arguments import parse_shape
from moetail.cli.terminal import fail


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
        for name, value in (("step-ms", step_ms), ("separate-us", separate_us), ("fused-us", fused_us),
                            ("tb-per-s", tb_per_s)):  # fmt: skip
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {value}")
        if shape is not None and separate_us is None and fused_us is None:
            answer = bench_ceiling.from_bytes(*parse_shape(shape), tb_per_s, layers, step_ms * 1e3)
        elif shape is None and separate_us is not None and fused_us is not None:
            answer = bench_ceiling.Ceiling(separate_us, fused_us, layers, step_ms * 1e3)
        else:
            given = {"--separate-us": separate_us, "--fused-us": fused_us, "--shape": shape}
            got = ", ".join(name for name, value in given.items() if value is not None) or "none of them"
            raise ValueError(f"ceiling must have either --separate-us and --fused-us, or --shape, got {got}")
    except ValueError as error:
        fail(errors, str(error))
    Console().print(str(answer), highlight=False, soft_wrap=True)
