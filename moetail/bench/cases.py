"""The case grammar of `vllm bench forward`: what one forward step is made of.

NAME=REQS            REQS is a comma list of [N*]Q[@K][c][:D]
Q query tokens; K KV length including the query (default Q: a fresh prefill); N how many such requests;
c the prefix was computed by earlier chunks; D draft tokens among the query

decode=8*1@8192   prefill=4096   verify=16*4@4096:3   hit=8192@40960   mix=8192,32*1@8192
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_REQUEST = re.compile(r"(?:(?P<n>\d+)\*)?(?P<q>\d+)(?:@(?P<k>\d+))?(?P<c>c)?(?::(?P<d>\d+))?")


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
    request = Request(q, k, int(match["n"] or 1), match["c"] is not None, int(match["d"] or 0))
    if q < 1 or request.count < 1:
        raise ValueError(f"case must have N >= 1 and Q >= 1, got {text!r}")
    if k < q:
        raise ValueError(f"case must have K >= Q (K counts the query too), got {text!r}")
    if request.chunked and (request.prefix_len == 0 or q == 1):
        raise ValueError(f"case must have c only on a prefill with a prefix, got {text!r}")
    if request.num_draft_tokens and (q != 1 + request.num_draft_tokens or request.prefix_len == 0):
        raise ValueError(f"case must have Q == 1 + D and a prefix for draft tokens, got {text!r}")
    return request
