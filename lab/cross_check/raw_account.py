"""An account of an engine from its raw events alone, with no ledger, state, detector or truth room.

It adds up references, block tables, the prefix cache and where each request is, as docs/contract.md defines the events.
lab/cross_check/second_truth.py watches it change and names harms.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Cause, Holder, Kind, Status, TierOp
from kvscope.monitor.contract.wire import Batch, Run, decode

TIMED = frozenset((Kind.STARTED, Kind.CLOCK, Kind.STEP_LAUNCHED, Kind.STEP_COMPLETED, Kind.ARRIVED))
"""Kinds that say the time of what follows. A heartbeat's lies ahead of events that are not packed yet."""


@dataclass
class RawRequest:
    """A request as events show it. place: front-end, waiting, parked, ready, running, lost or ended. asked: the number
    of its last cause among those of all requests.
    """

    number: int
    came_s: float
    place: str = "front-end"
    waits_for: int = -1
    cause: int = Cause.NONE
    asked: int = 0
    prompt: int = 0
    priority: int = 0
    computed: int = 0
    scheduled: int = 0
    outputs: int = 0
    moved_s: float = 0.0
    furthest: int = 0
    got_further_s: float = 0.0
    status: int = -1
    ended_s: float = -1.0
    blocks: Counter[int] = field(default_factory=Counter)
    table: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    holder: int = 0
    delivered: bool = False
    fetch_ended: bool = False
    preempted_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that it has."""
        return self.prompt + self.outputs


class RawAccount:
    """The sums, after `apply` of each event in order. Times are seconds since the engine started."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.requests: dict[int, RawRequest] = {}
        self.references: Counter[int] = Counter()
        self.named: Counter[int] = Counter()
        """How many table entries name each block."""
        self.free = self.cached_idle = 0
        """Blocks to which nothing refers, and those of them that are cached."""
        self.detached: dict[int, tuple[int, float]] = {}
        """By block: the last request that detached it, and when."""
        self.waiting: dict[int, RawRequest] = {}
        self.pinned: Counter[int] = Counter()
        self.fenced: dict[int, int] = {}
        """By block that is freed behind a step: which step."""
        self.content: dict[int, tuple[int, int]] = {}
        """By block, the KV group and the hash that it is cached under."""
        self.now_s = self.last_s = 0.0
        self.in_flight: dict[int, dict[int, int]] = {}
        """By step in flight: the tokens that each request computes in it."""
        self.writes: dict[int, set[int]] = defaultdict(set)
        """By step in flight: the blocks that it writes."""
        self.launched_s: dict[int, float] = {}
        self.running: dict[int, None] = {}
        self.usable = self.block_size = self.groups = 0
        self.max_num_seqs = self.max_tokens = 0
        self.allowed_to_run = 0
        """kvscope's engine lets no more run than a preemption left, and one more with each step."""
        self.fences_steps = False
        """Whether blocks that a step in flight writes may not be handed out. vLLM orders the writes instead."""
        self.mode = 0
        self.polls: list[tuple[float, int]] = []
        """Polls of the connector so far, at each heartbeat."""
        self.outer_pins: Counter[int] = Counter()
        """How often each key of an outer tier is pinned."""
        self.pinned_for: dict[int, Counter[int]] = {}
        """By request that is fetched, its pins: they follow the word that it waits."""
        self._fetching = -1
        self._causes_told = 0
        self._began_ns = 0

    def replay(self, directory: Path) -> Iterator[Run]:
        """Yield each event of the recording before it is applied."""
        for payload in journal.read(directory):
            frame = decode(payload)
            if not isinstance(frame, Batch):
                continue
            self.names.update(frame.texts)
            for event in frame.events():
                if event.kind in TIMED:
                    self._pass_to(event.args[0])
                yield event
                self.apply(event)

    def _pass_to(self, at_ns: int) -> None:
        self._began_ns = self._began_ns or at_ns
        self.now_s = max(self.now_s, (at_ns - self._began_ns) / 1e9)
        self.last_s = max(self.last_s, self.now_s)

    def apply(self, event: Run) -> None:
        """Take in one event."""
        kind = Kind(event.kind)
        if event.request >= 0 and kind in PLACES_OF:
            self._moves(self._of(event.request), PLACES_OF[kind])
        handle = getattr(self, f"_{kind.name.lower()}", None)
        if handle is not None:
            handle(event)

    def name(self, number: int) -> str:
        """Return the id that the client gave."""
        return self.names.get(number, f"#{number}")

    def living(self) -> list[RawRequest]:
        """Return the requests that came and have not ended."""
        return [request for request in self.requests.values() if request.status < 0]

    def needs(self, request: RawRequest) -> int:
        """Return the blocks that all of its tokens take, of every group."""
        return -(-request.tokens // self.block_size) * self.groups

    def lacks(self, request: RawRequest) -> int:
        """Return those of them that it does not have yet."""
        return self.needs(request) - sum(map(len, request.table.values()))

    def unfilled_tokens(self) -> int:
        """Return how many more tokens fit in the blocks of the requests that run."""
        return sum(
            max(0, len(table) * self.block_size - self.requests[number].scheduled)
            for number in self.running
            for table in self.requests[number].table.values()
        )

    def _of(self, number: int) -> RawRequest:
        if number not in self.requests:
            self.requests[number] = RawRequest(number, self.now_s, moved_s=self.now_s)
        return self.requests[number]

    def _moves(self, request: RawRequest, place: str) -> None:
        request.place, request.moved_s, request.cause = place, self.now_s, Cause.NONE
        if place == "running":
            self.running[request.number] = None
        else:
            self.running.pop(request.number, None)
        if place == "waiting":
            self.waiting[request.number] = request
        else:
            self.waiting.pop(request.number, None)

    # ---------------------------------------------------------------- the engine

    def _started(self, event: Run) -> None:
        described = json.loads(self.names[-1])
        self.usable, self.block_size = event.args[1] - event.args[2], event.args[3]
        self.free = self.usable
        groups = described.get("groups") or [{}]
        self.groups = len(groups)
        self.fences_steps = described.get("engine") == "kvscope"
        self.max_num_seqs = self.allowed_to_run = described.get("max_num_seqs", 0)
        self.max_tokens = described.get("max_num_batched_tokens", 0)

    def _heartbeat(self, event: Run) -> None:
        beat_s = (event.args[0] - self._began_ns) / 1e9
        self.last_s = max(self.last_s, beat_s)
        self.polls.append((beat_s, event.args[8]))

    def _engine_mode(self, event: Run) -> None:
        self.mode = event.args[1]

    def _step_launched(self, event: Run) -> None:
        step, tokens = event.args[1], event.args[2:]
        self.in_flight[step] = dict(zip(event.ids, tokens, strict=True))
        self.launched_s[step] = self.now_s
        self.allowed_to_run = min(self.allowed_to_run + 1, self.max_num_seqs)
        for number, count in self.in_flight[step].items():
            request = self.requests[number]
            if self.fences_steps:
                self.writes[step].update(self._written(request, count))
            request.scheduled += count
            request.cause = Cause.NONE

    def _written(self, request: RawRequest, count: int) -> Iterator[int]:
        first, end = request.scheduled // self.block_size, -(-(request.scheduled + count) // self.block_size)
        for table in request.table.values():
            yield from (block for block in table[first:end] if block >= 0)

    def _step_completed(self, event: Run) -> None:
        self.writes.pop(event.args[1], None)
        for number in self.in_flight.pop(event.args[1], {}):
            self.requests[number].moved_s = self.now_s

    # ---------------------------------------------------------------- requests

    def _received(self, event: Run) -> None:
        self._of(event.request).prompt = event.args[1]

    def _arrived(self, event: Run) -> None:
        request = self._of(event.request)
        request.prompt, request.priority = event.args[1], event.args[3]
        request.came_s = min(request.came_s, self.now_s)

    def _waiting_on(self, event: Run) -> None:
        self.requests[event.request].waits_for = event.args[0]
        self._fetching = event.request

    def _not_scheduled(self, event: Run) -> None:
        self.requests[event.request].cause = event.args[0]
        self._causes_told += 1
        self.requests[event.request].asked = self._causes_told

    def _remote_load(self, event: Run) -> None:
        self.requests[event.request].fetch_ended = True

    def _progressed(self, event: Run) -> None:
        count = len(event.ids)
        for number, computed, outputs in zip(event.ids, event.args[:count], event.args[count:], strict=True):
            request = self.requests[number]
            request.computed, request.outputs = computed, outputs
            if computed > request.furthest:
                request.furthest, request.got_further_s = computed, self.now_s

    def _admitted(self, event: Run) -> None:
        request = self.requests[event.request]
        request.computed = request.scheduled = event.args[0]

    def _preempted(self, event: Run) -> None:
        request = self.requests[event.request]
        request.preempted_s.append(self.now_s)
        request.computed = 0
        if self.fences_steps:
            self.allowed_to_run = max(1, len(self.running))

    def _finished(self, event: Run) -> None:
        request = self.requests[event.request]
        request.status, request.ended_s = event.args[0], self.now_s

    def _completion_delivered(self, event: Run) -> None:
        self.requests[event.request].delivered = True

    # ---------------------------------------------------------------- blocks

    def _allocated(self, event: Run) -> None:
        self._takes(event)
        for block in event.ids:
            self.content.pop(block, None)

    def _refer(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] += 1
            if self.references[block] == 1:
                self.free -= 1
                self.cached_idle -= block in self.content

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free += 1
                self.cached_idle += block in self.content

    def _takes(self, event: Run) -> None:
        request = self._of(event.request)
        self._refer(event.ids)
        request.blocks.update(event.ids)
        self.named.update(event.ids)
        request.table[event.group].extend(event.ids)

    def _reused(self, event: Run) -> None:
        """Take in a prefix hit. Of what a window has left behind, a group's table has a hole."""
        tables = self._of(event.request).table
        if event.group and not tables[event.group]:
            tables[event.group] = [-1] * (len(tables[0]) - len(event.ids))
        self._takes(event)

    def _detached(self, event: Run) -> None:
        request = self._of(event.request)
        request.blocks.subtract(event.ids)
        self.named.subtract(event.ids)
        self.detached.update(dict.fromkeys(event.ids, (event.request, self.now_s)))
        gone = set(event.ids)
        left = [-1 if block in gone else block for block in request.table[event.group]]
        request.table[event.group] = left if max(left, default=-1) >= 0 else []

    def _released(self, event: Run) -> None:
        self._detached(event)
        self._drop(event.ids)

    def _reclaimed(self, event: Run) -> None:
        self._drop(event.ids)
        for block in event.ids:
            self.fenced.pop(block, None)

    def _free_deferred(self, event: Run) -> None:
        self._of(event.request).holder = event.args[0]
        if event.args[0] == Holder.FENCE:
            self.fenced.update(dict.fromkeys(event.ids, event.args[1]))

    def _pinned(self, event: Run) -> None:
        self._refer(event.ids)
        self.pinned.update(event.ids)

    def _unpinned(self, event: Run) -> None:
        self._drop(event.ids)
        self.pinned.subtract(event.ids)

    def _cached(self, event: Run) -> None:
        self.content.update(zip(event.ids, ((event.group, each) for each in event.args), strict=True))

    def _evicted(self, event: Run) -> None:
        for block in event.ids:
            if self.content.pop(block, None) is not None and not self.references[block]:
                self.cached_idle -= 1

    def _tier(self, event: Run) -> None:
        if event.args[0] == TierOp.PINNED:
            self.pinned_for[self._fetching] = Counter(event.args[4:])
            self.outer_pins.update(event.args[4:])
        elif event.args[0] == TierOp.UNPINNED:
            self.outer_pins -= Counter(event.args[4:])


PLACES_OF = {
    Kind.QUEUED: "waiting",
    Kind.WAITING_ON: "parked",
    Kind.READY: "ready",
    Kind.ADMITTED: "running",
    Kind.PREEMPTED: "waiting",
    Kind.NOT_QUEUED: "lost",
    Kind.FINISHED: "ended",
}
NATURAL = (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
