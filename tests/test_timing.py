"""Interleaving, and that a known duration is measured."""

import time

import pytest

from moetail.bench import timing

pytestmark = pytest.mark.alone


def test_rounds_are_palindromes_in_changing_order():
    order = []

    def arm(name):
        return timing.Arm(name, lambda: order.append(name) or float(len(order)))

    samples, paired = timing.interleave([arm("a"), arm("b"), arm("c")], rounds=30)
    rounds = ["".join(order[i : i + 6]) for i in range(0, 180, 6)]
    assert all(r == r[::-1] for r in rounds) and len(set(rounds)) == 6
    assert {r[0] for r in rounds} == {"a", "b", "c"}
    assert {name: len(values) for name, values in samples.items()} == {"a": 60, "b": 60, "c": 60}
    assert paired["a"][0] == (1 + 6) / 2  # a drift of one a run falls on all arms alike
    assert paired["a"][0] == paired["b"][0] == paired["c"][0]


def test_cpu_arm_times_the_program_and_not_its_preparation():
    arm = timing.cpu_arm("sleep", lambda: time.sleep(0.01), prepare=lambda: time.sleep(0.05))
    assert 10_000 <= arm.run() < 40_000


def test_warm_up_lasts_and_reports_the_slowest():
    arms = [timing.Arm("a", lambda: 1.0), timing.Arm("b", lambda: 3.0)]
    start = time.perf_counter()
    assert timing.warm_up(arms, 0.05) == 3.0
    assert time.perf_counter() - start >= 0.05


class Never:
    def query(self):
        return False


def test_an_arm_that_does_not_end_is_an_error_with_its_name(monkeypatch):
    monkeypatch.setattr(timing, "_PATIENCE_S", 0.02)
    with pytest.raises(RuntimeError, match="finalize \\+ nccl did not end within 0.02 s"):
        timing._wait(Never(), "finalize + nccl")


@pytest.mark.gpu
def test_graph_arm_measures_the_gpu():
    import torch

    x = torch.zeros(2**28, device="cuda")
    one, four = (timing.cuda_graph_arm(str(n), lambda: x.add_(1.0), repeats=n) for n in (1, 4))
    timing.warm_up([one, four], 0.2)
    per_call = [sorted(arm.run() for _ in range(9))[4] for arm in (one, four)]
    bandwidth = 2 * x.numel() * 4 / per_call[0] / 1e6
    assert 1.0 < bandwidth < 4.9, f"{bandwidth} TB/s"
    assert per_call[1] == pytest.approx(per_call[0], rel=0.1)
