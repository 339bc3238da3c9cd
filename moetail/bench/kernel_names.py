"""Short names of GPU kernels: what a table can show of a demangled C++ name.

The return type, the template arguments and the parameters go. A launcher that runs whatever it is given
(`vectorized_elementwise_kernel`, `cutlass::device_kernel`) keeps the argument that says what it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Kernels whose own name says nothing: one of their template arguments is the work.
_LAUNCHER = re.compile(r"(\w*elementwise_kernel\w*|reduce_kernel|device_kernel|Kernel2?)$")
# Template arguments that only hold another one.
_HOLDER = re.compile(
    r"(gpu_kernel_impl\w*|gpu_index_kernel|opmath_\w+|[AB]?UnaryFunctor|BinaryFunctor|ReduceOp|func_wrapper_t|enable_\w+)$"
)
_VALUE = re.compile(
    r"(\(\w+\))?-?\d+\w*|true|false|void|bool|char|short|int|long|unsigned.*|float|double|__nv_\w+|__half"
)
_SCALAR = re.compile(r"(c10|at|cutlass)::(BFloat16|Half|Float8_\w+|complex|bfloat16_t|half_t)\b.*")
_NOISE = ("(anonymous namespace)::", "at::native::")


def short_name(full: str) -> str:
    """`void at::native::reduce_kernel<512, ReduceOp<float, MeanOps<float>>>(...)` -> `reduce_kernel<MeanOps>`.

    Names that are not C++ (Triton's, nvjet's, "Memcpy DtoD (Device -> Device)") are returned as they are.
    """
    text = full
    for noise in _NOISE:
        text = text.replace(noise, "")
    path, arguments = _parse(_signature(text))
    last = path.rpartition("::")[2]
    if last == "kernel":
        return "::".join(path.split("::")[-2:])
    if _LAUNCHER.fullmatch(last) and (what := _telling(arguments)):
        return f"{path}<{what}>"
    return path or full  # "Memcpy DtoD (Device -> Device)" has nothing between its last space and its "("


def _signature(text: str) -> str:
    """The name with its template arguments: no return type before it, no parameters behind it."""
    start = 0
    for at, char in _outside(text, "(", " "):
        if char == "(" and not text[:at].endswith("operator"):
            return text[start:at]
        if char == " " and "(" in text[at:]:
            start = at + 1
    return text[start:]


def _parse(text: str) -> tuple[str, list[str]]:
    """`a::b<c, d<e>>::f` -> `a::b`, [`c`, `d<e>`]; what follows the first template arguments is dropped."""
    head = re.split(r"[<({]", text, maxsplit=1)[0].strip(" :")
    rest = text[len(head) :]
    if not rest.startswith("<"):
        return head, []
    inside, start, arguments = rest[1:], 0, []
    for at, char in _outside(inside, ",", ">"):
        arguments.append(inside[start:at].strip())
        start = at + 1
        if char == ">":
            break
    return head, arguments


def _telling(arguments: list[str]) -> str | None:
    """The first argument that is neither a number nor a scalar type; what it holds, where it only holds another."""
    for argument in arguments:
        if _VALUE.fullmatch(argument) or _SCALAR.fullmatch(argument):
            continue
        path, inner = _parse(argument)
        name = path.rpartition("::")[2]
        if _HOLDER.fullmatch(name):
            name = _telling(inner) or name
        return name or None
    return None


def _outside(text: str, *wanted: str) -> Iterator[tuple[int, str]]:
    """Where one of the characters stands outside all brackets; ")" and ">" are outside when they close too many."""
    depth = 0
    for at, char in enumerate(text):
        if depth == 0 and char in wanted:
            yield at, char
        if char in "<({[":
            depth += 1
        elif char in ")}]" or (char == ">" and text[at - 1] != "-"):
            depth -= 1
