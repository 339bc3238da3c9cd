"""The files that arguments name, read directly and through every command that takes one."""

import json

import pytest
import torch
from typer.testing import CliRunner

from moetail import cli
from moetail.bench import files, record

RECORD = record.record("forward", [{"model": "m"}], complete=True)
# What each command must say of a file that is none: the argument, and what it must be.
READ = {
    "compare A": (["bench", "compare", "FILE", "GOOD"], "A must be a record that a bench wrote"),
    "compare B": (["bench", "compare", "GOOD", "FILE"], "B must be a record that a bench wrote"),
    "resume": (["bench", "kernels", "--shape", "2,2,32", "--json", "FILE", "--resume", "--device", "cpu"],
               "json must be a record of kind kernels that a bench wrote"),
    "profile show": (["profile", "show", "FILE"], "file must be a kernels.json of --profile-dir"),
    "profile diff": (["profile", "diff", "FILE", "FILE"], "A must be a kernels.json of --profile-dir"),
    "shapes": (["bench", "forward", "--shapes", "FILE"], "shapes must be a file of cases"),
    "explain": (["explain", "FILE"], "model must be a built-in model, a transformers config.json"),
    "model": (["bench", "forward", "--model", "FILE"], "model must be a built-in model, a transformers config.json"),
}  # fmt: skip
CONTENTS = {"no JSON": b'{"a":', "empty": b"", "no text": bytes(range(256)), "a list": b"[]", "a number": b"3"}
WRITTEN = {
    "forward": ["bench", "forward", "--json"],
    "forward profile": ["bench", "forward", "--profile-dir"],
    "kernels": ["bench", "kernels", "--device", "cpu", "--json"],
    "kernels svg": ["bench", "kernels", "--device", "cpu", "--svg"],
    "conformance": ["conformance", "--impl", "moetail:finalize", "--json"],
    "selftest": ["bench", "selftest", "--device", "cpu", "--json"],
    "tune": ["tune", "finalize", "--shape", "2,32", "--out"],
}


def run(*args):
    """The one sentence of a usage error."""
    result = CliRunner().invoke(cli.app, list(map(str, args)))
    assert result.exit_code == cli.USAGE, (result.output, result.exception)
    (sentence,) = result.stderr.strip().splitlines()
    assert result.stdout == "" and sentence.startswith("moetail: ")
    return sentence.removeprefix("moetail: ")


@pytest.fixture
def good(tmp_path):
    record.write(tmp_path / "good.json", RECORD)
    return tmp_path / "good.json"


@pytest.mark.parametrize("command", READ)
def test_a_file_that_is_none(command, tmp_path, good):
    args, says = READ[command]
    path = tmp_path / "file.json"
    for content in CONTENTS.values():
        path.write_bytes(content)
        sentence = run(*({"FILE": path, "GOOD": good}.get(a, a) for a in args))
        assert sentence.startswith((says, f"shapes {path} must be a mapping"))
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing.json", tmp_path / "folder", tmp_path / "good.json" / "below"):
        if command == "resume" and not path.exists():
            continue  # then there is nothing to go on behind
        sentence = run(*({"FILE": path, "GOOD": good}.get(a, a) for a in args))
        assert sentence.startswith((says, "model must be one of", "json must be a file")) and str(path) in sentence


@pytest.mark.parametrize("path", ["missing.txt", "."])
def test_the_text_is_looked_at_before_a_model_is_loaded(path, tmp_path, monkeypatch):
    monkeypatch.setattr("moetail.bench.models.load_transformers", lambda *_: pytest.fail("loaded"))
    sentence = run("bench", "forward", "--text", tmp_path / path)
    assert sentence.startswith(f"text must be a file with content, got {tmp_path / path} (")
    (tmp_path / "empty.txt").touch()
    assert "(it is empty)" in run("bench", "forward", "--text", tmp_path / "empty.txt")


@pytest.mark.parametrize("command", WRITTEN)
def test_a_path_that_cannot_be_written(command, tmp_path, good, monkeypatch):
    """Said before anything is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: command == "tune")
    name = WRITTEN[command][-1].removeprefix("--")
    what = "a folder to write into" if name == "profile-dir" else "a file to write"
    for path in (good / "below.json", "/proc/moetail/r.json", *([] if name == "profile-dir" else [tmp_path])):
        assert run(*WRITTEN[command], path).startswith(f"{name} must be {what}, got ")


def test_readme_needs_a_checkout(tmp_path):
    assert run("bench", "readme", tmp_path).startswith("root must be a checkout with README.md, results and docs, got")
    before = "<!-- table: r.json -->\nold\n<!-- end -->\n"
    (tmp_path / "README.md").write_text(before)
    assert run("bench", "readme", tmp_path).startswith("table of README.md must be a record of kind forward or serve")
    record.write(tmp_path / "r.json", RECORD | {"kind": "selftest"})
    assert "(its kind is selftest)" in run("bench", "readme", tmp_path)
    assert (tmp_path / "README.md").read_text() == before


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema": 7}, "its schema is 7, and 1 is read here"), ({"rows": 3}, "it has no rows"),
     ({"rows": [1]}, "its rows are no objects"), ({"machine": None}, "it has no machine"),
     ({"complete": "x", "world_size": "x"}, "it has no complete, world_size")],
)  # fmt: skip
def test_a_record_that_is_none(change, says, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(RECORD | change))
    with pytest.raises(ValueError, match=f"^A must be a record that a bench wrote, got .*r.json \\({says}\\)$"):
        record.read("A", tmp_path / "r.json")


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "f").write_text('{"ä": 1}', encoding="utf-8")
    assert files.read_json("f", tmp_path / "f", "x") == {"ä": 1}
    assert files.read_bytes("f", tmp_path / "f", "x") == '{"ä": 1}'.encode()
