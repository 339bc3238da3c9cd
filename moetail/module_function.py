"""A function that an argument names as module:function, imported: `--impl` and `--model` take a user's own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def load(name: str, spec: str) -> Callable[..., Any]:
    """The function that the argument `name` gives as module:function.

    Raises: ValueError naming the argument, and saying whether the module is not there, raises while it is imported, or
    has no such function (with the names that are close).
    """
    path, _, attribute = spec.partition(":")
    if not path or not attribute.isidentifier():
        raise ValueError(f"{name} must be module:function, got {spec!r}")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # the module is the user's: importing it may raise anything
        raise ValueError(f"{name} must be module:function, got {spec!r}: {_why(path, error)}") from error
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, [n for n in dir(module) if callable(getattr(module, n, None))])
        hint = f"; it has {', '.join(close)}" if close else ""
        raise ValueError(f"{name} must be module:function, got {spec!r}: {path} has no {attribute}{hint}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{name} must be module:function, got {spec!r}, of type {type(function).__name__}")
    return function


def _why(path: str, error: Exception) -> str:
    """That there is no such module, or what it raised: it may be there and import one that is not."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{path}.".startswith(f"{error.name}."):
        return f"there is no module {error.name} (is its folder on PYTHONPATH?)"
    return f"importing {path} raised {type(error).__name__}: {error}"
