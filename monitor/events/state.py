"""What the events add up to: every block, request, queue and counter of one engine, at one moment.

The engine's drain thread keeps one State as the shadow that keyframes are cut from; a reader keeps another as its
books. Both are the same fold of the same events, so a keyframe loaded is the state the events would have given.

A block is *used* while references to it are known, *cached-idle* if unused but still holding a hash, else *free*.
Its owners are the requests whose block tables name it. An owner that has finished is a legitimate holder only by a
deferral that was announced (FREE_DEFERRED); see `unaccounted` and `unexplained_references`.

What cannot be (a release of a free block, counts that disagree, …) is put in `anomalies` and never raises.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from monitor.events.kinds import FIRST_FINISHED, Cause, Kind, Status
from monitor.events.wire import NotAFrame, fives

UNKNOWN_HASH: Final = 1
"""Stands for a hash known to exist whose value was lost with the events that said it."""
MAX_ANOMALIES: Final = 1000
MAX_BLOCKS: Final = 1 << 28


class RequestState(msgspec.Struct, array_like=True):
    """One request: its state, why, since when, what it has and what it has cost. Times in monotonic ns, 0: not yet."""

    number: int
    id: str
    status: int = Status.WAITING
    cause: int = Cause.NEW
    since_ns: int = 0
    received_ns: int = 0
    arrived_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    progressed_ns: int = 0
    finished_ns: int = 0
    client_gone_ns: int = 0
    stalled_ns: int = 0
    stalled_cause: int = Cause.NONE
    prompt_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    blocks_to_admit: int = 0
    blocks_to_finish: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    tokens_lost: int = 0
    blocks_needed: int = 0
    blocks_free_then: int = 0
    times_passed_over: int = 0
    peak_blocks: int = 0
    blocks: list[int] = []
    waited_ns: dict[int, int] = {}

    @property
    def is_finished(self) -> bool:
        """Whether its status is terminal."""
        return self.status >= FIRST_FINISHED

    @property
    def is_running(self) -> bool:
        """Whether the scheduler has it running."""
        return self.status == Status.RUNNING

    @property
    def is_waiting(self) -> bool:
        """Whether the scheduler has it, not running and not finished."""
        return Status.RECEIVED < self.status < FIRST_FINISHED and self.status != Status.RUNNING


class Deferral(msgspec.Struct, array_like=True):
    """An announcement that blocks outlive their request: who holds them, since when, until which fence or lease."""

    request: int
    id: str
    holder: int
    since_ns: int
    fence: int
    lease_deadline_ns: int
    blocks: set[int]


class Anomaly(NamedTuple):
    """Something that cannot be, found at event `position` of a batch: `what` names the rule that it breaks."""

    what: str
    block: int
    request: int
    position: int
    detail: str


class Totals(msgspec.Struct, array_like=True):
    """Sums over the engine's life (this epoch), counted from events."""

    steps: int = 0
    step_ns: int = 0
    allocated: int = 0
    reused: int = 0
    cached: int = 0
    evicted: int = 0
    released: dict[int, int] = {}
    allocation_failures: int = 0
    preemptions: dict[int, int] = {}
    tokens_lost: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    arrived: int = 0
    finished: dict[int, int] = {}
    client_gone: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    limits: dict[int, int] = {}


class StepInFlight(msgspec.Struct, array_like=True, frozen=True):
    """A step launched and not yet completed."""

    step: int
    since_ns: int
    requests: int
    tokens: int


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """What the drain thread saw of the engine from outside; see SCHEMA[Kind.HEARTBEAT]."""

    at_ns: int
    last_sequence: int
    last_step: int
    step_in_flight: int
    in_flight_since_ns: int
    running: int
    waiting: int
    front_end_in_flight: int
    connector_polls: int
    scheduler_passes: int


class TierState(msgspec.Struct, array_like=True):
    """An outer tier: blocks used and held at most, and how often each operation touched a block (by TierOp)."""

    used: int = 0
    capacity: int = 0
    operations: dict[int, int] = {}


