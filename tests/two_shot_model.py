"""The protocol of two_shot_triton.py between GPUs as an explicit-state model: every interleaving of a few calls.

A rank runs programs side by side, each a list of atomic steps in order. A store does not happen at its step: it is in
flight until a delivery step of its own, in any order between addresses and in order for one address. A release is
delivered only after all that its program stored before it. A wait blocks until its word is the number of the call; a
read takes what is there. A call ends when all programs of the rank are done; stores may then still be in flight.
Tile x belongs to rank x % W and is the work of program x // W % programs. "other" is any call that touches only the
headers of this memory: one-shot calls, calls without tokens.
The model covers interleavings, not the memory orders of a GPU: those are for stress tests on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from lamport_model import Result


@dataclass(frozen=True)
class Protocol:
    """inbox_phases, result_phases: by the call's number
    released: flags are delivered after the data
    headers:  a call ends only when every rank's header is here
    awaits:   an owner pushes its sums only after all parts of them have arrived
    """

    inbox_phases: int = 2
    result_phases: int = 1
    released: bool = True
    headers: bool = True
    awaits: bool = True


@dataclass(frozen=True)
class _Step:
    """store and release: `call` at `address`; wait: for `call` there; read: `call` must be there; end: wait for the
    rank's other programs."""

    what: str
    address: int
    call: int


class Model:
    """`calls`: ("reduce" | "scatter" | "other", tiles) of each call, the same on every rank."""

    def __init__(
        self, protocol: Protocol, world_size: int, calls: tuple[tuple[str, int], ...], programs: int = 1
    ) -> None:
        self.protocol, self.W, self.calls, self.num_programs = protocol, world_size, calls, programs
        ranks, tiles = range(world_size), range(max(n for _, n in calls))
        places = [("header", *p) for p in product(ranks, range(2), ranks)]
        for name in ("inbox", "arrival"):
            places += [(name, *p) for p in product(ranks, range(protocol.inbox_phases), ranks, tiles)]
        for name in ("result", "result flag"):
            places += [(name, *p) for p in product(ranks, range(protocol.result_phases), tiles)]
        self.places, self.at = places, {place: address for address, place in enumerate(places)}
        self.actors = list(product(ranks, range(programs)))
        self.programs = [self._program(*actor) for actor in self.actors]

    def _program(self, rank: int, program: int) -> list[_Step]:
        p, steps = self.protocol, []
        others = [s for s in range(self.W) if s != rank]
        flag = "release" if p.released else "store"

        def step(what: str, *place: object) -> None:
            steps.append(_Step(what, self.at[place] if place else -1, call))

        for call, (op, tiles) in enumerate(self.calls, start=1):
            inbox, result = call % p.inbox_phases, call % p.result_phases
            mine = [x for x in range(0 if op == "other" else tiles) if x // self.W % self.num_programs == program]
            for s in others:
                if program == 0:
                    step("store", "header", s, call % 2, rank)
            for x in mine:
                if x % self.W != rank:
                    step("store", "inbox", x % self.W, inbox, rank, x)
                    step(flag, "arrival", x % self.W, inbox, rank, x)
            for s in others:
                if p.headers:
                    step("wait", "header", rank, call % 2, s)
            for x in (x for x in mine if x % self.W == rank):
                for what, name in (("wait", "arrival"), ("read", "inbox")) if p.awaits else ():
                    for s in others:
                        step(what, name, rank, inbox, s, x)
                for s in others if op == "reduce" else ():
                    step("store", "result", s, result, x)
                    step(flag, "result flag", s, result, x)
            for x in (x for x in mine if x % self.W != rank and op == "reduce"):
                step("wait", "result flag", rank, result, x)
                step("read", "result", rank, result, x)
            step("end")
        return steps

    def check(self) -> Result:
        """Breadth first, so that a trace is a shortest one."""
        start = self._settled((0,) * len(self.actors), bytes(len(self.at)), ((),) * len(self.actors))
        came_from = {start: None}
        frontier = [start]
        while frontier:
            found = []
            for state in frontier:
                stuck = True
                for said, after, violation in self._steps(state):
                    if violation:
                        return Result(len(came_from), violation, (*self._trace(came_from, state), said))
                    stuck = False
                    if after not in came_from:
                        came_from[after] = (state, said)
                        found.append(after)
                if stuck and (violation := self._waiting(state)):
                    return Result(len(came_from), violation, self._trace(came_from, state))
            frontier = found
        return Result(len(came_from), None)

    def _steps(self, state):
        counters, memory, flight = state
        for actor, counter in enumerate(counters):
            if counter == len(self.programs[actor]):
                continue
            step, rank = self.programs[actor][counter], self.actors[actor][0]
            if step.what == "end" or (step.what == "wait" and memory[step.address] != step.call):
                continue
            value, place = memory[step.address], self.places[step.address]
            wrong = step.what == "read" and value != step.call
            yield (
                f"rank {rank}: {step.what} {place} of call {step.call}",
                self._settled((*counters[:actor], counter + 1, *counters[actor + 1 :]), memory, flight),
                f"rank {rank} took a value of call {value} for one of call {step.call}" if wrong else None,
            )
        for actor, stores in enumerate(flight):
            for i, (what, address, value) in enumerate(stores):
                if any(earlier[1] == address for earlier in stores[:i]) or (what == "release" and i > 0):
                    continue
                left = (*flight[:actor], stores[:i] + stores[i + 1 :], *flight[actor + 1 :])
                changed = memory[:address] + bytes((value,)) + memory[address + 1 :]
                said = f"delivered: {value} to {self.places[address]} from rank {self.actors[actor][0]}"
                yield said, self._settled(counters, changed, left), None

    def _settled(self, counters, memory, flight):
        """Stores and ends happen at once: they only put stores in flight, which may be delivered at any later time."""
        counters, flight, moved = list(counters), list(flight), True
        while moved:
            moved = False
            for actor, program in enumerate(self.programs):
                while counters[actor] < len(program):
                    step = program[counters[actor]]
                    if step.what in ("store", "release"):
                        flight[actor] = (*flight[actor], (step.what, step.address, step.call))
                    elif step.what != "end" or not self._all_there(actor, step, counters):
                        break
                    counters[actor] += 1
                    moved = True
        return tuple(counters), memory, tuple(flight)

    def _all_there(self, actor, step, counters):
        """Whether every program of the rank has come to this end."""
        rank = self.actors[actor][0]
        return all(
            counters[other] >= self.programs[other].index(step)
            for other, (owner, _) in enumerate(self.actors)
            if owner == rank
        )

    def _waiting(self, state):
        for actor, counter in enumerate(state[0]):
            if counter < len(self.programs[actor]):
                step = self.programs[actor][counter]
                return (
                    f"rank {self.actors[actor][0]} waits for ever for {self.places[step.address]} at call {step.call}"
                )
        return None

    def _trace(self, came_from, state):
        steps = []
        while came_from[state] is not None:
            state, said = came_from[state]
            steps.append(said)
        return tuple(reversed(steps))
