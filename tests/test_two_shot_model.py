"""The two-shot protocol holds in every interleaving, and the checker sees what is wrong with its neighbours."""

import pytest
from two_shot_model import Model, Protocol

R, S, N = "reduce", "scatter", "other"
# name: (ranks, programs of a rank, (op, tiles) of each call)
HOLDS = {
    "two-ranks": (2, 1, ((R, 4), (R, 2), (N, 0), (R, 4))),
    "scatters": (2, 1, ((S, 4), (S, 4), (S, 4), (R, 2))),
    "mixed": (2, 1, ((R, 4), (S, 4), (N, 0), (S, 4), (R, 6))),
    "two-programs": (2, 2, ((R, 5), (S, 4), (R, 3))),
    "three-ranks": (3, 1, ((R, 1), (S, 1), (R, 1))),
    "three-ranks-two-tiles": (3, 1, ((S, 2), (S, 2))),
    "three-ranks-three-tiles": (3, 1, ((R, 3), (N, 0))),
}
FAILS = {
    "one-inbox": (Protocol(inbox_phases=1), ((S, 2), (S, 2), (S, 2)), "took a value of call 2 for one of call 1"),
    "no-headers": (Protocol(headers=False), ((S, 1), (N, 0), (S, 1)), "took a value of call 3 for one of call 1"),
    "flags-before-data": (Protocol(released=False), ((R, 2),), "took a value of call 0 for one of call 1"),
    "results-before-parts": (
        Protocol(awaits=False, headers=False),
        ((R, 1), (R, 1)),
        "took a value of call 2 for one of call 1",
    ),
}


def report(record_property, name, result):
    record_property("states", result.states)
    record_property("violation", result.violation or "none")
    print(f"{name}: {result.states} states, {result.violation or 'no violation'}", *result.trace, sep="\n    ")


@pytest.mark.parametrize("case", HOLDS.values(), ids=HOLDS)
def test_holds(record_property, request, case):
    ranks, programs, calls = case
    result = Model(Protocol(), ranks, calls, programs).check()
    report(record_property, request.node.callspec.id, result)
    assert result.violation is None
    assert result.states > 1000  # it did look


@pytest.mark.parametrize(("protocol", "calls", "violation"), FAILS.values(), ids=FAILS)
def test_finds(record_property, request, protocol, calls, violation):
    result = Model(protocol, 2, calls).check()
    report(record_property, request.node.callspec.id, result)
    assert result.violation is not None and violation in result.violation
    assert result.trace


def test_one_inbox_is_enough_for_reductions():
    """So it is the scatter, which does not hear from its readers, that needs the second phase."""
    assert Model(Protocol(inbox_phases=1), 2, ((R, 2), (R, 2), (R, 2))).check().violation is None
