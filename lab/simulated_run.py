"""An engine as its judge sees it, the requests that an incident affects, and its beginning.

All of it comes from the engine's objects, and nothing from its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvscope.engine.bench.simulated_engine import SimulatedEngine
from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT
from kvscope.engine.faults import Fault
from kvscope.engine.requests.request import Request


@dataclass
class SimulatedRun:
    """The engine, and what was noted of it after each pass."""

    engine: SimulatedEngine
    fault: Fault | None
    names: dict[int, str]
    """Every request's id by its number."""
    numbers: dict[str, int]
    """And the other way."""
    affected_block_ids: dict[str, set[int]] = field(default_factory=dict)
    """Blocks that each request held after the pass in which the fault triggered on it."""
    overdrawn: set[int] = field(default_factory=set)
    """Blocks with fewer than zero references, after a pass in which the fault triggered."""
    preempted: list[set[str]] = field(default_factory=list)
    """The preempted requests, pass by pass, of passes with any."""
    without_output: set[str] = field(default_factory=set)
    """Requests preempted before the first token of output since their admission."""
    finished: list[set[str]] = field(default_factory=list)
    """The finished requests, pass by pass, of passes with any."""
    admitted: set[str] = field(default_factory=set)
    """All requests that ever ran."""
    heirs: dict[str, set[int]] = field(default_factory=dict)
    """Requests that had, after a pass, blocks of one on which the fault triggered in it, with these blocks."""
    _noted: int = 0
    """The number of affected requests noted so far."""
    _preemptions: dict[int, int] = field(default_factory=dict)
    _had: dict[int, int] = field(default_factory=dict)
    """The tokens of output that preempted requests had the last time."""
    _held: dict[int, set[int]] = field(default_factory=dict)
    """Blocks of each request after the pass before."""

    @property
    def affected(self) -> set[str]:
        """Ids of the requests on which the fault triggered."""
        affected = set(self.fault.affected) if self.fault is not None else set()
        return {self.names[int(each[1:])] if each.startswith("#") else each for each in affected}

    def note(self) -> None:
        """Note after a pass the effects of the fault, the running requests, and the preempted ones."""
        scheduler = self.engine.scheduler
        newly = self.fault.affected[self._noted :] if self.fault is not None else []
        self._noted += len(newly)
        held = {number: set(self.holds(number)) for number in self.engine.manager.tables}
        for name in newly:
            number = int(name[1:]) if name.startswith("#") else self.numbers.get(name, -1)
            self.affected_block_ids.setdefault(name, held.get(number, set()))
            for heir, blocks in held.items():
                taken = (blocks - self._held.get(heir, set())) & self._held.get(number, set())
                if taken:
                    self.heirs.setdefault(self.names[heir], set()).update(taken)
        if newly:
            self.overdrawn.update(block for block, refs in enumerate(self.engine.pool.refs) if refs < 0)
        self._held = held
        self.admitted.update(request.id for request in scheduler.running)
        if scheduler.num_preemptions > sum(self._preemptions.values()):
            hit = [r for r in scheduler.requests.values() if r.num_preemptions > self._preemptions.get(r.number, 0)]
            self._preemptions |= {request.number: request.num_preemptions for request in hit}
            self.preempted.append({request.id for request in hit})
            had = {request.number: len(request.output_token_ids) for request in hit}
            self.without_output |= {
                request.id for request in hit if had[request.number] == self._had.get(request.number, 0)
            }
            self._had |= had

    def finished_now(self, numbers: set[int]) -> None:
        """In a pass, these."""
        if numbers:
            self.finished.append({self.names[number] for number in numbers})

    def holds(self, number: int) -> list[int]:
        """Return the blocks that a request has now, of all groups."""
        return [block for table in self.engine.manager.held(number) for block in table]

    def living(self) -> Iterator[Request]:
        """Yield the requests that the scheduler has and that have not ended."""
        return (request for request in self.engine.scheduler.requests.values() if not request.is_finished)


# -------------------------------------------------------------------- the requests that an incident affects


@dataclass(frozen=True)
class Named:
    """The requests that a finding has to name by its end: at least these, and none but those."""

    least: frozenset[str] | frozenset[int]
    most: frozenset[str] | frozenset[int]


def exactly(them: Callable[[SimulatedRun], set[Any]]) -> Callable[[SimulatedRun], Named]:
    """Require all of them, and no other."""

    def rule(simulated: SimulatedRun) -> Named:
        found = frozenset(them(simulated))
        return Named(found, found)

    return rule


def among(them: Callable[[SimulatedRun], set[Any]]) -> Callable[[SimulatedRun], Named]:
    """Require some of them, and no other, where the class names only those who show it."""

    def rule(simulated: SimulatedRun) -> Named:
        return Named(frozenset(), frozenset(them(simulated)))

    return rule


def affected(simulated: SimulatedRun) -> set[str]:
    """Return the requests on which the fault triggered."""
    return simulated.affected


def no_requests(_simulated: SimulatedRun) -> set[Any]:
    """Return no request, for a class that names none."""
    return set()


