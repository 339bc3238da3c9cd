"""The command line: argument parsing and printing only; every command is a function call a notebook can make.

One file a command; `app` holds the command groups and the exit codes.
"""

import sys

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ModuleNotFoundError as error:  # without the extra the command is installed all the same
    print(f"moetail: {error}; pip install 'moetail[bench]'", file=sys.stderr)
    raise SystemExit(2) from None

from moetail.cli import (  # noqa: F401  each registers its command
    ceiling,
    compare,
    conformance,
    coverage,
    explain,
    forward,
    kernels,
    profile,
    readme,
    selftest,
    serve,
    tune,
)
from moetail.cli.app import FAILED, INTERRUPTED, OK, SLOWER, USAGE, app, bench

__all__ = ["FAILED", "INTERRUPTED", "OK", "SLOWER", "USAGE", "app", "bench"]
