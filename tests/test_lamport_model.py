"""The protocol holds in every interleaving, and the checker sees what is wrong with its neighbours."""

import pytest
from lamport_model import Model, Protocol

# name: (ranks, programs of a rank, elements of each call, every step on its own?)
HOLDS = {
    "two-ranks": (2, 1, (2, 1, 0, 2), True),
    "two-ranks-two-programs": (2, 2, (2, 1, 1, 2), True),
    "six-calls": (2, 2, (2, 1, 0, 2, 1, 2), False),
    "empty-calls": (2, 2, (0, 1, 0, 0, 2, 0), False),
    "three-ranks": (3, 1, (1, 0, 1), False),
}
FAILS = {
    "one-phase": (Protocol(phases=1), (2, 1, 0, 2), "took a value of call 2 for one of call 1"),
    "no-clearing": (Protocol(clear="never"), (2, 1, 0, 2), "took a value of call 2 for one of call 4"),
    "extent-of-the-current-call": (
        Protocol(phases=3, clear="extent"), (2, 1, 1, 2), "took a value of call 1 for one of call 4"),
    "clearing-after-the-next-push": (Protocol(clear="after-push"), (2, 1, 0, 2), "waits for ever for ('inbox'"),
    "ends-before-it-is-cleared": (Protocol(fenced=False), (2, 1, 0, 2), "took a value of call 2 for one of call 4"),
    "no-header-without-elements": (Protocol(headers=False), (2, 0, 2), "took a value of call 3 for one of call 1"),
}  # fmt: skip


def report(record_property, name, result):
    record_property("states", result.states)
    record_property("violation", result.violation or "none")
    print(f"{name}: {result.states} states, {result.violation or 'no violation'}", *result.trace, sep="\n    ")


@pytest.mark.parametrize("case", HOLDS.values(), ids=HOLDS)
def test_holds(record_property, request, case):
    ranks, programs, sizes, single_steps = case
    result = Model(Protocol(), ranks, sizes, programs, fused=not single_steps).check()
    report(record_property, request.node.callspec.id, result)
    assert result.violation is None
    assert result.states > 1000  # it did look


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "single-steps"])
@pytest.mark.parametrize(("protocol", "sizes", "violation"), FAILS.values(), ids=FAILS)
def test_finds(record_property, request, protocol, sizes, violation, fused):
    result = Model(protocol, 2, sizes, fused=fused).check()
    report(record_property, request.node.callspec.id, result)
    assert result.violation is not None and violation in result.violation
    assert result.trace


def test_the_first_prototype_holds_at_one_size():
    """So it is the changing size that it does not stand. It leaves the last call's values, by its own rule."""
    result = Model(Protocol(phases=3, clear="extent"), 2, (2, 2, 2, 2)).check()
    assert result.violation is not None and result.violation.endswith("still holds a value of call 4 at the end")


def test_a_third_phase_is_harmless():
    assert Model(Protocol(phases=3), 2, (2, 1, 1, 2)).check().violation is None