def anybody(simulated: SimulatedRun) -> set[str]:
    """Any request of the run."""
    return set(simulated.names.values())


def deferred(simulated: SimulatedRun) -> set[str]:
    """Finished requests that the connector still keeps."""
    return {simulated.names[number] for number in simulated.engine.scheduler.deferred}


def parked(simulated: SimulatedRun) -> set[str]:
    """Return the requests that wait for something outside."""
    return {request.id for request in simulated.engine.scheduler.parked.values()}


def holding_in_queue(simulated: SimulatedRun) -> set[str]:
    """Return the requests in the waiting queue that have blocks."""
    return {r.id for r in simulated.engine.scheduler.waiting if r.number in simulated.engine.manager.tables}


def alive(simulated: SimulatedRun) -> set[str]:
    """Return all running and waiting requests."""
    return {request.id for request in simulated.living()}


def long_ones(simulated: SimulatedRun) -> set[str]:
    """Return the clients by the name of long."""
    return {name for name in simulated.names.values() if name.startswith("long-")}


def without_output(simulated: SimulatedRun) -> set[str]:
    """Preempted before they had a token of it."""
    return simulated.without_output


def preempted(at_once: int) -> Callable[[SimulatedRun], set[str]]:
    """Preempted in passes that preempted so many or more."""
    return lambda simulated: {name for together in simulated.preempted if len(together) >= at_once for name in together}


def finished(at_once: int) -> Callable[[SimulatedRun], set[str]]:
    """Finished in passes in which so many or more did."""
    return lambda simulated: {name for together in simulated.finished if len(together) >= at_once for name in together}


def affected_blocks(simulated: SimulatedRun) -> set[int]:
    """Return the blocks of the affected requests."""
    return {block for blocks in simulated.affected_block_ids.values() for block in blocks}


def heirs(simulated: SimulatedRun) -> set[str]:
    """Return the requests that got blocks in the very pass in which the fault took them from others."""
    return set(simulated.heirs)


def inherited(simulated: SimulatedRun) -> set[int]:
    """And these blocks."""
    return {block for blocks in simulated.heirs.values() for block in blocks}


def overdrawn(simulated: SimulatedRun) -> set[int]:
    """Return blocks that were freed more often than they were taken."""
    return simulated.overdrawn


def blocks_of(them: Callable[[SimulatedRun], set[str]]) -> Callable[[SimulatedRun], set[int]]:
    """Return the blocks of these at the end."""

    def blocks(simulated: SimulatedRun) -> set[int]:
        names = them(simulated)
        return {
            b
            for number in simulated.engine.manager.tables
            if simulated.names[number] in names
            for b in simulated.holds(number)
        }

    return blocks


def ownerless_blocks(simulated: SimulatedRun) -> set[int]:
    """Blocks with more references at the end than there are tables and fences that have them."""
    manager = simulated.engine.manager
    owed = [*manager.pool.refs]
    owed[:NULL_BLOCK_COUNT] = [0] * NULL_BLOCK_COUNT
    fenced = [blocks for fence in manager.fenced for blocks in fence.blocks]
    for blocks in (*(simulated.holds(number) for number in manager.tables), *fenced):
        for block in blocks:
            owed[block] -= 1
    return {block for block, references in enumerate(owed) if references > 0}


# -------------------------------------------------------------------- from when on it is there, and stays


def triggers(count: int) -> Callable[[SimulatedRun], bool]:
    """Return whether the fault has triggered that often."""
    return lambda simulated: simulated.fault is not None and simulated.fault.triggers >= count


def at_once(what: str, count: int) -> Callable[[SimulatedRun], bool]:
    """One pass had so many `preempted`, or `finished`."""
    return lambda simulated: any(len(together) >= count for together in getattr(simulated, what))


def leaked(count: int) -> Callable[[SimulatedRun], bool]:
    """So many bytes of the device are in use that are not on the engine's bill."""
    return lambda simulated: simulated.engine.leaked >= count


def preemptions(count: int) -> Callable[[SimulatedRun], bool]:
    """So many preemptions were made."""
    return lambda simulated: simulated.engine.scheduler.num_preemptions >= count


def missed_again(prefix: int, beginnings: int, times: int) -> Callable[[SimulatedRun], bool]:
    """So many prompts of clients s found nothing in the cache of their beginning, of so many tokens, that was there."""

    def seen(simulated: SimulatedRun) -> bool:
        asked = sum(name.startswith("s-") for name in simulated.admitted)
        return asked * prefix - simulated.engine.scheduler.prefix_hits >= (beginnings + times) * prefix

    return seen


def idle_with_deferrals(simulated: SimulatedRun) -> bool:
    """Nothing is to be run, and the connector keeps blocks of those that have."""
    return bool(simulated.engine.scheduler.deferred) and not simulated.engine.scheduler.has_work


def requests_short_of_blocks(simulated: SimulatedRun) -> bool:
    """Whether a request in the queue was refused for lack of blocks."""
    return any(request.shortage is not None for request in simulated.engine.scheduler.waiting)
