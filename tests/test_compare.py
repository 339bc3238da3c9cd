"""compare on records whose truth is known, and what it refuses."""

import copy
import json

import pytest
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import compare

MACHINE = {"gpu": "G", "torch": "2.11", "commit": "a", "date": "1"}


def forward_record(value=0.9, verdict="faster", **machine):
    row = {
        "model": "m", "case": "c", "arms": {"stock": {"median_us": 1000.0}, "moetail": {"median_us": 1000.0 * value},
                                            "control": {"median_us": 1000.0}},
        "ratio": {"b_over_a": value, "low": value - 0.01, "high": value + 0.01}, "verdict": verdict,
    }  # fmt: skip
    return {
        "schema": 1,
        "kind": "forward",
        "complete": True,
        "world_size": 1,
        "machine": MACHINE | machine,
        "rows": [row],
    }


def kernels_record(value):
    row = {"case": "T=1", "l2": "cold", "us": 1.0, "ratios": {"eager": {"value": value, "low": value, "high": value}}}
    return {"schema": 1, "kind": "kernels", "complete": True, "world_size": 1, "machine": MACHINE, "rows": [row]}


@pytest.mark.parametrize(
    ("b", "word"),
    [
        (forward_record(0.9), "same"),
        (forward_record(0.915), "same"),  # intervals overlap
        (forward_record(0.93), "worse"),
        (forward_record(0.87), "better"),
        (forward_record(0.9, verdict="slower"), "worse"),
        (forward_record(0.87, verdict="implausible"), "worse"),
    ],
)
def test_words(b, word):
    (line,) = compare.compare(forward_record(), b).lines
    assert line.word == word and line.ours_ms[0] == pytest.approx(0.9)


def test_kernels_ratios_are_turned_round():
    (line,) = compare.compare(kernels_record(2.0), kernels_record(1.5)).lines
    assert line.word == "worse" and line.ratio[0][0] == 0.5


def test_times_only_on_one_machine():
    found = compare.compare(forward_record(), forward_record(torch="2.12"))
    assert found.changed == ("torch: 2.11 -> 2.12",) and found.lines[0].ours_ms is None
    assert compare.compare(forward_record(), forward_record(commit="b", date="2")).changed == ()


def test_records_of_what_stands_before_the_tail():
    """Their rows have no l2, and name their op: another op's row is another case."""
    a, b = kernels_record(2.0), kernels_record(1.5)
    for content, op in ((a, "route"), (b, "permute")):
        del content["rows"][0]["l2"]
        content["rows"][0]["op"] = op
    (line,) = compare.compare(a, a).lines
    assert line.case == "route T=1: eager"
    with pytest.raises(ValueError, match="^A and B must have a case in common"):
        compare.compare(a, b)


def test_cases_of_one_record_only_are_named():
    b = forward_record()
    b["rows"].append(copy.deepcopy(b["rows"][0]) | {"case": "d"})
    assert compare.compare(forward_record(), b).only == ("m d (B only)",)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (forward_record(), kernels_record(2.0), "A and B must be of one kind"),
        (forward_record() | {"complete": False}, forward_record(), "A must be a complete record"),
        (forward_record(), forward_record() | {"rows": []}, "must have a case in common"),
        (forward_record(), forward_record() | {"schema": 9}, "its schema is 9, and 1 is read here"),
        (forward_record() | {"kind": "selftest"}, forward_record(), "A must be a record of bench forward"),
        (forward_record(), forward_record() | {"rows": [{"case": "c"}]}, "B must have rows as a bench writes them"),
        (forward_record(), forward_record() | {"rows": [{**forward_record()["rows"][0], "ratio": {}}]}, "'b_over_a'"),
    ],
)
def test_refused(tmp_path, a, b, says):
    assert says in " ".join(run(tmp_path, a, b, cli.USAGE).split())


def test_command(tmp_path):
    assert "better" in run(tmp_path, forward_record(), forward_record(0.8), cli.OK)
    assert "not interleaved" in run(tmp_path, forward_record(), forward_record(0.99), cli.SLOWER)
    (tmp_path / "a.json").write_text("{")
    result = CliRunner().invoke(cli.app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert result.exit_code == cli.USAGE and "A must be a record that a bench wrote" in " ".join(result.output.split())


def run(folder, a, b, code):
    for name, content in (("a", a), ("b", b)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    result = CliRunner().invoke(cli.app, ["bench", "compare", str(folder / "a.json"), str(folder / "b.json")])
    assert result.exit_code == code, result.output
    return result.output
