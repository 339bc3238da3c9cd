"""The record: whole or not there, with the machine in it."""

import json

import pytest

from moetail.bench import record


def test_fields():
    content = record.record("forward", [{"case": "a"}], complete=True)
    assert content["schema"] == 1 and content["complete"] is True and content["rows"] == [{"case": "a"}]
    assert {"gpu", "cpu", "driver", "torch", "python", "commit", "dirty", "date"} <= content["machine"].keys()


def test_commit_can_be_passed_in(monkeypatch):
    monkeypatch.setenv("MOETAIL_COMMIT", "abc123")
    assert record.machine()["commit"] == "abc123"


def test_written_whole(tmp_path):
    path = tmp_path / "new" / "r.json"
    record.write(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_a_failed_write_leaves_the_old_record(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    record.write(path, {"a": 1})

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        record.write(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
