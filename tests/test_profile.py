"""What a profile counts: operators and kernels, once each, in the forward and not before it; and its files."""

import gzip
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moetail.bench import profile, timing
from moetail.bench.profile import Activity, capture, summarize

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


def program():
    x = torch.ones(96, 96)
    for _ in range(4):
        x = torch.softmax(x @ x, 0)
    return x


def kernel(name, start, end):
    return Activity(name, start, end, end - start)


def test_operators_and_calls():
    program()
    got = capture(program, "small", CPU, replays=2)
    calls = {k.name: k.calls for k in got.kernels}
    assert calls["aten::mm"] == 4 and calls["aten::_softmax"] == 4 and calls["aten::ones"] == 1
    assert got.replays == 2 and got.activities == sum(calls.values())
    assert [k.us for k in got.kernels] == sorted((k.us for k in got.kernels), reverse=True)


def test_self_times_count_no_child_twice():
    got = capture(program, "small", CPU, replays=1)  # medians of several do not add up
    assert sum(k.us for k in got.kernels) == pytest.approx(got.busy_us)
    assert got.busy_us <= got.span_us


def test_own_times():
    nested = [(1, 0, 100), (1, 10, 40), (1, 20, 30), (1, 50, 60), (2, 15, 95), (1, 100, 110)]
    assert profile.own_ns(nested) == [60, 20, 10, 10, 80, 10]


def test_kernels_that_overlap_are_busy_once():
    pdl = [kernel("a", 0, 4000), kernel("b", 3000, 6000), kernel("d", 8000, 9000), kernel("c", 8100, 8200)]
    got = summarize(pdl, replays=1)
    assert (got.span_us, got.busy_us, sum(k.us for k in got.kernels)) == (9.0, 7.0, 8.1)


def test_what_restores_the_state_is_not_the_forward():
    once = [kernel("copy", 0, 1000), kernel("copy", 1000, 3000), kernel("gemm", 5000, 9000), kernel("copy", 9000, 9500)]
    later = [Activity(a.name, a.start_ns + 50_000, a.end_ns + 52_000, a.own_ns + 2000) for a in once]
    got = summarize(once + later, replays=2, pre_activities=2)
    assert {k.name: (k.us, k.calls) for k in got.kernels} == {"gemm": (5.0, 1), "copy": (1.5, 1)}
    assert got.pre_forward_us == (3 + 7) / 2 and got.activities == 2
    assert got.span_us == (4.5 + 6.5) / 2


def test_device_activities_are_this_gpus_work():
    """Not the launches on the host, not another GPU's kernels, not the GPU's copy of a user's annotation."""

    def event(name, where, index, annotation=False):
        return SimpleNamespace(
            name=lambda: name, device_type=lambda: where, device_index=lambda: index, start_ns=lambda: 10,
            end_ns=lambda: 30, is_user_annotation=lambda: annotation,
        )  # fmt: skip

    cuda, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [event("gemm", cuda, 1), event("other", cuda, 0), event("cudaGraphLaunch", host, 1)]
    events.append(event("forward/x", cuda, 1, annotation=True))
    assert profile._device_activities(events, 1) == [Activity("gemm", 10, 30, 20)]


def test_an_annotation_is_no_operator():
    def annotated():
        with torch.profiler.record_function("mine"):
            torch.ones(4)

    annotated()
    assert "mine" not in {k.name for k in capture(annotated, "x", CPU).kernels}


def test_replays_that_differ_are_no_profile():
    with pytest.raises(RuntimeError, match="do not repeat"):
        summarize([kernel("a", 0, 1), kernel("b", 2, 3), kernel("a", 4, 5), kernel("c", 6, 7)], replays=2)
    with pytest.raises(RuntimeError, match="do not repeat"):
        summarize([kernel("a", 0, 1)] * 3, replays=2)


def test_bad_input():
    with pytest.raises(ValueError, match="replays must be at least 1, got 0"):
        capture(program, "small", CPU, replays=0)
    with pytest.raises(ValueError, match="pre_activities must be 0 or more and below a replay's 1, got 1"):
        summarize([kernel("a", 0, 1)], replays=1, pre_activities=1)
    with pytest.raises(RuntimeError, match="recorded nothing"):
        capture(lambda: None, "empty", CPU)


def test_files(tmp_path):
    program()
    got = capture(program, "mix 8*1@2048/a", CPU, folder=tmp_path / "new", rank=1)
    stem = "mix%208%2A1@2048%2Fa.rank1"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [f"{stem}.kernels.json", f"{stem}.trace.json.gz"]
    trace = json.loads(gzip.decompress((tmp_path / "new" / f"{stem}.trace.json.gz").read_bytes()))
    assert sum(e.get("name") == "aten::mm" for e in trace["traceEvents"]) == 3 * 4
    content = json.loads((tmp_path / "new" / f"{stem}.kernels.json").read_text())
    assert set(content) == {"trace", "replays", "span_us", "busy_us", "pre_forward_us", "activities", "kernels"}
    assert content["trace"] == f"{stem}.trace.json.gz" and content["span_us"] == got.span_us
    assert set(content["kernels"][0]) == {"name", "us", "pct", "calls", "example"}
    assert sum(k["pct"] for k in content["kernels"]) == pytest.approx(100)


def test_a_trace_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(self, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        capture(program, "small", CPU, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_distinct_names_have_distinct_files():
    names = ["a b", "a_b", "a%20b", "a/b", "a*b", "A", "a", "8*1@2048", "8,1@2048", "..", "é"]
    stems = {profile.file_stem(name) for name in names}
    assert len(stems) == len(names) and not any("/" in stem for stem in stems)


def test_stderr_stays_clean():
    code = (
        "import os, torch; from moetail.bench import memory, profile; cpu = torch.device('cpu')\n"
        "memory.peak_bytes(lambda: torch.ones(9), cpu); profile.capture(lambda: torch.ones(9), 'x', cpu)\n"
        "assert 'KINETO_LOG_LEVEL' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.gpu
def test_kernels_of_a_graph_add_up_to_its_events():
    """Kernels of 100 us and more, so that the gaps between them are not in the comparison."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(2**27, device="cuda")

    def forward():
        for _ in range(3):
            a @ a
            x.add_(1.0)

    arm = timing.cuda_graph_arm("graph", forward, prepare=lambda: x.copy_(x.flip(0)))
    timing.warm_up([arm], 0.2)
    times = []
    got = capture(lambda: times.append(arm.run()), "graph", a.device, pre_activities=2)
    assert sum(k.us for k in got.kernels) == pytest.approx(sum(times) / 3, rel=0.03)
    assert got.span_us == pytest.approx(sum(times) / 3, rel=0.03)
    calls = {k.name: k.calls for k in got.kernels}
    assert calls.pop("vectorized_elementwise_kernel<CUDAFunctorOnSelf_add>") == 3 and max(calls.values()) == 3
    assert got.pre_forward_us > 100


def test_a_replay_is_bracketed_for_nsight(monkeypatch):
    """The GPU's work ends inside the brackets, and a name is no format string."""
    seen = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    profile.replay(lambda: seen.append("run"), "a{b}", torch.device("cuda", 0), replays=2)
    assert " ".join(seen) == "wait start forward/a{b} run wait run wait pop stop"


def test_a_cpu_has_no_brackets(monkeypatch):
    monkeypatch.setattr(torch.cuda.profiler, "start", None)
    calls = []
    profile.replay(lambda: calls.append(1), "x", CPU, replays=3)
    assert calls == [1, 1, 1]
