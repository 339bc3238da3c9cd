"""no_jit sees a compilation, no_host_sync a host that waits; both restore what was there and are silent otherwise."""

import threading
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moetail import guards


def test_numba_compilation_is_seen():
    import numba

    @numba.njit
    def fresh(x):
        return x + 1

    with guards.no_jit("warn") as seen, pytest.warns(RuntimeWarning, match="numba compiled .*fresh"):
        fresh(1)
    assert [event.compiler for event in seen] == ["numba"]
    with guards.no_jit() as seen:
        fresh(2)
    assert seen == []
    with pytest.raises(RuntimeError, match="fresh"), guards.no_jit():
        fresh(1.5)  # another specialization


def test_triton_hook_is_chained_and_restored():
    from triton import knobs

    calls = []
    knobs.runtime.jit_post_compile_hook = before = lambda **event: calls.append(event["repr"])
    try:
        with guards.no_jit("warn") as seen:
            kernel = type("Fn", (), {"name": "finalize"})
            with pytest.warns(RuntimeWarning, match="triton compiled finalize: T is 1"):
                knobs.runtime.jit_post_compile_hook(fn=kernel, repr="T is 1", is_manual_warmup=False)
            with pytest.warns(RuntimeWarning, match="warm-up"):
                knobs.runtime.jit_post_compile_hook(fn=kernel, repr="warm-up", is_manual_warmup=True)
        assert calls == ["T is 1", "warm-up"] and len(seen) == 2
        assert knobs.runtime.jit_post_compile_hook is before
    finally:
        knobs.runtime.jit_post_compile_hook = None


def test_the_hook_is_put_back_after_an_error():
    from triton import knobs

    with pytest.raises(KeyError), guards.no_jit():
        raise KeyError
    assert knobs.runtime.jit_post_compile_hook is None


@pytest.mark.parametrize("guard", [guards.no_jit, guards.no_host_sync])
def test_unknown_mode(guard):
    for mode in ("off", "default", None):
        with pytest.raises(ValueError, match="^mode must be 'error' or 'warn', got"), guard(mode):
            pass


@pytest.fixture
def sync_mode(monkeypatch):
    """A GPU's sync-debug mode where there is none."""
    state = types.SimpleNamespace(now=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state.now)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda level: setattr(state, "now", level))
    return state


def test_the_sync_mode_is_scoped_and_put_back(sync_mode):
    for before in (0, 1, 2):
        sync_mode.now = before
        with guards.no_host_sync("warn"):
            assert sync_mode.now == max(before, 1)  # never weaker than what was set
            with pytest.raises(KeyError), guards.no_host_sync("error"):
                assert sync_mode.now == 2
                raise KeyError
            assert sync_mode.now == max(before, 1)
            with guards.no_host_sync("warn"):
                pass
            assert sync_mode.now == max(before, 1)
        assert sync_mode.now == before and guards._sync_levels == []


def test_two_threads_share_the_strictest_mode(sync_mode):
    """The first to enter is the first to leave: the mode goes back with the last."""
    entered, leave, modes = threading.Event(), threading.Event(), []

    def first():
        with guards.no_host_sync("error"):
            entered.set()
            assert leave.wait(10)
        modes.append(sync_mode.now)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    with guards.no_host_sync("warn"):
        modes.append(sync_mode.now)
        leave.set()
        thread.join()
        modes.append(sync_mode.now)
    assert modes == [2, 1, 1] and sync_mode.now == 0


@pytest.fixture
def copies_wait(monkeypatch):
    """Any copy counts as one to a GPU, where there is none."""
    monkeypatch.setattr(guards, "_host_waits", lambda *_: True)


def upload():
    return torch.ones(3, 4).to(torch.float16)


def test_copies_are_watched_in_their_own_thread(sync_mode, copies_wait):
    with guards.no_host_sync("error") as seen:
        thread = threading.Thread(target=upload)
        thread.start()
        thread.join()
        assert seen == []
        with pytest.raises(RuntimeError, match="no_host_sync"):
            upload()
    assert len(seen) == 1
    upload()  # no longer watched


def test_a_copy_is_a_warning_or_an_error(sync_mode, copies_wait):
    with guards.no_host_sync("warn") as seen, pytest.warns(RuntimeWarning, match=r"no_host_sync: a copy of .*\(3, 4\)"):
        upload()
    assert len(seen) == 1
    with guards.no_host_sync("error"), guards.no_host_sync("warn"):  # the strictest of both
        with pytest.raises(RuntimeError, match="no_host_sync"), pytest.warns(RuntimeWarning):
            upload()


