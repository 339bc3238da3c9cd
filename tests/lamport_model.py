"""The protocol of finalize_all_reduce between GPUs as an explicit-state model: every interleaving of a few calls.

A rank runs programs side by side (the grid of a kernel), each a list of atomic steps in order: element e is the work of
program e % programs, the header that of program 0, and all programs wait for the peers' headers. A store does not
happen at its step: it is in flight until a delivery step of its own, in any order between addresses and in order for
one writer and address. Each rank owns header words [phase, source] and an inbox [phase, source, element]; what is
stored is the number of the call, 0 is the sentinel. A call ends when all programs of the rank are done and its stores
to its own memory are performed (the end of a kernel); the next call's pushes come after that. Steps and deliveries
interleave freely. The model covers interleavings, not the memory orders of a GPU: those are for stress tests on one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import product

EMPTY = 0


@dataclass(frozen=True)
class Protocol:
    """clear:   "read"         right after an element was read
                "extent"       as many elements as the current call has, of the phase after next (the first prototype)
                "after-push"   the elements that were read, after the next call's pushes
                "never"
    fenced:  a call ends only when its clears are performed
    headers: a call without elements still sends and awaits headers
    """

    phases: int = 2
    clear: str = "read"
    fenced: bool = True
    headers: bool = True


@dataclass(frozen=True)
class Result:
    states: int
    violation: str | None  # None: every interleaving ends well
    trace: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Step:
    """push: store `call` at `address`; header: wait for `call`; read: wait for no sentinel; clear: store the sentinel;
    end: wait for the rank's other programs and its clears."""

    what: str
    address: int
    call: int


