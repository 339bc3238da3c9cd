"""The lazy routed sum: what it absorbs, and that everything else sees the right tensor."""

import pytest
import torch

from moetail import Numerics, TailSpec, UnfinalizedMoEOutput, reference
from moetail.integrations.deferred import DeferredRoutedSum
from moetail.testing import assert_same_bits, finalize_inputs

T, K, H = 6, 3, 32
TAIL = TailSpec(Numerics.TRANSFORMERS)


@pytest.fixture
def x():
    return finalize_inputs(T, K, H)


@pytest.fixture
def deferred(x):
    return DeferredRoutedSum(UnfinalizedMoEOutput(x.rows, x.row_map, x.weights), TAIL, (T, H))


@pytest.fixture
def routed(x):
    return reference.finalize(x.rows, x.row_map, x.weights, numerics=Numerics.TRANSFORMERS)


@pytest.fixture
def finalize_calls(monkeypatch):
    """The `shared` argument of each finalize."""
    calls = []
    real = UnfinalizedMoEOutput.finalize
    monkeypatch.setattr(
        UnfinalizedMoEOutput, "finalize", lambda self, shared, tail: (calls.append(shared), real(self, shared, tail))[1]
    )
    return calls


@pytest.mark.parametrize(
    "use",
    [
        lambda d, s: d + s,
        lambda d, s: s + d,
        lambda d, s: torch.add(d, s),
        lambda d, s: s.add(d),
        lambda d, s: d.view(2, 3, H).to(torch.bfloat16).contiguous().view(-1, H) + s,
        lambda d, s: (d.reshape((3, 2, H)) + s.view(3, 2, H)).view(T, H),
        lambda d, s: d.to("cpu", non_blocking=True) + s.t().contiguous().t(),
    ],
)
def test_the_add_is_one_finalize(use, deferred, routed, x, finalize_calls):
    assert_same_bits(use(deferred, x.shared), routed + x.shared)
    assert len(finalize_calls) == 1 and finalize_calls[0] is not None


def test_a_routed_scale_is_absorbed(deferred, routed, x, finalize_calls):  # laguna, minimax_m3: a third rounding
    assert_same_bits(deferred * 2.5 + x.shared, routed * 2.5 + x.shared)
    assert len(finalize_calls) == 1
    assert_same_bits(deferred * 2.5 * 1.5, routed * 2.5 * 1.5)  # a second factor finds a tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda d, s: d.float() + s.float(),
        lambda d, s: d.to(torch.float32),
        lambda d, s: d + 1.0,
        lambda d, s: d + s[:1],  # broadcast
        lambda d, s: d + s.float(),
        lambda d, s: torch.add(d, s, alpha=2),
        lambda d, s: torch.nn.functional.silu(d),
        lambda d, s: d.flatten(),
        lambda d, s: d.view(H, T),
        lambda d, s: d.view(torch.int16),
        lambda d, s: d[2:4],
        lambda d, s: -d,
        lambda d, s: d - s,
        lambda d, s: s - d,
        lambda d, s: d / 2,
        lambda d, s: d * s,
        lambda d, s: d @ s.t(),
        lambda d, s: d == s,
        lambda d, s: torch.cat([s, d]),
        lambda d, s: torch.stack([*d]),
    ],
)
def test_everything_else_sees_the_tensor(use, deferred, routed, x):
    got, want = use(deferred, x.shared), use(routed, x.shared)
    assert type(got) is torch.Tensor
    assert got.dtype == want.dtype and torch.equal(got, want)


def test_two_deferred_values_add(deferred, routed):
    assert_same_bits(deferred + deferred, routed + routed)


def test_the_tensor_is_computed_once(deferred, finalize_calls):
    assert deferred.float() is not None and deferred.tensor() is deferred.tensor()
    assert len(finalize_calls) == 1


def test_in_place_add_gives_a_tensor(deferred, routed, x):
    shared, value = x.shared.clone(), deferred
    value += shared
    assert_same_bits(value, routed + x.shared)
    shared += deferred
    assert_same_bits(shared, routed + x.shared)


def test_facts_without_computing(deferred, finalize_calls):
    assert (deferred.shape, deferred.dtype, deferred.ndim, deferred.dim(), deferred.size(0)) == (
        (T, H),
        torch.bfloat16,
        2,
        2,
        T,
    )
    assert "DeferredRoutedSum" in repr(deferred)
    assert not hasattr(deferred, "__deepcopy__") and finalize_calls == []
