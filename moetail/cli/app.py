"""The command groups and the exit codes."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="The tail of a Mixture-of-Experts layer, as one kernel, with the same bits.")  # fmt: skip
bench = typer.Typer(no_args_is_help=True, help="Measure: a claim is a ratio with an interval, a control and its bits.")
app.add_typer(bench, name="bench")

OK, SLOWER, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