class Model:
    def __init__(
        self, protocol: Protocol, world_size: int, sizes: tuple[int, ...], programs: int = 1, fused: bool = True
    ) -> None:
        """`sizes`: the elements of each call, the same on every rank.

        `fused`: a program's pushes, clears and ends happen at once with the step before them. Nothing is lost by it:
        they only put stores in flight, and a store may be delivered at any later moment anyway. It makes three ranks
        small.
        """
        self.protocol, self.W, self.sizes, self.fused = protocol, world_size, sizes, fused
        ranks, phases = range(world_size), range(protocol.phases)
        places = [("header", *p) for p in product(ranks, phases, ranks)]
        places += [("inbox", *p) for p in product(ranks, phases, ranks, range(max(sizes)))]
        self.at = {place: address for address, place in enumerate(places)}
        self.places = places
        self.actors = list(product(ranks, range(programs)))
        self.programs = [self._program(rank, range(program, max(sizes), programs)) for rank, program in self.actors]

    def _program(self, rank: int, elements: range) -> list[_Step]:
        p, steps, late = self.protocol, [], []
        others = [s for s in range(self.W) if s != rank]
        for call, size in enumerate(self.sizes, start=1):
            phase = call % p.phases
            mine = list(product(others, [e for e in elements if e < size]))
            headers = size > 0 or p.headers
            if headers and elements.start == 0:
                steps += [_Step("push", self.at["header", s, phase, rank], call) for s in others]
            steps += [_Step("push", self.at["inbox", s, phase, rank, e], call) for s, e in mine]
            steps += late
            late = []
            if headers:
                steps += [_Step("header", self.at["header", rank, phase, s], call) for s in others]
            for s, e in mine:
                address = self.at["inbox", rank, phase, s, e]
                steps.append(_Step("read", address, call))
                if p.clear == "read":
                    steps.append(_Step("clear", address, call))
                elif p.clear == "after-push":
                    late.append(_Step("clear", address, call))
            if p.clear == "extent":
                steps += [_Step("clear", self.at["inbox", rank, (call + 2) % p.phases, s, e], call) for s, e in mine]
            steps.append(_Step("end", -1, call))
        return steps + late

    def check(self) -> Result:
        """Breadth first, so that a trace is a shortest one."""
        start = self._settled(((0,) * len(self.actors), bytes(len(self.at)), ()))
        came_from = {start: None}
        frontier = [start]
        while frontier:
            found = []
            for state in frontier:
                successors = []
                for name, after, violation in self._steps(state):
                    if violation:
                        return Result(len(came_from), violation, (*self._trace(came_from, state), self._said(name)))
                    successors.append(after)
                    if after not in came_from:
                        came_from[after] = (state, name)
                        found.append(after)
                if not successors and (violation := self._wrong_end(state)):
                    return Result(len(came_from), violation, self._trace(came_from, state))
            frontier = found
        return Result(len(came_from), None)

    def _steps(self, state):
        """(name, the state after it, what is wrong with it) of every step that can be next."""
        counters, memory, flight = state
        for actor, counter in enumerate(counters):
            if counter == len(self.programs[actor]):
                continue
            step = self.programs[actor][counter]
            rank = self.actors[actor][0]
            value = memory[step.address]
            name = (rank, step)
            if step.what in ("push", "clear", "end"):
                if (after := self._own_step(state, actor, step)) is not None:
                    yield name, after, None
                continue
            if value == EMPTY or (step.what == "header" and value < step.call):
                continue
            wrong = value != step.call and f"rank {rank} took a value of call {value} for one of call {step.call}"
            yield name, self._settled((_next(counters, actor), memory, flight)), wrong or None
        before = None
        for store in flight:
            if store[:2] != before:  # the first of its address and writer
                address, _, value = store
                left = list(flight)
                left.remove(store)
                changed = memory[:address] + bytes((value,)) + memory[address + 1 :]
                yield store, self._settled((counters, changed, tuple(left))), None
            before = store[:2]

    def _own_step(self, state, actor, step):
        """The state after a push, a clear or an end; None where the end must wait."""
        counters, memory, flight = state
        rank = self.actors[actor][0]
        if step.what == "end":
            clears = any(writer == rank and self.places[address][1] == rank for address, writer, _ in flight)
            behind = any(
                counters[other] < self.programs[other].index(step)
                for other, (owner, _) in enumerate(self.actors)
                if owner == rank
            )
            return None if behind or (clears and self.protocol.fenced) else (_next(counters, actor), memory, flight)
        stores = list(flight)
        # Sorted: a writer's pushes to one address ascend, and clears are all alike, so this keeps their order.
        insort(stores, (step.address, rank, step.call if step.what == "push" else EMPTY))
        return _next(counters, actor), memory, tuple(stores)

    def _settled(self, state):
        moved = self.fused
        while moved:
            moved = False
            for actor, program in enumerate(self.programs):
                counter = state[0][actor]
                if counter < len(program) and program[counter].what in ("push", "clear", "end"):
                    after = self._own_step(state, actor, program[counter])
                    if after is not None:
                        state, moved = after, True
        return state

    def _wrong_end(self, state):
        counters, memory, _ = state
        for actor, counter in enumerate(counters):
            if counter < len(self.programs[actor]):
                step = self.programs[actor][counter]
                place = self.places[step.address]
                return f"rank {self.actors[actor][0]} waits for ever for {place} at call {step.call}"
        for place, value in zip(self.places, memory, strict=True):
            if place[0] == "inbox" and value != EMPTY:
                return f"{place} still holds a value of call {value} at the end"
        return None

    def _trace(self, came_from, state):
        steps = []
        while came_from[state] is not None:
            state, name = came_from[state]
            steps.append(name)
        return tuple(self._said(step) for step in reversed(steps))

    def _said(self, name):
        if isinstance(name[1], _Step):
            rank, step = name
            place = "" if step.what == "end" else f" {self.places[step.address]}"
            return f"rank {rank}: {step.what}{place} of call {step.call}"
        address, writer, value = name
        return f"delivered: {value} to {self.places[address]} from rank {writer}"


def _next(counters, rank):
    return (*counters[:rank], counters[rank] + 1, *counters[rank + 1 :])