def test_without_a_gpu_nothing_is_watched(monkeypatch, copies_wait):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with guards.no_host_sync() as seen:
        upload()
    assert seen == [] and guards._sync_levels == []


@pytest.mark.parametrize(
    ("source", "source_pinned", "destination", "destination_pinned", "waits"),
    [
        ("cpu", False, "cuda", False, True),
        ("cpu", True, "cuda", False, False),
        ("cuda", False, "cpu", False, True),
        ("cuda", False, "cpu", True, False),
        ("cuda", False, "cuda", False, False),
        ("cpu", False, "cpu", False, False),
        ("cpu", False, "meta", False, False),
    ],
)
def test_which_copies_wait(source, source_pinned, destination, destination_pinned, waits):
    assert guards._host_waits(source, source_pinned, destination, destination_pinned) is waits


def test_copies_are_found():
    aten = torch.ops.aten
    to, copy, each = aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default
    with FakeTensorMode():
        host, gpu = torch.empty(3, 4), torch.empty(3, 4, device="cuda")
        none = torch.empty(0, device="cuda")
    late = {"non_blocking": True}
    silent = [
        (aten.add.Tensor, (host, host), {}), (to, (host,), {"dtype": torch.half}), (to, (gpu,), {"dtype": torch.half}),
        (to, (gpu,), {"device": "cpu"} | late), (to, (gpu,), {"device": "cpu", "pin_memory": True}),
        (copy, (gpu, gpu), {}), (copy, (host, host), {}), (to, (none,), {"device": "cpu"}), (each, ([gpu], [gpu]), {}),
    ]  # fmt: skip
    for call in silent:
        assert guards._waiting_copies(*call) == []
    for call, source, destination in (
        ((to, (host,), {"device": "cuda"}), "cpu", "cuda"),
        ((to, (host,), {"device": torch.device("cuda", 1), "dtype": torch.half} | late), "cpu", "cuda:1"),
        ((to, (gpu,), {"device": "cpu"}), "cuda:0", "cpu"),
        ((copy, (gpu, host), late), "cpu", "cuda:0"),
        ((copy, (host, gpu, True), {}), "cuda:0", "cpu"),
        ((each, ([gpu, gpu], [gpu, host]), late), "cpu", "cuda:0"),
    ):
        (found,) = guards._waiting_copies(*call)
        assert (found.source, found.destination) == (source, destination)
    assert str(found) == ("a copy of torch.float32 (3, 4) from cpu to cuda:0 makes the host wait: pin the host memory")


def test_compiled_code_stays_compiled_under_the_watch():
    calls = []

    def backend(graph, example_inputs):
        return lambda *args: (calls.append(1), graph(*args))[1]

    def function(x):
        return x + 1

    with guards._CopyWatch(lambda copy: None):
        assert torch.compile(function, backend=backend)(torch.zeros(2)).sum() == 2
    assert calls == [1]


@pytest.mark.gpu
def test_a_real_triton_compilation_is_seen():
    import moetail
    from moetail.testing import finalize_inputs

    x = finalize_inputs(2, 3, 328, device="cuda")  # a hidden size no other test has
    with pytest.raises(RuntimeError, match="_finalize_kernel"), guards.no_jit():
        moetail.finalize(x.rows, x.row_map, x.weights)
    moetail.finalize(x.rows, x.row_map, x.weights)  # the configs of the other T
    with guards.no_jit():
        moetail.finalize(x.rows, x.row_map, x.weights)


@pytest.mark.gpu
def test_a_real_host_sync_is_seen():
    import moetail
    from moetail.testing import finalize_inputs

    x = finalize_inputs(2, 3, 328, device="cuda")
    moetail.finalize(x.rows, x.row_map, x.weights)
    pinned, gpu = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with guards.no_host_sync():
        moetail.finalize(x.rows, x.row_map, x.weights)
        gpu.copy_(pinned, non_blocking=True)
        for waits in (
            gpu.sum().item, gpu.nonzero, lambda: gpu.copy_(torch.ones(4), non_blocking=True), gpu.tolist,
            lambda: torch.tensor([1.0], device="cuda"), lambda: pinned.to("cuda"),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="synchroniz|no_host_sync"):
                waits()
    with guards.no_host_sync("warn"), pytest.warns(UserWarning, match="synchroniz"):
        gpu.sum().item()
    assert torch.cuda.get_sync_debug_mode() == before
    gpu.sum().item()
