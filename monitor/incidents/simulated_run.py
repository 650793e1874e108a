"""An engine as its judge sees it, the requests that an incident affects, and its beginning.

All of it comes from the engine's objects, and nothing from its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT
from kvscope.engine.faults import Fault
from kvscope.engine.lab.simulated_engine import SimulatedEngine
from kvscope.engine.requests.request import Request


@dataclass
class Life:
    """The engine, and what was noted of it after each pass."""

    engine: SimulatedEngine
    fault: Fault | None
    names: dict[int, str]
    """Every request's id by its number."""
    numbers: dict[str, int]
    """And the other way."""
    struck_blocks: dict[str, set[int]] = field(default_factory=dict)
    """Blocks that each request held after the pass in which the fault triggered on it."""
    overdrawn: set[int] = field(default_factory=set)
    """Blocks with fewer than zero references, after a pass in which the fault triggered."""
    preempted: list[set[str]] = field(default_factory=list)
    """The preempted requests, pass by pass, of passes with any."""
    in_vain: set[str] = field(default_factory=set)
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
    def struck(self) -> set[str]:
        """Ids of the requests on which the fault triggered."""
        struck = set(self.fault.struck) if self.fault is not None else set()
        return {self.names[int(each[1:])] if each.startswith("#") else each for each in struck}

    def note(self) -> None:
        """Note after a pass the effects of the fault, the running requests, and the preempted ones."""
        scheduler = self.engine.scheduler
        newly = self.fault.struck[self._noted :] if self.fault is not None else []
        self._noted += len(newly)
        held = {number: set(self.holds(number)) for number in self.engine.manager.tables}
        for name in newly:
            number = int(name[1:]) if name.startswith("#") else self.numbers.get(name, -1)
            self.struck_blocks.setdefault(name, held.get(number, set()))
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
            self.in_vain |= {request.id for request in hit if had[request.number] == self._had.get(request.number, 0)}
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


# -------------------------------------------------------------------- whom an incident strikes


@dataclass(frozen=True)
class Named:
    """The requests that a finding has to name by its end: at least these, and none but those."""

    least: frozenset[str] | frozenset[int]
    most: frozenset[str] | frozenset[int]


def exactly(them: Callable[[Life], set[Any]]) -> Callable[[Life], Named]:
    """Require all of them, and no other."""

    def rule(life: Life) -> Named:
        found = frozenset(them(life))
        return Named(found, found)

    return rule


def among(them: Callable[[Life], set[Any]]) -> Callable[[Life], Named]:
    """Require some of them, and no other, where the class names only those who show it."""

    def rule(life: Life) -> Named:
        return Named(frozenset(), frozenset(them(life)))

    return rule


def struck(life: Life) -> set[str]:
    """Return the requests on which the fault triggered."""
    return life.struck


def nobody(_life: Life) -> set[Any]:
    """Return no request, for a class that names none."""
    return set()


def anybody(life: Life) -> set[str]:
    """Any request of the run."""
    return set(life.names.values())


def deferred(life: Life) -> set[str]:
    """Finished requests that the connector still keeps."""
    return {life.names[number] for number in life.engine.scheduler.deferred}


def parked(life: Life) -> set[str]:
    """Return the requests that wait for something outside."""
    return {request.id for request in life.engine.scheduler.parked.values()}


def holding_in_queue(life: Life) -> set[str]:
    """Return the requests in the waiting queue that have blocks."""
    return {r.id for r in life.engine.scheduler.waiting if r.number in life.engine.manager.tables}


def alive(life: Life) -> set[str]:
    """Return all running and waiting requests."""
    return {request.id for request in life.living()}


def long_ones(life: Life) -> set[str]:
    """Return the clients by the name of long."""
    return {name for name in life.names.values() if name.startswith("long-")}


def in_vain(life: Life) -> set[str]:
    """Preempted before they had a token of it."""
    return life.in_vain


def preempted(at_once: int) -> Callable[[Life], set[str]]:
    """Preempted in passes that preempted so many or more."""
    return lambda life: {name for together in life.preempted if len(together) >= at_once for name in together}


def finished(at_once: int) -> Callable[[Life], set[str]]:
    """Finished in passes in which so many or more did."""
    return lambda life: {name for together in life.finished if len(together) >= at_once for name in together}


def blocks_struck(life: Life) -> set[int]:
    """Return the blocks of the affected requests."""
    return {block for blocks in life.struck_blocks.values() for block in blocks}


def heirs(life: Life) -> set[str]:
    """Return the requests that got blocks in the very pass in which the fault took them from others."""
    return set(life.heirs)


def inherited(life: Life) -> set[int]:
    """And these blocks."""
    return {block for blocks in life.heirs.values() for block in blocks}


def overdrawn(life: Life) -> set[int]:
    """Return blocks that were freed more often than they were taken."""
    return life.overdrawn


def blocks_of(them: Callable[[Life], set[str]]) -> Callable[[Life], set[int]]:
    """Return the blocks of these at the end."""

    def blocks(life: Life) -> set[int]:
        names = them(life)
        return {b for number in life.engine.manager.tables if life.names[number] in names for b in life.holds(number)}

    return blocks


def ownerless_blocks(life: Life) -> set[int]:
    """Blocks with more references at the end than there are tables and fences that have them."""
    manager = life.engine.manager
    owed = [*manager.pool.refs]
    owed[:NULL_BLOCK_COUNT] = [0] * NULL_BLOCK_COUNT
    fenced = [blocks for fence in manager.fenced for blocks in fence.blocks]
    for blocks in (*(life.holds(number) for number in manager.tables), *fenced):
        for block in blocks:
            owed[block] -= 1
    return {block for block, references in enumerate(owed) if references > 0}


# -------------------------------------------------------------------- from when on it is there, and stays


def strikes(count: int) -> Callable[[Life], bool]:
    """Return whether the fault has triggered that often."""
    return lambda life: life.fault is not None and life.fault.strikes >= count


def at_once(what: str, count: int) -> Callable[[Life], bool]:
    """One pass had so many `preempted`, or `finished`."""
    return lambda life: any(len(together) >= count for together in getattr(life, what))


def leaked(count: int) -> Callable[[Life], bool]:
    """So many bytes of the device are in use that are not on the engine's bill."""
    return lambda life: life.engine.leaked >= count


def preemptions(count: int) -> Callable[[Life], bool]:
    """So many preemptions were made."""
    return lambda life: life.engine.scheduler.num_preemptions >= count


def missed_again(prefix: int, beginnings: int, times: int) -> Callable[[Life], bool]:
    """So many prompts of clients s found nothing in the cache of their beginning, of so many tokens, that was there."""

    def seen(life: Life) -> bool:
        asked = sum(name.startswith("s-") for name in life.admitted)
        return asked * prefix - life.engine.scheduler.prefix_hits >= (beginnings + times) * prefix

    return seen


def idle_with_deferrals(life: Life) -> bool:
    """Nothing is to be run, and the connector keeps blocks of those that have."""
    return bool(life.engine.scheduler.deferred) and not life.engine.scheduler.has_work


def somebody_lacks_blocks(life: Life) -> bool:
    """Whether a request in the queue was refused for lack of blocks."""
    return any(request.shortage is not None for request in life.engine.scheduler.waiting)
