"""The command line: argument parsing and printing only; every command is a function call a notebook can make.

One file a command; `app` holds the command groups and the exit codes.
"""

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
    tune,
)
from moetail.cli.app import FAILED, INTERRUPTED, OK, SLOWER, USAGE, app, bench

__all__ = ["FAILED", "INTERRUPTED", "OK", "SLOWER", "USAGE", "app", "bench"]
