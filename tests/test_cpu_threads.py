"""Running a C function on torch's threads, and the pool where there is no OpenMP runtime."""

import ctypes
import multiprocessing
import threading

import numba
import numpy as np
import pytest
import torch

import moetail
from moetail.ops import cpu_threads
from moetail.ops.cpu_elements import _take
from moetail.testing import assert_same_bits, finalize_inputs


@numba.cfunc(numba.types.void(numba.types.CPointer(numba.types.int64)))
def add(argument):
    _take(argument, 1)


@pytest.mark.parametrize("runtime", ["torch's", "pool"])
@pytest.mark.parametrize("threads", [1, 2])
def test_runs_once_on_each_thread(runtime, threads, monkeypatch):
    if runtime == "pool":
        monkeypatch.setattr(cpu_threads, "_gomp_parallel", lambda: None)
    seen = set()
    lock = threading.Lock()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def note(argument):
        with lock:
            seen.add((threading.get_native_id(), argument))

    cpu_threads.run(ctypes.cast(note, ctypes.c_void_p).value, 4242, threads)
    assert {argument for _, argument in seen} == {4242}
    assert len(seen) <= threads
    cell = np.zeros(1, np.int64)
    cpu_threads.run(add.address, cell.ctypes.data, threads)
    assert cell[0] == threads


def test_torch_brings_its_runtime_on_linux():
    assert cpu_threads._gomp_parallel() is not None


def inputs():
    x = finalize_inputs(256, 8, 512)
    return (x.rows, x.row_map, x.weights, x.shared)


def test_calls_from_many_python_threads():
    args = inputs()
    want = moetail.reference.finalize(*args)
    failures = []

    def work():
        for _ in range(20):
            try:
                assert_same_bits(moetail.finalize(*args), want)
            except AssertionError as error:
                failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == [] and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_the_thread_count(threads):
    args = inputs()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_bits(moetail.finalize(*args), moetail.reference.finalize(*args))
    finally:
        torch.set_num_threads(before)


def child(queue):
    cell = np.zeros(1, np.int64)
    cpu_threads.run(add.address, cell.ctypes.data, 2)
    queue.put(int(cell[0]))


def test_the_pool_survives_a_fork(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_gomp_parallel", lambda: None)
    cell = np.zeros(1, np.int64)
    cpu_threads.run(add.address, cell.ctypes.data, 2)  # the parent's pool has a thread that the child will not have
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(60)
    assert not process.is_alive() and process.exitcode == 0
    assert cell[0] == queue.get() == 2
