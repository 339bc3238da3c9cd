"""Profiles read back, shown and compared; `moetail profile`."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from moetail.bench.profile import Kernel, Profile, capture
from moetail.bench.profile_diff import deltas, diff_header, grown, read
from moetail.cli import OK, USAGE, app

LONG = "vectorized_elementwise_kernel<" + "a_functor_with_a_long_name_" * 12 + "[bold]>"


def profile(span_us=100.0, busy_us=90.0, **kernels):
    rows = tuple(Kernel(name, us, calls, name) for name, (us, calls) in kernels.items())
    return Profile(span_us, busy_us, rows, 3)


STOCK = profile(gemm=(50.0, 2), gather=(20.0, 1), sum_=(15.0, 1), add=(5.0, 1))
OURS = profile(90.0, 85.0, gemm=(58.0, 2), finalize=(12.0, 1), add=(5.5, 1), sum_=(15.0, 1))


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def run(*args):
    done = CliRunner().invoke(app, ["profile", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


def test_grown_orders_by_growth_and_counts_a_new_kernel():
    assert [(d.name, d.delta_us) for d in grown(STOCK, OURS)] == [("finalize", 12.0), ("gemm", 8.0), ("add", 0.5)]
    assert grown(STOCK, STOCK) == ()


def test_deltas_order_by_size_and_hold_both_sides():
    rows = deltas(STOCK, OURS)
    assert [d.name for d in rows] == ["gather", "finalize", "gemm", "add", "sum_"]
    assert (rows[0].a_us, rows[0].b_us, rows[0].a_calls, rows[0].b_calls) == (20.0, 0.0, 1, 0)
    assert (rows[1].a_us, rows[1].b_us, rows[1].a_calls, rows[1].b_calls) == (0.0, 12.0, 0, 1)


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    written = capture(lambda: torch.ones(64, 64).sum(), "x", torch.device("cpu"), folder=tmp_path)
    assert read("x", tmp_path / "x.rank0.kernels.json") == written


def test_diff_header():
    assert diff_header(STOCK, OURS) == "span 100.0 -> 90.0 us (-10.0), busy 90.0 -> 85.0 us (-5.0)"


def test_diff_names_a_planted_slower_operator(tmp_path):
    with torch.library._scoped_library("moetail_test_profile", "FRAGMENT") as library:
        library.define("work(Tensor x) -> Tensor")
        pause = [0.0]

        def work(x):
            time.sleep(pause[0])
            return x.clone()

        library.impl("work", work, "CPU")
        x = torch.ones(8)

        def program():
            torch.ops.moetail_test_profile.work(x)
            return torch.softmax(x + x, 0)

        program()
        capture(program, "a", torch.device("cpu"), folder=tmp_path)
        pause[0] = 0.05
        capture(program, "b", torch.device("cpu"), folder=tmp_path)
    code, out, err = run("diff", tmp_path / "a.rank0.kernels.json", tmp_path / "b.rank0.kernels.json", "--top", 1)
    lines = out.splitlines()
    assert (code, err, len(lines)) == (OK, "", 3)
    assert lines[0].startswith("span ") and " ".join(lines[1].split()) == "delta us A us B us A n B n kernel"
    assert lines[2].split()[-1] == "moetail_test_profile::work"
    assert 50_000 <= float(lines[2].split()[0]) < 500_000


def test_show(tmp_path):
    shown = Profile(100.0, 90.0, (Kernel(LONG, 72.0, 4, LONG), Kernel("b", 24.0, 0.5, "b")), 3, 7.0, 5)
    path = write(tmp_path / "a.kernels.json", shown.content("a.trace.json.gz"))
    assert read("x", path) == shown
    code, out, err = run("show", path)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (OK, "")
    assert out.splitlines()[0] == "span 100.0 us, busy 90.0 us (90.0% of the span), 5 activities; the mean of 3 replays"
    assert lines[1:] == [["us", "%", "calls", "kernel"], ["72.00", "75.0", "4", LONG], ["24.00", "25.0", "0.5", "b"]]
    assert len(run("show", path, "--top", 1)[1].splitlines()) == 3


GOOD = STOCK.content("x.trace.json.gz")
BAD = {
    "a list": [1],
    "no span": {k: v for k, v in GOOD.items() if k != "span_us"},
    "a negative time": {**GOOD, "busy_us": -1.0},
    "not a number": {**GOOD, "span_us": float("nan")},
    "a kernel without calls": {**GOOD, "kernels": [{"name": "a", "us": 1.0, "example": "a"}]},
    "a kernel twice": {**GOOD, "kernels": [GOOD["kernels"][0]] * 2},
    "a record": {"schema": 1, "kind": "forward", "rows": []},
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_a_file_that_is_no_profile(tmp_path, content):
    bad, good = write(tmp_path / "bad.json", content), write(tmp_path / "good.json", GOOD)
    for name, args in (("file", ("show", bad)), ("B", ("diff", good, bad)), ("A", ("diff", bad, good))):
        code, out, err = run(*args)
        assert (code, out, len(err.splitlines())) == (USAGE, "", 1)
        assert err.startswith(f"moetail: {name} must be a kernels.json of --profile-dir, got {bad} (")


def test_a_file_that_is_no_json_or_not_there(tmp_path):
    (tmp_path / "trace.json.gz").write_bytes(b"\x1f\x8b\x08\xff")
    for name in ("trace.json.gz", "missing.json", "."):
        code, out, err = run("show", tmp_path / name)
        assert (code, out, len(err.splitlines())) == (USAGE, "", 1)
        assert err.startswith(f"moetail: file must be a kernels.json of --profile-dir, got {tmp_path / name} (")
