"""The case grammar."""

import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest
import yaml

from moetail.bench.cases import Case, Request, check_names, jitter, load_shapes, parse_case


@pytest.mark.parametrize(
    ("text", "case", "tokens"),
    [
        ("decode=8*1@8192", Case("decode", (Request(1, 8192, 8),)), 8),
        ("prefill=4096", Case("prefill", (Request(4096, 4096),)), 4096),
        ("4096", Case("4096", (Request(4096, 4096),)), 4096),
        ("verify=16*4@4096:3", Case("verify", (Request(4, 4096, 16, False, 3),)), 64),
        ("hit=8192@40960", Case("hit", (Request(8192, 40960),)), 8192),
        ("chunk=8192@40960c", Case("chunk", (Request(8192, 40960, chunked=True),)), 8192),
        ("mix=8192,32*1@8192", Case("mix", (Request(8192, 8192), Request(1, 8192, 32))), 8224),
    ],
)
def test_grammar(text, case, tokens):
    assert parse_case(text) == case
    assert case.num_tokens == tokens


@pytest.mark.parametrize(
    "text",
    ["", "=1", "a=", "a=x", "a=0", "a=0*1", "a=8@4", "a=8@7", "a=1*",
      "a=1@", "a=-1", "a=1,,2", "a=4c", "a=1@8c", "a=4:3", "a=4@8:2", "a=4@8c:3", "a=1 2"]
)  # fmt: skip
def test_bad_cases(text):
    with pytest.raises(ValueError, match="^case must"):
        parse_case(text)


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def shapes(**values):
    return {"cases": [{"name": "a", "requests": [{"query_len": 4, **values}]}]}


YAML = """
cases:
  - name: mix
    requests:
      - {query_len: 8}
      - {query_len: 4, kv_len: 16, num_draft_tokens: 3, count: 2}
      - {query_len: 4, kv_len: 16, chunked: true}
  - {name: decode, requests: [{query_len: 1, kv_len: 64}]}
"""


def test_shapes_are_cases(tmp_path):
    expected = [parse_case("mix=8,2*4@16:3,4@16c"), parse_case("decode=1@64")]
    path = write(tmp_path / "shapes.yaml", YAML)
    assert load_shapes(path) == expected
    assert load_shapes(write(tmp_path / "shapes.json", yaml.safe_load(YAML))) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "shapes must be a file of cases, JSON"),
        ([], "must be a mapping"),
        ({"cases": []}, "at least one case"),
        ({"cases": {}}, "cases must be list"),
        ({"shapes": []}, "no keys but cases, got 'shapes'"),
        ({"cases": ["4*1"]}, "cases[0] must be a mapping"),
        ({"cases": [{"name": "a"}]}, "cases[0] must have the keys requests"),
        ({"cases": [{"name": "a", "requests": []}]}, "at least one request"),
        ({"cases": [{"name": "a", "requests": [{"kv_len": 4}]}]}, "cases[0].requests[0] must have the keys query_len"),
        ({"cases": shapes()["cases"] * 2}, "case names must differ, got 'a' twice"),
        (shapes(kv_length=4), "no keys but query_len, kv_len, count, chunked, num_draft_tokens, got 'kv_length'"),
        (shapes(kv_len="8"), "cases[0].requests[0]: kv_len must be int, got '8'"),
        (shapes(count=True), "count must be int, got True"),
        (shapes(chunked=1), "chunked must be bool, got 1"),
        (shapes(kv_len=3), "case must have K >= Q"),
        (shapes(kv_len=8, num_draft_tokens=-1), "D >= 0"),
    ],
)
def test_bad_shapes_are_one_sentence(tmp_path, content, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        load_shapes(write(tmp_path / "shapes.json", content))


def test_bad_yaml(tmp_path):
    with pytest.raises(ValueError, match="^shapes must be a file of cases, JSON or .* YAML, got "):
        load_shapes(write(tmp_path / "shapes.yml", "cases: ["))


def test_names_differ():
    check_names([parse_case("a=1"), parse_case("1")])
    with pytest.raises(ValueError, match="case names must differ, got 'a' twice"):
        check_names([parse_case("a=1"), parse_case("b=1"), parse_case("a=2")])


def test_jitter_draws_a_prefix_for_every_request():
    case = parse_case("mix=64,100*1@1001,4@504:3,8@1008c")
    drawn = jitter(case, 0.5, None)
    assert drawn == jitter(case, 0.5, None) != jitter(case, 0.5, None, seed=1)
    assert drawn.requests != jitter(replace(case, name="other"), 0.5, None).requests
    assert drawn.num_tokens == case.num_tokens
    fresh, *decodes, verify, chunk = drawn.requests
    assert fresh == case.requests[0]
    assert sum(r.count for r in decodes) == 100 and len({r.kv_len for r in decodes}) > 80
    assert min(r.prefix_len for r in decodes) in range(500, 520)
    assert max(r.prefix_len for r in decodes) in range(1480, 1501)
    assert replace(verify, kv_len=504) == case.requests[2] and 250 <= verify.prefix_len <= 750
    assert replace(chunk, kv_len=1008) == case.requests[3]


def test_jitter_is_vllms():
    """prefix * U(1 - f, 1 + f) with default_rng([seed, crc32(name)]), one draw a request in order."""
    draws = np.random.default_rng([7, zlib.crc32(b"d")]).uniform(0.5, 1.5, size=3)
    assert [r.prefix_len for r in jitter(parse_case("d=2*1@1001,4@1004"), 0.5, None, seed=7).requests] == [
        int(1000 * u) for u in draws
    ]


def test_jitter_stays_within_its_bounds():
    assert jitter(parse_case("a=8*1@2"), 1.0, None).requests == (Request(1, 2, 8),)  # at least 1: equal ones merge
    assert max(r.kv_len for r in jitter(parse_case("a=64*1@1000"), 0.5, 1100).requests) == 1100
    with pytest.raises(ValueError, match="case a: KV length must be <= 900, got 1000"):
        jitter(parse_case("a=64*1@1000"), 0.5, 900)
    case = parse_case("a=8*1@100")
    assert jitter(case, 0.0, 50) is case
    with pytest.raises(ValueError, match="kv-len-jitter must be a fraction from 0 to 1, got 1.5"):
        jitter(case, 1.5, None)
