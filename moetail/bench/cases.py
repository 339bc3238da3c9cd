"""The case grammar of `vllm bench forward`: what one forward step is made of.

NAME=REQS            REQS is a comma list of [N*]Q[@K][c][:D]; without NAME= the text is its own name
Q query tokens; K KV length including the query (default Q: a fresh prefill); N how many such requests;
c the prefix was computed by earlier chunks; D draft tokens among the query

decode=8*1@8192   prefill=4096   verify=16*4@4096:3   hit=8192@40960   chunk=8192@40960c   mix=8192,32*1@8192
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetail.bench import files

_REQUEST = re.compile(r"(?:(?P<n>\d+)\*)?(?P<q>\d+)(?:@(?P<k>\d+))?(?P<c>c)?(?::(?P<d>\d+))?")
_WHAT = "a file of cases, JSON or (where it ends in .yaml) YAML"
# A request in a shapes file: each key and its type; all but query_len may be left out.
_KEYS = {"query_len": int, "kv_len": int, "count": int, "chunked": bool, "num_draft_tokens": int}


@dataclass(frozen=True)
class Request:
    """`count` requests of `query_len` new tokens each, at a KV length of `kv_len` tokens including them."""

    query_len: int
    kv_len: int
    count: int = 1
    chunked: bool = False
    num_draft_tokens: int = 0

    @property
    def prefix_len(self) -> int:
        return self.kv_len - self.query_len

    @property
    def is_decode(self) -> bool:
        """One new token, or one and its draft tokens, behind a prefix; anything else is a prefill."""
        return self.prefix_len > 0 and self.query_len == 1 + self.num_draft_tokens


@dataclass(frozen=True)
class Case:
    name: str
    requests: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        """T of every MoE layer in this step."""
        return sum(r.count * r.query_len for r in self.requests)


def parse_case(text: str) -> Case:
    """`NAME=REQS`, or `REQS`, which is then its own name. Raises: ValueError naming the request that is off."""
    name, equals, requests = text.partition("=")
    if not equals:
        name, requests = text, text
    if not name:
        raise ValueError(f"case must have a name before '=', got {text!r}")
    return Case(name, tuple(parse_request(part) for part in requests.split(",")))


def parse_request(text: str) -> Request:
    """`[N*]Q[@K][c][:D]`. Raises: ValueError saying what is allowed."""
    match = _REQUEST.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"case must be NAME=[N*]Q[@K][c][:D],... (as in decode=8*1@512), got the request {text!r}")
    q = int(match["q"])
    k = q if match["k"] is None else int(match["k"])
    n = 1 if match["n"] is None else int(match["n"])
    request = Request(q, k, n, match["c"] is not None, int(match["d"] or 0))
    _check(request, text)
    return request


def check_names(cases: list[Case]) -> None:
    """Raises: ValueError where two cases share a name: a record finds its case by it."""
    seen: set[str] = set()
    for case in cases:
        if case.name in seen:
            raise ValueError(f"case names must differ, got {case.name!r} twice")
        seen.add(case.name)


def load_shapes(path: Path) -> list[Case]:
    """The cases of a shapes file, YAML where it ends in .yaml or .yml and JSON otherwise.

    {"cases": [{"name": "verify", "requests": [{"query_len": 4, "kv_len": 4096, "num_draft_tokens": 3, "count": 16}]}]}

    A request's defaults are the grammar's: kv_len = query_len, count 1, chunked false, num_draft_tokens 0.

    Raises: ValueError naming the file and the entry that is off, or two cases of one name.
    """
    where = f"shapes {path}"
    content = _keys(_read(path), {"cases": list}, {"cases"}, where)
    cases = []
    for i, entry in enumerate(content["cases"]):
        place = f"{where}: cases[{i}]"
        entry = _keys(entry, {"name": str, "requests": list}, {"name", "requests"}, place)
        if not entry["name"] or not entry["requests"]:
            raise ValueError(f"{place} must have a name and at least one request, got {entry}")
        requests = []
        for j, values in enumerate(entry["requests"]):
            values = _keys(values, _KEYS, {"query_len"}, f"{place}.requests[{j}]")
            request = Request(**{"kv_len": values["query_len"], **values})
            _check(request, f"{place}.requests[{j}]: {values}")
            requests.append(request)
        cases.append(Case(entry["name"], tuple(requests)))
    if not cases:
        raise ValueError(f"{where}: cases must have at least one case, got none")
    check_names(cases)
    return cases


def jitter(case: Case, fraction: float, max_kv_len: int | None, seed: int = 0) -> Case:
    """Every request's prefix times a draw from U(1 - fraction, 1 + fraction), at least 1 token; fresh prefills stay.

    Each of a request's `count` gets its own draw, so requests are taken apart; equal neighbours are put together again.
    `max_kv_len` caps what was drawn (None: no cap). The draws depend on the seed and the case's name. Fraction 0: the
    case itself.

    Raises: ValueError for a fraction outside 0 to 1, or a case that is longer than `max_kv_len` as it was asked for.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"kv-len-jitter must be a fraction from 0 to 1, got {fraction}")
    if fraction == 0:
        return case
    longest = max(request.kv_len for request in case.requests)
    if max_kv_len is not None and longest > max_kv_len:
        raise ValueError(f"case {case.name}: KV length must be <= {max_kv_len}, got {longest}")
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    drawn: list[Request] = []
    for request in case.requests:
        if request.prefix_len == 0:
            drawn.append(request)
            continue
        for factor in rng.uniform(1 - fraction, 1 + fraction, size=request.count):
            kv_len = request.query_len + max(1, int(request.prefix_len * factor))
            drawn.append(replace(request, kv_len=min(kv_len, max_kv_len or kv_len), count=1))
    merged = [
        replace(request, count=sum(r.count for r in same))
        for request, same in itertools.groupby(drawn, key=lambda r: replace(r, count=1))
    ]
    return Case(case.name, tuple(merged))


