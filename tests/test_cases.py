"""The case grammar."""

import pytest

from moetail.bench.cases import Case, Request, parse_case


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
      "a=1@", "a=-1", "a=1,,2", "a=4c", "a=1@8c", "a=4:3", "a=4@8:2", "a=1 2"]
)  # fmt: skip
def test_bad_cases(text):
    with pytest.raises(ValueError, match="^case must"):
        parse_case(text)