class _Dump(msgspec.Struct, array_like=True):
    """A State as a keyframe carries it."""

    description: str
    total: int
    reserved: int
    block_size: int
    now_ns: int
    started_ns: int
    stopped_ns: int
    last_step: int
    refs: memoryview
    owner: memoryview
    hashes: memoryview
    since: memoryview
    more: dict[int, list[int]]
    detached: dict[int, list[int]]
    deferrals: list[Deferral]
    requests: list[RequestState]
    totals: Totals
    in_flight: list[StepInFlight]
    heartbeat: Heartbeat | None
    memory: list[int]
    tiers: dict[int, TierState]
    damaged: bool
    audit_cycles: int
    audited_ns: int
    orphans: list[int]


class State:
    """The books of one engine in one epoch. `apply` folds events in; all else reads."""

    def __init__(self) -> None:
        self.description = ""
        self.total = 0
        self.reserved = 0
        self.block_size = 0
        self.now_ns = 0
        self.started_ns = 0
        self.stopped_ns = 0
        self.last_step = -1
        self.refs = array("i")
        self.owner = array("i")
        self.hashes = array("q")
        self.since = array("q")
        self.more: dict[int, list[int]] = {}
        self.detached: dict[int, list[int]] = {}
        self.deferrals: dict[int, Deferral] = {}
        self.requests: dict[int, RequestState] = {}
        self.used = 0
        self.cached_idle = 0
        self.totals = Totals()
        self.in_flight: dict[int, StepInFlight] = {}
        self.heartbeat: Heartbeat | None = None
        self.memory: list[int] = []
        self.tiers: dict[int, TierState] = {}
        # Audits. `orphans` are blocks that an audit showed to have more references than these books know owners for.
        self.damaged = False
        self.audit_cycles = 0
        self.audited_ns = 0
        self.orphans: set[int] = set()
        self._audit: _Audit | None = None
        # What the last applies turned up, for whoever folds to take away: see take_ended and take_anomalies.
        self._ended: list[RequestState] = []
        self._anomalies: list[Anomaly] = []
        self._index = 0

    # ---------------------------------------------------------------- what a reader asks

    @property
    def free(self) -> int:
        """Blocks in the free queue, cached-idle ones included, by these books."""
        return self.total - self.reserved - self.used

    def owners(self, block: int) -> list[int]:
        """The numbers of the requests whose tables name the block."""
        first = self.owner[block]
        return [] if first < 0 else [first, *self.more.get(block, ())]

    def is_legitimate(self, request: int, block: int) -> bool:
        """Whether this owner may hold the block: it lives, or its end announced that the block stays."""
        record = self.requests.get(request)
        return (record is not None and not record.is_finished) or self.is_deferred(request, block)

    def is_deferred(self, request: int, block: int) -> bool:
        """Whether it was announced that this block outlives this request."""
        deferral = self.deferrals.get(request)
        return deferral is not None and block in deferral.blocks

    def unaccounted(self) -> list[int]:
        """Blocks in use that no living request and no announced deferral accounts for, lowest first."""
        return sorted(b for b in self._suspects() if self.refs[b] > 0 and not self._holders(b))

    def unexplained_references(self) -> dict[int, int]:
        """By block, how many of its references no living request and no announced deferral explains."""
        surplus = {b: self.refs[b] - self._holders(b) for b in self._suspects()}
        return {block: extra for block, extra in sorted(surplus.items()) if extra > 0}

    def _suspects(self) -> set[int]:
        """The only blocks whose references can be unexplained."""
        suspects = set(self.detached) | self.orphans
        for record in self.requests.values():
            if record.is_finished:
                suspects.update(record.blocks)
        return suspects

    def _holders(self, block: int) -> int:
        """How many legitimate references the books know of."""
        by_owner = sum(self.is_legitimate(owner, block) for owner in self.owners(block))
        return by_owner + sum(self.is_deferred(former, block) for former in self.detached.get(block, ()))

    # ---------------------------------------------------------------- the fold

    def apply(self, runs: list[int], args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        """Fold events in, in order. The lists are a batch's columns, or a log's lists before they are packed.

        Events laid out as SCHEMA says never make it raise; others may (IndexError, ValueError, OverflowError).
        """
        refs, owner, hashes, since, more = self.refs, self.owner, self.hashes, self.since, self.more
        a = i = 0
        index = -1
        for kind, _group, number, n_args, n_ids in fives(runs):
            index += 1
            a_end, i_end = a + n_args, i + n_ids
            if kind == _PROGRESSED:
                self._progressed(ids[i:i_end], args[a:a_end])
            elif kind == _STEP_LAUNCHED:
                self.now_ns = args[a]
                step = args[a + 1]
                self.in_flight[step] = StepInFlight(step, args[a], n_ids, sum(args[a + 2 : a_end]))
            elif kind == _STEP_COMPLETED:
                self._index = index
                self._step_completed(*args[a:a_end][:7])
            elif kind in _BLOCK_KINDS:
                blocks = ids[i:i_end]
                now = self.now_ns
                self._index = index
                if blocks and not self.reserved <= min(blocks) <= max(blocks) < self.total:
                    self._anomaly("block out of range", max(blocks), number, f"the pool has {self.total}")
                elif kind == _ALLOCATED:
                    for block in blocks:
                        if refs[block]:
                            self._allocated_held(block, number)
                            continue
                        refs[block] = 1
                        owner[block] = number
                        since[block] = now
                        if hashes[block]:
                            hashes[block] = 0
                            self.cached_idle -= 1
                            self.totals.evicted += 1
                    self.used += n_ids
                    self.totals.allocated += n_ids
                    self._add_blocks(number, blocks)
                elif kind == _RELEASED:
                    reason = args[a]
                    freed = 0
                    for block in blocks:
                        if refs[block] == 1 and owner[block] == number:
                            refs[block] = 0
                            owner[block] = -1
                            since[block] = now
                            freed += 1
                            if hashes[block]:
                                self.cached_idle += 1
                        else:
                            self._release_shared(block, number)
                    self.used -= freed
                    released = self.totals.released
                    released[reason] = released.get(reason, 0) + n_ids
                    self._drop_blocks(number, blocks)
                elif kind == _CACHED:
                    for block, value in zip(blocks, args[a:a_end], strict=True):
                        if not hashes[block] and not refs[block]:
                            self.cached_idle += 1
                        hashes[block] = value
                    self.totals.cached += n_ids
                elif kind == _REUSED:
                    for block in blocks:
                        if refs[block]:
                            if owner[block] < 0:
                                owner[block] = number
                            else:
                                more.setdefault(block, []).append(number)
                            refs[block] += 1
                        else:
                            refs[block] = 1
                            owner[block] = number
                            since[block] = now
                            self.used += 1
                            self.cached_idle -= 1
                            if not hashes[block]:
                                self.cached_idle += 1
                                self._anomaly("prefix hit on a block with no hash", block, number, "")
                    self.totals.reused += n_ids
                    self._add_blocks(number, blocks)
                else:
                    self._rare_block_event(kind, number, args[a:a_end], blocks)
            else:
                self._index = index
                self._other(kind, number, args[a:a_end], ids[i:i_end], texts)
            a, i = a_end, i_end

    def counts_match(self, free: int, cached_idle: int, used: int) -> bool:
        """Whether these are the pool's counts by the books too."""
        return (free, cached_idle, used) == (self.free, self.cached_idle, self.used)

    def check(self, free: int, cached_idle: int, used: int) -> None:
        """Hold the engine's own counts against these books (-1: not said); a difference is an anomaly."""
        if self.damaged:
            return
        for what, theirs, ours in (
            ("free", free, self.free),
            ("cached-idle", cached_idle, self.cached_idle),
            ("used", used, self.used),
        ):
            if theirs not in (-1, ours):
                self._anomaly("counts", -1, -1, f"the engine counts {theirs} {what} blocks, the books {ours}")

    def take_ended(self) -> list[RequestState]:
        """Requests that ended and hold nothing any more, since last asked; the books forget them."""
        ended, self._ended = self._ended, []
        return ended

    def take_anomalies(self) -> list[Anomaly]:
        """What was found since last asked, at most MAX_ANOMALIES of it."""
        found, self._anomalies = self._anomalies, []
        return found

    def mark_damaged(self) -> None:
        """Events were lost for good: take the engine's audits for truth until one is complete."""
        self.damaged = True
        self._audit = None

    # ---------------------------------------------------------------- blocks, the rarer cases

    def _allocated_held(self, block: int, number: int) -> None:
        """A held block was handed out: it gains an owner; `used`, counted for the whole run, must not grow."""
        self.used -= 1
        self._anomaly("allocated while held", block, number, f"held by {self._names(self.owners(block))}")
        self.refs[block] += 1
        if self.owner[block] < 0:
            self.owner[block] = number
        else:
            self.more.setdefault(block, []).append(number)

    def _release_shared(self, block: int, number: int) -> None:
        """One of several references goes, or one that the books do not know."""
        if self.refs[block] <= 0:
            self._anomaly("released while free", block, number, f"reference count {self.refs[block]}")
            return
        if not self._remove_owner(block, number):
            owners = self._names(self.owners(block))
            self._anomaly("released by another than its owner", block, number, f"owned by {owners or 'nobody'}")
        self._drop_reference(block)

    def _remove_owner(self, block: int, number: int) -> bool:
        others = self.more.get(block)
        if self.owner[block] == number:
            self.owner[block] = others.pop(0) if others else -1
        elif others and number in others:
            others.remove(number)
        else:
            return False
        if others is not None and not others:
            del self.more[block]
        return True

    def _drop_reference(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.since[block] = self.now_ns
            self.used -= 1
            if self.hashes[block]:
                self.cached_idle += 1

    def _rare_block_event(self, kind: int, number: int, args: list[int], blocks: list[int]) -> None:
        if kind == Kind.EVICTED:
            for block in blocks:
                if self.hashes[block]:
                    self.hashes[block] = 0
                    self.totals.evicted += 1
                    if not self.refs[block]:
                        self.cached_idle -= 1
        elif kind == Kind.DETACHED:
            for block in blocks:
                if not self._remove_owner(block, number):
                    self._anomaly("detached from another than its owner", block, number, "")
                self.detached.setdefault(block, []).append(number)
            self._drop_blocks(number, blocks, still_held=True)
        elif kind == Kind.FREE_DEFERRED:
            record = self.requests.get(number)
            self._defer(number, record.id if record else f"#{number}", args[0], args[1], args[2], blocks)
        elif kind == Kind.RECLAIMED:
            for block in blocks:
                former = self.detached.get(block)
                if not former:
                    self._anomaly("reclaimed though never detached", block, number, "")
                    continue
                self._undefer(former.pop(0), [block])
                if not former:
                    del self.detached[block]
                self._drop_reference(block)
            self.totals.released[args[0]] = self.totals.released.get(args[0], 0) + len(blocks)

    def _add_blocks(self, number: int, blocks: list[int]) -> None:
        record = self._request(number)
        record.blocks += blocks
        if len(record.blocks) > record.peak_blocks:
            record.peak_blocks = len(record.blocks)

    def _drop_blocks(self, number: int, blocks: list[int], still_held: bool = False) -> None:
        record = self._request(number)
        if len(blocks) == len(record.blocks):
            record.blocks = []
        else:
            gone = set(blocks)
            record.blocks = [block for block in record.blocks if block not in gone]
        if self.deferrals and not still_held:
            self._undefer(number, blocks)
        self._end_if_over(record)

    def _defer(
        self, number: int, name: str, holder: int, fence: int, lease_deadline_ns: int, blocks: Iterable[int]
    ) -> None:
        deferral = self.deferrals.get(number)
        if deferral is None:
            deferral = Deferral(number, name, holder, self.now_ns, fence, lease_deadline_ns, set())
            self.deferrals[number] = deferral
        deferral.blocks.update(blocks)

    def _undefer(self, number: int, blocks: Iterable[int]) -> None:
        deferral = self.deferrals.get(number)
        if deferral is not None:
            deferral.blocks.difference_update(blocks)
            if not deferral.blocks:
                del self.deferrals[number]

    # ---------------------------------------------------------------- steps and requests

    def _progressed(self, numbers: list[int], column: list[int]) -> None:
        now, half, totals = self.now_ns, len(numbers), self.totals
        for number, computed, outputs in zip(numbers, column[:half], column[half:], strict=True):
            record = self.requests.get(number)
            if record is None:
                continue  # aborted while its step ran
            totals.computed_tokens += max(0, computed - record.computed_tokens)
            totals.output_tokens += max(0, outputs - record.output_tokens)
            record.computed_tokens = computed
            record.output_tokens = outputs
            record.progressed_ns = now
            if record.cause:  # was passed over for a while, and is no more
                self._move(record, record.status, Cause.NONE)

    def _step_completed(
        self,
        at_ns: int,
        step: int,
        duration_ns: int,
        limit: int,
        free: int = -1,
        cached: int = -1,
        used: int = -1,
    ) -> None:
        self.now_ns = at_ns
        self.last_step = step
        self.in_flight.pop(step, None)
        self.totals.steps += 1
        self.totals.step_ns += duration_ns
        self.totals.limits[limit] = self.totals.limits.get(limit, 0) + 1
        if not self.counts_match(free, cached, used):
            self.check(free, cached, used)

    def _request(self, number: int) -> RequestState:
        """The request's record; one that was never announced gets a name made of its number, and is an anomaly."""
        record = self.requests.get(number)
        if record is None:
            record = self.requests[number] = RequestState(number, f"#{number}", since_ns=self.now_ns)
            record.blocks, record.waited_ns = [], {}
            self._anomaly("a request that never arrived", -1, number, "")
        return record

    def _move(self, record: RequestState, status: int, cause: int) -> None:
        """Put a request in a state for a reason, from now."""
        if record.status == status and record.cause == cause:
            return
        if record.is_waiting:
            waited = record.waited_ns
            waited[record.cause] = waited.get(record.cause, 0) + self.now_ns - record.since_ns
        record.status, record.cause, record.since_ns = status, cause, self.now_ns

    def _end_if_over(self, record: RequestState) -> None:
        if record.status >= FIRST_FINISHED and not record.blocks and self.requests.pop(record.number, None) is not None:
            self._ended.append(record)

    def _other(self, kind: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        """Everything that is not about blocks and not once a step."""
        match kind:
            case Kind.CLOCK:
                self.now_ns = args[0]
            case Kind.HEARTBEAT:
                self.heartbeat = Heartbeat(*args[:10])
            case Kind.STARTED:
                self._started(*args[:4], description=texts.get(-1, ""))
            case Kind.STOPPED:
                self.now_ns = self.stopped_ns = args[0]
            case Kind.MEMORY:
                self.memory = args
            case Kind.TIER:
                tier = self.tiers.setdefault(args[1], TierState(operations={}))
                tier.used, tier.capacity = args[2], args[3]
                tier.operations[args[0]] = tier.operations.get(args[0], 0) + len(args) - 4
            case Kind.RECEIVED | Kind.ARRIVED:
                self._arrived(kind, number, args, texts)
            case Kind.CLIENT_GONE:
                self.totals.client_gone += 1
                if (record := self.requests.get(number)) is not None:
                    record.client_gone_ns = args[0]
            case Kind.STALLED:
                if (record := self.requests.get(number)) is not None:
                    record.stalled_ns, record.stalled_cause = args[0], args[3]
            case Kind.AUDIT_BEGIN | Kind.AUDIT_BLOCKS | Kind.AUDIT_REQUEST | Kind.AUDIT_END:
                self._audited(kind, number, args, ids, texts)
            case _ if number >= 0 and kind in _REQUEST_KINDS:
                self._request_event(kind, self._request(number), args)

    def _started(self, at_ns: int, total: int, reserved: int, block_size: int, *, description: str) -> None:
        if not 0 <= reserved <= total <= MAX_BLOCKS:
            raise ValueError(f"a pool of {total} blocks, {reserved} of them reserved")
        self.description = description
        self.now_ns = self.started_ns = at_ns
        self.total, self.reserved, self.block_size = total, reserved, block_size
        # In place: `apply` holds these very arrays.
        self.refs[:] = array("i", [0]) * total
        self.owner[:] = array("i", [-1]) * total
        self.hashes[:] = array("q", [0]) * total
        self.since[:] = array("q", [at_ns]) * total

    def _arrived(self, kind: int, number: int, args: list[int], texts: Mapping[int, str]) -> None:
        record = self.requests.get(number)
        if record is None:
            record = RequestState(number, texts.get(number, f"#{number}"), blocks=[], waited_ns={})
            self.requests[number] = record
        if kind == Kind.RECEIVED:
            record.status, record.cause, record.since_ns = Status.RECEIVED, Cause.NONE, args[0]
            record.received_ns, record.prompt_tokens = args[:2]
            return
        self.now_ns = args[0]
        self.totals.arrived += 1
        record.arrived_ns, record.prompt_tokens, record.max_tokens, record.priority = args[:4]
        record.blocks_to_admit, record.blocks_to_finish = args[4:6]
        record.status, record.cause, record.since_ns = Status.WAITING, Cause.NEW, args[0]

    def _request_event(self, kind: int, record: RequestState, args: list[int]) -> None:
        totals = self.totals
        match kind:
            case Kind.QUEUED:
                status = Status.PREEMPTED if record.status == Status.PREEMPTED else Status.WAITING
                self._move(record, status, args[0])
            case Kind.ALLOCATION_FAILED:
                totals.allocation_failures += 1
                record.blocks_needed, record.blocks_free_then = args[:2]
            case Kind.NOT_SCHEDULED:
                self._move(record, record.status, args[0])
                record.times_passed_over = args[1]
            case Kind.ADMITTED:
                self._move(record, Status.RUNNING, Cause.NONE)
                record.admitted_ns = record.admitted_ns or self.now_ns
                record.progressed_ns = self.now_ns
                record.computed_tokens = args[0]
                record.times_passed_over = record.blocks_needed = record.blocks_free_then = 0
                record.stalled_ns = 0
            case Kind.FIRST_TOKEN:
                record.first_token_ns = self.now_ns
            case Kind.LOOKED_UP:
                record.looked_up_tokens, record.hit_tokens = args[:2]
                totals.looked_up_tokens += args[0]
                totals.hit_tokens += args[1]
            case Kind.PREEMPTED:
                self._move(record, Status.PREEMPTED, Cause.PREEMPTED)
                record.preemptions += 1
                record.tokens_lost += args[3]
                record.computed_tokens = 0
                totals.preemptions[args[0]] = totals.preemptions.get(args[0], 0) + 1
                totals.tokens_lost += args[3]
            case Kind.WAITING_ON:
                self._move(record, args[0], _CAUSE_OF_WAIT.get(args[0], Cause.NONE))
            case Kind.READY:
                self._move(record, Status.WAITING, Cause.NEW)
            case Kind.FINISHED:
                self._move(record, args[0], Cause.NONE)
                record.finished_ns = self.now_ns
                totals.finished[args[0]] = totals.finished.get(args[0], 0) + 1
                self._end_if_over(record)

    # ---------------------------------------------------------------- audits

    def _audited(self, kind: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        if kind == Kind.AUDIT_BEGIN:
            self._audit = _Audit(self.now_ns, set(self.requests))
        elif self._audit is None:
            return  # we came in the middle of a cycle; the next one is whole
        elif kind == Kind.AUDIT_BLOCKS:
            self._audit_blocks(args[0], ids)
        elif kind == Kind.AUDIT_REQUEST:
            self._audit_request(number, args, ids, texts)
        else:
            self._audit_end(*args[1:5])

    def _audit_blocks(self, first: int, packed: list[int]) -> None:
        """The engine's table is what decides its fate, so where the books differ they say so and follow it."""
        for block, value in enumerate(packed, first):
            if not 0 <= block < self.total:
                self._anomaly("block out of range", block, -1, f"the pool has {self.total}")
                return
            theirs, in_queue, hashed = value >> 2, bool(value & 2), bool(value & 1)
            ours = self.refs[block]
            if theirs != ours or hashed != bool(self.hashes[block]):
                detail = (
                    f"the engine has reference count {theirs}, {'a' if hashed else 'no'} hash; by the events {ours}"
                )
                self._anomaly("audit: block", block, self.owner[block], detail)
                self._adopt(block, theirs, hashed)
            if (theirs == 0) != in_queue:
                detail = f"reference count {theirs} and {'in' if in_queue else 'not in'} the free queue"
                self._anomaly("audit: free queue", block, self.owner[block], detail)

    def _adopt(self, block: int, refs: int, hashed: bool) -> None:
        was_used, was_cached = self.refs[block] > 0, bool(self.hashes[block]) and self.refs[block] <= 0
        self.refs[block] = refs
        if hashed != bool(self.hashes[block]):
            self.hashes[block] = UNKNOWN_HASH if hashed else 0
        self.used += (refs > 0) - was_used
        self.cached_idle += (hashed and refs <= 0) - was_cached
        if refs > self._known(block):
            self.orphans.add(block)

    def _audit_request(self, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        assert self._audit is not None
        status, computed, outputs, holder, fence, lease_deadline_ns, detached = args[:7]
        if not detached:
            self._audit.unseen.discard(number)
            self._audit.seen += 1
        record = self.requests.get(number)
        if not self.damaged:
            if detached:
                return
            if record is None:
                self._anomaly("audit: a request that the books do not have", -1, number, texts.get(number, ""))
            elif record.blocks != ids and sorted(record.blocks) != sorted(ids):
                detail = f"{len(ids)} blocks in the engine's table, {len(record.blocks)} by the events"
                self._anomaly("audit: block table", -1, number, detail)
            return
        name = texts.get(number, f"#{number}")
        if holder:
            self._defer(number, name, holder, fence, lease_deadline_ns, ids)
        if detached:
            for block in ids:
                if number not in self.detached.setdefault(block, []):
                    self.detached[block].append(number)
            return
        if record is None:
            record = RequestState(number, name, status, since_ns=self.now_ns, waited_ns={})
            self.requests[number] = record
        record.status, record.computed_tokens, record.output_tokens, record.blocks = status, computed, outputs, ids

    def _audit_end(self, free: int, cached_idle: int, used: int, requests: int) -> None:
        audit, self._audit = self._audit, None
        assert audit is not None
        self.audit_cycles += 1
        self.audited_ns = audit.began_ns
        if self.damaged:
            self._repair(audit)
            self.damaged = False
            self.check(free, cached_idle, used)
            return
        if audit.seen != requests:
            self._anomaly("audit: requests", -1, -1, f"{requests} announced, {audit.seen} read out")
        for number in audit.unseen:
            record = self.requests.get(number)
            if record is not None and not record.is_finished and record.status != Status.RECEIVED:
                self._anomaly(
                    "audit: a request that the engine does not have", -1, number,
                    f"{Status(record.status).name} by the events, with {len(record.blocks)} blocks",
                )  # fmt: skip

    def _repair(self, audit: _Audit) -> None:
        """A whole cycle since the loss has been read: what it did not name is gone, and owners follow the tables."""
        for number in audit.unseen:
            record = self.requests.get(number)
            if record is not None and record.status != Status.RECEIVED:
                del self.requests[number]
        self.owner[:] = array("i", [-1]) * self.total
        self.more.clear()
        for record in self.requests.values():
            for block in record.blocks:
                if self.owner[block] < 0:
                    self.owner[block] = record.number
                else:
                    self.more.setdefault(block, []).append(record.number)
        self.detached = {b: n for b, n in self.detached.items() if self.refs[b] > len(self.owners(b))}
        for number in list(self.deferrals):
            if number in audit.unseen and not any(number in former for former in self.detached.values()):
                del self.deferrals[number]
        self.orphans = {b for b in range(self.total) if self.refs[b] > self._known(b)}
        self._recount()

    def _known(self, block: int) -> int:
        """How many references the books can name, legitimate or not."""
        return len(self.owners(block)) + len(self.detached.get(block, ()))

    def _recount(self) -> None:
        self.used = sum(1 for count in self.refs if count > 0)
        self.cached_idle = sum(1 for count, value in zip(self.refs, self.hashes, strict=True) if value and count <= 0)

    # ---------------------------------------------------------------- anomalies and names

    def _anomaly(self, what: str, block: int, request: int, detail: str) -> None:
        if not self.damaged and len(self._anomalies) < MAX_ANOMALIES:
            self._anomalies.append(Anomaly(what, block, request, self._index, detail))

    def _names(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.requests[n].id if n in self.requests else f"#{n}" for n in numbers)

    # ---------------------------------------------------------------- keyframes

    def dump(self) -> memoryview:
        """All of it as bytes, to be loaded by `load`."""
        return memoryview(
            _ENCODER.encode(
                _Dump(
                    self.description,
                    self.total,
                    self.reserved,
                    self.block_size,
                    self.now_ns,
                    self.started_ns,
                    self.stopped_ns,
                    self.last_step,
                    memoryview(self.refs).cast("B"),
                    memoryview(self.owner).cast("B"),
                    memoryview(self.hashes).cast("B"),
                    memoryview(self.since).cast("B"),
                    self.more,
                    self.detached,
                    list(self.deferrals.values()),
                    list(self.requests.values()),
                    self.totals,
                    list(self.in_flight.values()),
                    self.heartbeat,
                    self.memory,
                    self.tiers,
                    self.damaged,
                    self.audit_cycles,
                    self.audited_ns,
                    sorted(self.orphans),
                )
            )
        )

    @classmethod
    def load(cls, packed: memoryview) -> State:
        """The state that `dump` packed. Raises NotAFrame for anything else."""
        try:
            dump = _DECODER.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotAFrame(f"a keyframe whose state cannot be read: {error}") from error
        state = cls()
        state.description, state.total, state.reserved = dump.description, dump.total, dump.reserved
        state.block_size, state.now_ns, state.started_ns = dump.block_size, dump.now_ns, dump.started_ns
        state.stopped_ns, state.last_step = dump.stopped_ns, dump.last_step
        for column, packed_column in (
            (state.refs, dump.refs), (state.owner, dump.owner), (state.hashes, dump.hashes), (state.since, dump.since),
        ):  # fmt: skip
            if len(packed_column) != column.itemsize * dump.total:
                raise NotAFrame(f"a keyframe of {dump.total} blocks with a column of {len(packed_column)} bytes")
            column.frombytes(packed_column)
        named = {*dump.more, *dump.detached, *dump.orphans}.union(
            *(record.blocks for record in dump.requests), *(deferral.blocks for deferral in dump.deferrals)
        )
        if named and not 0 <= min(named) <= max(named) < dump.total:
            raise NotAFrame(f"a keyframe of {dump.total} blocks that names block {max(named)}")
        state.more, state.detached = dump.more, dump.detached
        state.deferrals = {deferral.request: deferral for deferral in dump.deferrals}
        state.requests = {record.number: record for record in dump.requests}
        state.totals, state.heartbeat, state.memory, state.tiers = (
            dump.totals,
            dump.heartbeat,
            dump.memory,
            dump.tiers,
        )
        state.in_flight = {step.step: step for step in dump.in_flight}
        state.damaged, state.audit_cycles = dump.damaged, dump.audit_cycles
        state.audited_ns, state.orphans = dump.audited_ns, set(dump.orphans)
        state._recount()
        return state

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Each block as (id, reference count, first owner or -1, hash or 0), reserved ones left out."""
        for block in range(self.reserved, self.total):
            yield block, self.refs[block], self.owner[block], self.hashes[block]


class _Audit:
    """A cycle being read: the requests that the books had when it began and that it has not named yet."""

    def __init__(self, began_ns: int, requests: set[int]) -> None:
        self.began_ns = began_ns
        self.unseen = requests
        self.seen = 0


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Dump)

_CAUSE_OF_WAIT = {
    int(Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR): Cause.GRAMMAR,
    int(Status.WAITING_FOR_REMOTE_KVS): Cause.REMOTE_KV,
    int(Status.WAITING_FOR_STREAMING_REQ): Cause.STREAMING_INPUT,
}

# As plain numbers: comparing with an IntEnum's member costs several times as much, and this runs for every event.
_PROGRESSED = int(Kind.PROGRESSED)
_STEP_LAUNCHED = int(Kind.STEP_LAUNCHED)
_STEP_COMPLETED = int(Kind.STEP_COMPLETED)
_ALLOCATED = int(Kind.ALLOCATED)
_RELEASED = int(Kind.RELEASED)
_CACHED = int(Kind.CACHED)
_REUSED = int(Kind.REUSED)
_BLOCK_KINDS = frozenset(
    int(k)
    for k in (
        Kind.ALLOCATED, Kind.REUSED, Kind.CACHED, Kind.EVICTED, Kind.DETACHED, Kind.RELEASED, Kind.FREE_DEFERRED,
        Kind.RECLAIMED,
    )
)  # fmt: skip
_REQUEST_KINDS = frozenset(
    int(k)
    for k in (
        Kind.LOOKED_UP, Kind.QUEUED, Kind.ALLOCATION_FAILED, Kind.NOT_SCHEDULED, Kind.ADMITTED, Kind.FIRST_TOKEN,
        Kind.PREEMPTED, Kind.WAITING_ON, Kind.READY, Kind.FINISHED, Kind.REMOTE_LOAD, Kind.COMPLETION_DELIVERED,
    )
)  # fmt: skip
