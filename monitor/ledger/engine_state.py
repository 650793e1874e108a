"""The state of one engine at one stream position: every block, request, queue and counter.

A block is *used* while references to it are known, *cached-idle* if unused but still holding a hash, else *free*.
Its owners are the requests whose block tables name it. An owner that has finished is a legitimate holder only through
an announced deferral (FREE_DEFERRED). See `unaccounted` and `unexplained_references`.

An impossible transition (a release of a free block, counts that disagree, …) becomes an anomaly and never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ..contract.kinds import FIRST_FINISHED, EngineMode, Holder
from .durations import OutsideWaits, StepTimes
from .prefix_reuse import CachedPrompts, Evictions
from .records import (
    NO_BLOCK,
    UNKNOWN_POSITION,
    Anomaly,
    AnomalyKind,
    AuditCycle,
    ComputedPrompt,
    Deferral,
    DroppedTable,
    EngineStack,
    Heartbeat,
    LapsedLease,
    Preemption,
    RequestState,
    ResidencySamples,
    StepInFlight,
    StreamPositions,
    TierState,
    Totals,
)

MAX_STATE_ANOMALIES: Final = 1000
MOST_CACHED_UNSEEN: Final = 1 << 28
EVENT_BITS: Final = 24
"""A stream position as one number: the lowest bits count the events of a batch, the bits above them the batches."""
MAX_TURNS: Final = 4096
"""Preemptions and computed prompts kept until a reader takes them. If none does, the last ones remain."""
LEASE_SLACK_NS: Final = 100_000_000
"""The engine reports its clock once a scheduler pass, so a lease that ends during a pass ends this little later."""


@dataclass(slots=True, eq=False)
class News:
    """What the folds found since a reader last took it."""

    ended: list[RequestState] = field(default_factory=list)
    """Requests that finished and hold no block any more."""
    finished: list[RequestState] = field(default_factory=list)
    """Requests that reached a terminal status, whether or not they still hold blocks."""
    lapsed: list[LapsedLease] = field(default_factory=list)
    """Deferrals that ended because their lease ran out."""
    preempted: deque[Preemption] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))
    prompts: deque[ComputedPrompt] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))
    """Prompts that were looked up in the prefix cache and have been computed."""
    recomputed: int = 0
    """Tokens recomputed for preempted requests that were admitted again."""
    anomalies: dict[tuple[AnomalyKind, int, int, str], Anomaly] = field(default_factory=dict)
    """Impossible transitions, at most MAX_STATE_ANOMALIES, by their kind, request, position and detail: an event that
    breaks one rule at many blocks is one.
    """

    def __bool__(self) -> bool:
        return bool(
            self.ended
            or self.finished
            or self.lapsed
            or self.preempted
            or self.prompts
            or self.recomputed
            or self.anomalies
        )


# Slots: with this many attributes, a slot is read and written twice as fast as an entry of an instance's __dict__.
@dataclass(slots=True, weakref_slot=True, eq=False)
class EngineState:
    """The state of one engine in one epoch. `kvscope.monitor.ledger.fold.apply_events` folds events into it."""

    description: str = ""
    total: int = 0
    reserved: int = 0
    block_size: int = 0
    now_ns: int = 0
    started_ns: int = 0
    stopped_ns: int = 0
    last_step: int = -1
    """The last step that completed."""
    launched_ns: int = 0
    computed_ns: int = 0
    """When tokens were last computed."""
    longest_step_ns: int = 0
    mode: int = int(EngineMode.UNPAUSED)
    mode_since_ns: int = 0
    stack: EngineStack | None = None
    """Of the last step that was late."""

    refs: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    columns: tuple[list[int], list[int], list[int], list[int], list[int]] = field(init=False)
    """The five columns in one attribute: the hot path fetches all of them at once. See `set_columns`."""
    pending_drops: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """By request: blocks that consecutive events released or detached, and how many were freed."""
    more: dict[int, list[int]] = field(default_factory=dict)
    """By block: its owners after the first."""
    detached: dict[int, list[int]] = field(default_factory=dict)
    """By block: former owners whose tables it left without becoming free."""
    deferrals: dict[int, Deferral] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    """By block: since when it has had a reference other than a request's."""
    fences: dict[int, list[int]] = field(default_factory=dict)
    """By step not yet complete: the requests whose deferrals are fenced behind it."""
    early: dict[int, int] = field(default_factory=dict)
    """Blocks that became free before the step they were fenced behind completed, with that step."""
    requests: dict[int, RequestState] = field(default_factory=dict)
    used: int = 0
    cached_idle: int = 0
    totals: Totals = field(default_factory=Totals)
    prompt_blocks_cached: int = 0
    """Blocks that entered the prefix cache for requests without a token of output yet."""
    in_flight: dict[int, StepInFlight] = field(default_factory=dict)
    heartbeat: Heartbeat | None = None
    memory: list[int] = field(default_factory=list)
    tiers: dict[int, TierState] = field(default_factory=dict)

    evictions: Evictions | None = None
    """Set by a reader that wants evictions attributed to prompts."""
    cached_prompts: CachedPrompts | None = None
    """Set by a reader that wants prompts compared with what the cache had."""
    step_times: StepTimes | None = None
    """Set by a reader that judges how long steps take."""
    outside_waits: OutsideWaits | None = None
    """Set by a reader that judges how long waits for transfers and grammars take."""
    residency_samples: ResidencySamples | None = None
    """Set by a reader that counts residency, and None again after a loss, when it must count the pool anew."""

    damaged: bool = False
    """Whether lost events may have changed anything that no audit has corrected since."""
    lost_ns: int = 0
    """While damaged: when the last event before the latest loss was."""
    lost_at: int = UNKNOWN_POSITION
    """While damaged: the position of that event."""
    audit_cycles: int = 0
    audited_ns: int = 0
    """When the last complete audit began."""
    orphans: set[int] = field(default_factory=set)
    """Blocks that an audit showed to have more references than known owners."""
    dropped: dict[int, DroppedTable] = field(default_factory=dict)
    """By request: blocks among the orphans that an audit showed to have left its table without a free."""
    stale: dict[int, list[int]] = field(default_factory=dict)
    """By block: requests whose tables still name it, although another has freed it from them."""
    told: dict[int, int] = field(default_factory=dict)
    """By block: what audits report of it that no state can have, as they report it. It is an anomaly once."""
    audit_cycle: AuditCycle | None = None
    """The audit that is being read."""

    news: News = field(default_factory=News)
    last_preemption: Preemption | None = None
    lost_tokens: dict[int, int] = field(default_factory=dict)
    """By request: the computed tokens that a preemption took, until the request runs again."""
    sequence: int = -1
    """The batch of the event being folded, and `event_index` its place there."""
    event_index: int = 0
    places: StreamPositions = field(default_factory=StreamPositions)
    """The last event about each thing that concerns the whole engine."""

    def __post_init__(self) -> None:
        self.set_columns(self.refs, self.owner, self.hashes, self.since, self.born)

    def set_columns(
        self, refs: list[int], owner: list[int], hashes: list[int], since: list[int], born: list[int]
    ) -> None:
        """Set the columns of the blocks, one value for each block.

        Reference count, first owner (-1: none), keyed hash (0: none), since when free or in use, and when last
        allocated (0: before the first event received). Lists, because single values are read and written several times
        as fast as in arrays.
        """
        self.refs, self.owner, self.hashes, self.since, self.born = refs, owner, hashes, since, born
        self.columns = refs, owner, hashes, since, born

    @property
    def position(self) -> int:
        """The stream position of the event being folded, below 0 if its batch has no number."""
        return self.sequence << EVENT_BITS | self.event_index

    @property
    def free(self) -> int:
        """Blocks in the free queue, including cached-idle ones."""
        return self.total - self.reserved - self.used

    def blocks_of_tokens(self, record: RequestState) -> int:
        """Return how many blocks of one KV group a request's tokens fill, without what the output still becomes."""
        return -(-(record.prompt_tokens + record.output_tokens) // max(self.block_size, 1))

    @property
    def usable(self) -> int:
        """Blocks that requests can have."""
        return self.total - self.reserved

    @property
    def samples(self) -> ResidencySamples:
        """Where residency is sampled: the reader's columns, or a throwaway if no reader counts it."""
        return self.residency_samples or ResidencySamples()

    # ---------------------------------------------------------------- queries

    def owners(self, block: int) -> list[int]:
        """Return the numbers of the requests whose tables name the block."""
        first = self.owner[block]
        return [] if first < 0 else [first, *self.more.get(block, ())]

    def is_legitimate(self, request: int, block: int) -> bool:
        """Whether this owner may hold the block: it has not finished, or a deferral was announced for the block."""
        return self.is_alive(request) or self.is_deferred(request, block)

    def is_alive(self, request: int) -> bool:
        """Whether the request is there and has not finished."""
        record = self.requests.get(request)
        return record is not None and not record.is_finished

    def is_deferred(self, request: int, block: int) -> bool:
        """Whether an announced deferral lets this block outlive this request."""
        deferral = self.deferrals.get(request)
        return deferral is not None and block in deferral.blocks

    def unaccounted(self) -> list[int]:
        """Blocks in use for which no live request and no announced deferral accounts, lowest first."""
        return sorted(b for b in self._suspects() if self.refs[b] > 0 and not self._holders(b))

    def unexplained_references(self) -> dict[int, int]:
        """By block, the number of references that no live request and no announced deferral explains."""
        refs, owner = self.refs, self.owner
        several = self.more.keys() | self.detached.keys()
        surplus: dict[int, int] = {}
        suspects = set(self.detached) | self.orphans
        for record in self.requests.values():
            if record.status < FIRST_FINISHED or not record.blocks:
                continue
            # Most blocks have one owner: sets decide these at once, however many a deferral or a leak keeps.
            alone = {block for block in record.blocks if owner[block] == record.number} - several
            suspects.update(block for block in record.blocks if block not in alone)
            deferral = self.deferrals.get(record.number)
            deferred = alone & deferral.blocks if deferral is not None else set()
            surplus |= {block: refs[block] for block in alone - deferred}
            surplus |= {block: refs[block] - 1 for block in deferred if refs[block] != 1}
        surplus |= {block: refs[block] - self._holders(block) for block in suspects - surplus.keys()}
        return {block: extra for block, extra in sorted(surplus.items()) if extra > 0}

    def _suspects(self) -> set[int]:
        """Return the only blocks whose references can be unexplained."""
        suspects = set(self.detached) | self.orphans
        for record in self.requests.values():
            if record.status >= FIRST_FINISHED:
                suspects.update(record.blocks)
        return suspects

    def _holders(self, block: int) -> int:
        """Count the known legitimate references to the block."""
        by_owner = sum(self.is_legitimate(owner, block) for owner in self.owners(block))
        return by_owner + sum(self.is_deferred(former, block) for former in self.detached.get(block, ()))

    def known_references(self, block: int) -> int:
        """Count the known references to the block, legitimate or not."""
        return len(self.owners(block)) + len(self.detached.get(block, ()))

    def counts_match(self, free: int, cached_idle: int, used: int) -> bool:
        """Whether the engine's counts of the pool equal the state's."""
        return used == self.used and cached_idle == self.cached_idle and free == self.free

    def is_certain_block(self, block: int) -> bool:
        """Whether no lost event can have changed who holds the block: it was taken from the free queue since."""
        return not self.damaged or self.born[block] > self.lost_ns

    def is_certain_request(self, record: RequestState) -> bool:
        """Whether an event received since the last loss shows that the request is where the state has it."""
        return (
            not self.damaged
            or max(record.since_ns, record.arrived_ns, record.progressed_ns) > self.lost_ns
            or max(record.passed_over_at, record.refused_at, record.stalled_at, record.not_queued_at) > self.lost_at
        )

    def is_certain_deferral(self, deferral: Deferral) -> bool:
        """Whether the deferral was announced since the last loss, so that its end would have been received."""
        return not self.damaged or deferral.since_at > self.lost_at

    def take_news(self) -> News:
        """Return and forget what the folds have found since the last call."""
        news, self.news = self.news, News()
        return news

    # ---------------------------------------------------------------- changes

    def mark_damaged(self) -> None:
        """Record that events were lost for good: the engine's audits are the truth until one cycle is complete."""
        self.damaged = True
        self.lost_ns, self.lost_at = self.now_ns, self.position
        self.early.clear()  # the steps that these blocks were fenced behind may have ended in the gap
        self.stale.clear()  # the tables may have changed in it
        self.residency_samples = None
        self.lost_tokens.clear()  # which requests were admitted again in the gap is unknown
        self.audit_cycle = None  # a cycle half read proves nothing
        self.prompt_blocks_cached += MOST_CACHED_UNSEEN  # as many as equal prompts may have cached in the gap
        if self.cached_prompts is not None:
            self.cached_prompts.clear()
        for record in self.requests.values():
            record.ready_ns = record.fetch_ended_ns = 0  # the events that followed may be among the lost ones
        for tier in self.tiers.values():
            tier.pins.clear()  # no audit reports pins, and their unpinning may be among the lost events

    def anomaly(self, kind: AnomalyKind, block: int, request: int, detail: str) -> None:
        """Record an impossible transition, unless lost events may explain it."""
        explained = not self.is_certain_block(block) if 0 <= block < self.total else self.damaged
        if explained:
            return
        anomalies, key = self.news.anomalies, (kind, request, self.position, detail)
        if key not in anomalies and len(anomalies) < MAX_STATE_ANOMALIES:
            anomalies[key] = Anomaly(kind, [], request, self.event_index, detail)
        if block != NO_BLOCK and key in anomalies:
            anomalies[key].blocks.append(block)

    def check(self, free: int, cached_idle: int, used: int) -> None:
        """Compare the engine's own counts with the state (-1: not reported). A difference is an anomaly."""
        if self.damaged:
            return
        for what, theirs, ours in (
            ("free", free, self.free),
            ("cached-idle", cached_idle, self.cached_idle),
            ("used", used, self.used),
        ):
            if theirs not in (-1, ours):
                fewer = theirs > ours if what == "used" else theirs < ours
                kind = AnomalyKind.FEWER_FREE if fewer else AnomalyKind.COUNTS
                self.anomaly(kind, -1, -1, f"the engine counts {theirs} {what} blocks, the ledger {ours}")

    def defer(
        self, number: int, name: str, holder: int, fence: int, lease_deadline_ns: int, blocks: Iterable[int]
    ) -> None:
        """Record which holder keeps these blocks after the request finished."""
        deferral = self.deferrals.get(number)
        if deferral is None:
            deferral = Deferral(
                number, name, holder, self.now_ns, fence, lease_deadline_ns, set(), since_at=self.position
            )
            self.deferrals[number] = deferral
            self._fence(deferral)
        elif deferral.holder != holder:
            deferral.holder, deferral.since_ns, deferral.fence = holder, self.now_ns, fence
            deferral.lease_deadline_ns, deferral.since_at = lease_deadline_ns, self.position
            self._fence(deferral)
        deferral.blocks.update(blocks)
        deferral.changed_at = self.position

    def sending_blocks(self, number: int) -> list[int]:
        """Return the blocks that the connector keeps for the request."""
        deferral = self.deferrals.get(number)
        return list(deferral.blocks) if deferral is not None and deferral.holder == Holder.CONNECTOR else []

    def undefer(self, number: int, blocks: Iterable[int], expired: bool = False) -> None:
        """End the deferral of these blocks. expired: the engine names the lease as what ended it."""
        deferral = self.deferrals.get(number)
        if deferral is not None:
            if expired or self._outlived_lease(deferral):
                lapsed = tuple(deferral.blocks.intersection(blocks))
                unseen_ns = self.now_ns - self.launched_ns
                self.news.lapsed.append(
                    LapsedLease(deferral.id, deferral.since_ns, self.now_ns, lapsed, self.position, expired, unseen_ns)
                )
            deferral.blocks.difference_update(blocks)
            deferral.changed_at = self.position
            if not deferral.blocks:
                del self.deferrals[number]
                if self.outside_waits is not None and deferral.holder == Holder.CONNECTOR:
                    self._note_send(self.outside_waits, deferral)

    def _outlived_lease(self, deferral: Deferral) -> bool:
        """Return whether the deferral more likely ended with its lease than with its transfer.

        Some engines report both alike. They look between steps, so a transfer may have ended at any time since the look
        before. If that was in the first half of the lease, the report says little about which came first.
        """
        deadline_ns, beat = deferral.lease_deadline_ns, self.heartbeat
        idle_ns = beat.at_ns if beat is not None and beat.step_in_flight < 0 else 0
        looked_ns = max(self.launched_ns, idle_ns)
        return 0 < deadline_ns <= self.now_ns + LEASE_SLACK_NS and 2 * looked_ns >= deferral.since_ns + deadline_ns

    def _note_send(self, waits: OutsideWaits, deferral: Deferral) -> None:
        """Keep how long the connector took, unless the request was being fetched or the lease ended the wait."""
        record = self.requests.get(deferral.request)
        lapsed = 0 < deferral.lease_deadline_ns <= self.now_ns + LEASE_SLACK_NS
        if not lapsed and (record is None or not record.fetching_ns):
            waits.sends.note(
                deferral.since_ns, self.now_ns, record.ended_blocks if record is not None else 0, deferral.id
            )

    def rebuild_fences(self) -> None:
        """Derive `fences` from the deferrals, after a keyframe or an audit replaced them."""
        self.fences.clear()
        for deferral in self.deferrals.values():
            self._fence(deferral)

    def _fence(self, deferral: Deferral) -> None:
        if deferral.holder == Holder.FENCE and not deferral.fence_passed_ns:
            if deferral.fence <= self.last_step:
                deferral.fence_passed_ns, deferral.fence_passed_at = self.now_ns, self.position
            else:
                self.fences.setdefault(deferral.fence, []).append(deferral.request)

    def recount(self) -> None:
        """Derive `used` and `cached_idle` from the columns, after a keyframe or an audit replaced them."""
        self.used = sum(1 for count in self.refs if count > 0)
        self.cached_idle = sum(1 for count, value in zip(self.refs, self.hashes, strict=True) if value and count <= 0)
