"""The state of one engine at one stream position: every block, request, queue and counter.

A block is *used* while references to it are known, *cached-idle* if unused but still holding a hash, else *free*.
Its owners are the requests whose block tables name it. An owner that has finished is a legitimate holder only through
an announced deferral (FREE_DEFERRED). See `unaccounted` and `unexplained_references`.

An impossible transition (a release of a free block, counts that disagree, …) becomes an anomaly and never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from kvscope.monitor.events.kinds import FIRST_FINISHED, EngineMode, Holder
from kvscope.monitor.state.cached_prompts import CachedPrompts
from kvscope.monitor.state.evictions import Evictions
from kvscope.monitor.state.outside_waits import OutsideWaits
from kvscope.monitor.state.records import (
    UNKNOWN_POSITION,
    Anomaly,
    AuditCycle,
    ComputedPrompt,
    Deferral,
    EngineStack,
    Heartbeat,
    LapsedLease,
    Preemption,
    RequestState,
    StepInFlight,
    StreamPositions,
    TierState,
    Totals,
)
from kvscope.monitor.state.residency_samples import ResidencySamples
from kvscope.monitor.state.step_times import StepTimes

MAX_STATE_ANOMALIES: Final = 1000
MOST_CACHED_UNSEEN: Final = 1 << 28
EVENT_BITS: Final = 24
"""A stream position as one number: the lowest bits count the events of a batch, the bits above them the batches."""
NAMED_OWNERS: Final = 8
"""Owners of a block that an anomaly names."""
MAX_TURNS: Final = 4096
"""Preemptions and computed prompts kept until a reader takes them. If none does, the last ones remain."""
LEASE_SLACK_NS: Final = 100_000_000
"""The engine reports its clock once a scheduler pass, so a lease that ends during a pass ends this little later."""
FEWER_FREE: Final = "counts with fewer free blocks"
"""An anomaly: the engine has fewer blocks to hand out than its events leave free, so none is handed out too early."""


class EngineState:
    """The state of one engine in one epoch. `kvscope.monitor.state.fold.apply_events` folds events into it."""

    # Slots: with this many attributes, a slot is read and written twice as fast as an entry of an instance's __dict__.
    __slots__ = (
        "__weakref__",
        "anomalies",
        "audit_cycle",
        "audit_cycles",
        "audited_ns",
        "block_size",
        "born",
        "cached_idle",
        "cached_prompts",
        "columns",
        "computed_ns",
        "computed_prompts",
        "damaged",
        "deferrals",
        "description",
        "detached",
        "early",
        "ended",
        "event_index",
        "evictions",
        "fences",
        "finished",
        "hashes",
        "heartbeat",
        "in_flight",
        "lapsed",
        "last_preemption",
        "last_step",
        "launched_ns",
        "longest_step_ns",
        "lost_at",
        "lost_ns",
        "lost_tokens",
        "memory",
        "mode",
        "mode_since_ns",
        "more",
        "now_ns",
        "orphans",
        "outside_waits",
        "owner",
        "pending_drops",
        "pinned",
        "places",
        "preempted",
        "prompt_blocks_cached",
        "recomputed",
        "refs",
        "requests",
        "reserved",
        "residency_samples",
        "sequence",
        "since",
        "stack",
        "started_ns",
        "step_times",
        "stopped_ns",
        "tiers",
        "total",
        "totals",
        "used",
    )

    def __init__(self) -> None:
        self.description = ""
        self.total = 0
        self.reserved = 0
        self.block_size = 0
        self.now_ns = 0
        self.started_ns = self.stopped_ns = 0
        self.last_step = -1
        self.launched_ns = self.computed_ns = self.longest_step_ns = 0  # computed: when tokens last were
        self.mode = int(EngineMode.UNPAUSED)
        self.mode_since_ns = 0
        self.stack: EngineStack | None = None  # of the last step that was late
        self.set_columns([], [], [], [], [])
        # By request: blocks that consecutive events released or detached, and how many were freed.
        self.pending_drops: dict[int, tuple[list[int], int]] = {}
        # Owners after the first, and former owners of blocks that left a table without becoming free.
        self.more: dict[int, list[int]] = {}
        self.detached: dict[int, list[int]] = {}
        self.deferrals: dict[int, Deferral] = {}
        self.pinned: dict[int, int] = {}  # by block: since when a reference other than a request's
        # By step not yet complete: the requests whose deferrals are fenced behind it.
        self.fences: dict[int, list[int]] = {}
        # Blocks that became free before the step they were fenced behind completed, with that step.
        self.early: dict[int, int] = {}
        self.requests: dict[int, RequestState] = {}
        self.used = 0
        self.cached_idle = 0
        self.totals = Totals()
        self.prompt_blocks_cached = 0  # entered the prefix cache for requests without a token of output yet
        self.evictions: Evictions | None = None  # set by a reader that wants evictions attributed to prompts
        self.cached_prompts: CachedPrompts | None = None  # and prompts compared with what the cache had
        self.in_flight: dict[int, StepInFlight] = {}
        self.step_times: StepTimes | None = None  # set by a reader that judges how long steps take
        self.outside_waits: OutsideWaits | None = None  # and how long waits for transfers and grammars take
        self.heartbeat: Heartbeat | None = None
        self.memory: list[int] = []
        self.tiers: dict[int, TierState] = {}
        self.residency_samples: ResidencySamples | None = None  # set by a reader that counts residency
        # Audits. `orphans` are blocks that an audit showed to have more references than known owners.
        self.damaged = False
        self.lost_ns = 0  # while damaged: when the last event before the latest loss was, and its position
        self.lost_at = UNKNOWN_POSITION
        self.audit_cycles = 0
        self.audited_ns = 0
        self.orphans: set[int] = set()
        self.audit_cycle: AuditCycle | None = None
        # Found by the last folds, until a reader takes them: see take_ended and take_anomalies.
        self.ended: list[RequestState] = []
        self.finished: list[RequestState] = []
        self.lapsed: list[LapsedLease] = []
        self.preempted: deque[Preemption] = deque(maxlen=MAX_TURNS)
        self.computed_prompts: deque[ComputedPrompt] = deque(maxlen=MAX_TURNS)
        self.recomputed = 0
        self.anomalies: list[Anomaly] = []
        self.last_preemption: Preemption | None = None
        # By request: the computed tokens that a preemption took, until the request runs again.
        self.lost_tokens: dict[int, int] = {}
        # The event being folded, and the last event about each thing that concerns the whole engine.
        self.sequence, self.event_index = -1, 0
        self.places = StreamPositions()

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
        """The same lists in one attribute: the hot path fetches all of them at once."""

    @property
    def position(self) -> int:
        """The stream position of the event being folded, below 0 if its batch has no number."""
        return self.sequence << EVENT_BITS | self.event_index

    @property
    def free(self) -> int:
        """Blocks in the free queue, including cached-idle ones."""
        return self.total - self.reserved - self.used

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
        record = self.requests.get(request)
        return (record is not None and not record.is_finished) or self.is_deferred(request, block)

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

    @property
    def has_news(self) -> bool:
        """Whether any of the `take_…` methods would return something."""
        return bool(
            self.ended
            or self.finished
            or self.lapsed
            or self.preempted
            or self.computed_prompts
            or self.recomputed
            or self.anomalies
        )

    def take_ended(self) -> list[RequestState]:
        """Return and forget the requests that finished and hold no block any more."""
        ended, self.ended = self.ended, []
        return ended

    def take_finished(self) -> list[RequestState]:
        """Return and forget the requests that reached a terminal status, whether or not they still hold blocks."""
        finished, self.finished = self.finished, []
        return finished

    def take_lapsed(self) -> list[LapsedLease]:
        """Return and forget the deferrals that ended because their lease ran out."""
        lapsed, self.lapsed = self.lapsed, []
        return lapsed

    def take_preempted(self) -> list[Preemption]:
        """Return and forget the preemptions."""
        preempted = list(self.preempted)
        self.preempted.clear()
        return preempted

    def take_prompts(self) -> list[ComputedPrompt]:
        """Return and forget the prompts that were looked up in the prefix cache and have been computed."""
        prompts = list(self.computed_prompts)
        self.computed_prompts.clear()
        return prompts

    def take_recomputed(self) -> int:
        """Return and reset the number of tokens recomputed for preempted requests that were admitted again."""
        recomputed, self.recomputed = self.recomputed, 0
        return recomputed

    def take_anomalies(self) -> list[Anomaly]:
        """Return and forget the impossible transitions, at most MAX_STATE_ANOMALIES."""
        found, self.anomalies = self.anomalies, []
        return found

    # ---------------------------------------------------------------- changes

    def mark_damaged(self) -> None:
        """Record that events were lost for good: the engine's audits are the truth until one cycle is complete."""
        self.damaged = True
        self.lost_ns, self.lost_at = self.now_ns, self.position
        self.early.clear()  # the steps that these blocks were fenced behind may have ended in the gap
        self.residency_samples = None
        self.lost_tokens.clear()  # which requests were admitted again in the gap is unknown
        self.audit_cycle = None  # a cycle half read proves nothing
        self.prompt_blocks_cached += (
            MOST_CACHED_UNSEEN  # up to so many may have been cached in the gap: see prompt_computed
        )
        if self.cached_prompts is not None:
            self.cached_prompts.clear()
        for record in self.requests.values():
            record.ready_ns = record.fetch_ended_ns = 0  # the events that followed may be among the lost ones
        for tier in self.tiers.values():
            tier.pins.clear()  # no audit reports pins, and their unpinning may be among the lost events

    def anomaly(self, what: str, block: int, request: int, detail: str) -> None:
        """Record an impossible transition, unless lost events may explain it."""
        explained = not self.is_certain_block(block) if 0 <= block < self.total else self.damaged
        if not explained and len(self.anomalies) < MAX_STATE_ANOMALIES:
            self.anomalies.append(Anomaly(what, block, request, self.event_index, detail))

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
                name = FEWER_FREE if fewer else "counts"
                self.anomaly(name, -1, -1, f"the engine counts {theirs} {what} blocks, the ledger {ours}")

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
                self.lapsed.append(
                    LapsedLease(deferral.id, deferral.since_ns, self.now_ns, lapsed, self.position, expired, unseen_ns)
                )
            deferral.blocks.difference_update(blocks)
            deferral.changed_at = self.position
            if not deferral.blocks:
                del self.deferrals[number]
                if self.outside_waits is not None and deferral.holder == Holder.CONNECTOR:
                    self._note_send(self.outside_waits, deferral)

    def _outlived_lease(self, deferral: Deferral) -> bool:
        """Return whether more likely the lease than the transfer ended it, of an engine that reports both alike.

        It looks between steps, so that a transfer may have ended at any time since the look before. If that lies in
        the first half of the lease, or none does, the report says little about which came first.
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

    def owner_names(self, block: int) -> str:
        """Join the ids of the block's owners, at most NAMED_OWNERS of them, for an anomaly's detail."""
        first, more = self.owner[block], self.more.get(block, [])
        numbers = [] if first < 0 else [first, *more[: NAMED_OWNERS - 1]]
        names = [self.requests[n].id if n in self.requests else f"#{n}" for n in numbers]
        others = len(more) + 1 - len(numbers) if numbers else 0
        return ", ".join([*names, f"{others:,} more"] if others else names)
