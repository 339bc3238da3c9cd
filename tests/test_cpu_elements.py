"""One element on a CPU: torch's roundings, for every bit pattern; and that an edit of this code is compiled anew."""

import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

from moetail.ops.cpu_elements import TAGS, _load, _row, _store

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def loaded(stored):
    """fp32 of each element."""
    tag, out = TAGS[stored.dtype], torch.empty(stored.shape, dtype=F32)

    @numba.njit
    def run(source, target, n):
        x, y = _row(source, tag, n), _row(target, np.float32(0), n)
        for i in range(n):
            y[i] = _load(x[i])

    run(stored.data_ptr(), out.data_ptr(), stored.numel())
    return out


def stored(values, dtype):
    """Each fp32, rounded."""
    tag, out = TAGS[dtype], torch.empty(values.shape, dtype=dtype)

    @numba.njit
    def run(source, target, n):
        x, y = _row(source, np.float32(0), n), _row(target, tag, n)
        for i in range(n):
            y[i] = _store(x[i], tag)

    run(values.data_ptr(), out.data_ptr(), values.numel())
    return out


def same(got, want):
    """In bits, but for which NaN it is."""
    assert torch.equal(got.isnan(), want.isnan())
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    there = ~want.isnan()
    assert torch.equal(got[there].view(bits), want[there].view(bits))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_element_is_read_exactly(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    same(loaded(every), every.float())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_tie_and_its_neighbours_are_rounded_as_torch_does(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    finite = every[every.isfinite()]
    middle = (finite + finite.sort().values.roll(-1)[finite.sort().indices.argsort()]) / 2
    values = torch.cat([every, *(middle.view(torch.int32).add(i).view(F32) for i in (-1, 0, 1))])
    same(stored(values, dtype), values.to(dtype))
    assert stored(torch.tensor([float("nan")]), BF16).view(torch.int16).item() == 0x7FC0


def test_fp32_stays():
    values = torch.randn(1000)
    assert torch.equal(loaded(values), values) and torch.equal(stored(values, F32), values)


CACHED = """
import glob, sys, torch
from moetail.ops import cpu_elements, finalize_cpu, finalize_norm_cpu
for module in (finalize_cpu, finalize_norm_cpu):
    module.SOURCE = int(sys.argv[1])
finalize_cpu._compiled(torch.bfloat16, 2, 1, 1, 1, 0, True, False)
finalize_norm_cpu._compiled(torch.bfloat16, False)
print(*(len(glob.glob(f"{sys.argv[2]}/**/{name}.*.nbc", recursive=True)) for name in ("finalize_cpu*", "*norm_cpu*")))
"""


def test_an_edit_here_is_compiled_anew(tmp_path, monkeypatch):
    """numba's cache on disk knows the file of a kernel, not the files whose code is inside it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def kernels(source):
        done = subprocess.run(
            [sys.executable, "-c", CACHED, str(source), str(tmp_path)], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert kernels(1) == kernels(1) == ["1", "1"]
    assert kernels(2) == ["2", "2"]