def _check(request: Request, text: str) -> None:
    """The rules between a request's numbers; `text` is how it was written."""
    if request.query_len < 1 or request.count < 1 or request.num_draft_tokens < 0:
        raise ValueError(f"case must have N >= 1, Q >= 1 and D >= 0, got {text!r}")
    if request.kv_len < request.query_len:
        raise ValueError(f"case must have K >= Q (K counts the query too), got {text!r}")
    if request.num_draft_tokens and not request.is_decode:
        raise ValueError(f"case must have Q == 1 + D and a prefix for draft tokens, got {text!r}")
    if request.chunked and (request.prefix_len == 0 or request.is_decode):
        raise ValueError(f"case must have c only on a prefill with a prefix, got {text!r}")


def _read(path: Path) -> Any:
    text = files.read_text("shapes", path, _WHAT)
    if path.suffix in (".yaml", ".yml"):
        import yaml

        parse, bad = yaml.safe_load, yaml.YAMLError
    else:
        parse, bad = json.loads, json.JSONDecodeError
    try:
        return parse(text)
    except bad as error:
        raise files.not_a("shapes", path, _WHAT, str(error)) from error


def _keys(value: Any, types: dict[str, type], required: set[str], where: str) -> dict[str, Any]:
    """`value`, a mapping with exactly these keys and types. Raises: ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a mapping with the keys {', '.join(types)}, got {value!r}")
    if unknown := [key for key in value if key not in types]:
        raise ValueError(f"{where} must have no keys but {', '.join(types)}, got {', '.join(map(repr, unknown))}")
    if missing := sorted(required - value.keys()):
        raise ValueError(f"{where} must have the keys {', '.join(missing)}, got {value!r}")
    for key, content in value.items():
        if type(content) is not types[key]:
            raise ValueError(f"{where}: {key} must be {types[key].__name__}, got {content!r}")
    return value
