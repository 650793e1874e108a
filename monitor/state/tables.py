"""The books of one engine at one moment: every block, request, queue and counter, and what can be asked of them.

A block is *used* while references to it are known, *cached-idle* if unused but still holding a hash, else *free*.
Its owners are the requests whose block tables name it. An owner that has finished is a legitimate holder only by a
deferral that was announced (FREE_DEFERRED); see `unaccounted` and `unexplained_references`.

What cannot be (a release of a free block, counts that disagree, …) is kept as an anomaly and never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from kvscope.monitor.events.kinds import FIRST_FINISHED, EngineMode, Holder
from kvscope.monitor.state.evictions import Evictions
from kvscope.monitor.state.records import (
    Anomaly,
    Deferral,
    EngineStack,
    Heartbeat,
    Lapse,
    Places,
    Preemption,
    Prompt,
    RequestState,
    StepInFlight,
    TierState,
    Totals,
)
from kvscope.monitor.state.residency_samples import Stays

MAX_ANOMALIES: Final = 1000
EVENT_BITS: Final = 24
"""Of a place in the stream: its lowest bits count the events of a batch, those above them the batches."""
MAX_TURNS: Final = 4096
"""Preemptions and computed prompts that are kept for whoever folds; who does not take them has the last of them."""
LEASE_SLACK_NS: Final = 100_000_000
"""The engine's clock is said once a pass: a lease that ends in a pass ends this little after what was said."""


class Books:
    """What is known of one engine in one epoch; State folds events into it."""

    def __init__(self) -> None:
        self.description = ""
        self.total = 0
        self.reserved = 0
        self.block_size = 0
        self.now_ns = 0
        self.started_ns = 0
        self.stopped_ns = 0
        self.last_step = -1
        self.launched_ns = 0  # when the last step was launched
        self.mode = int(EngineMode.SERVING)
        self.mode_since_ns = 0
        self.stack: EngineStack | None = None  # of the last step that was late
        # A column a block: reference count, first owner (-1: none), keyed hash (0: none), since when free or in use,
        # and when last handed out (0: not since we have listened). Lists, since they are read and written several
        # times as quickly as arrays, one value at a time.
        self.refs: list[int] = []
        self.owner: list[int] = []
        self.hashes: list[int] = []
        self.since: list[int] = []
        self.born: list[int] = []
        # Owners after the first; and former owners of blocks that left a table and did not become free.
        self.more: dict[int, list[int]] = {}
        self.detached: dict[int, list[int]] = {}
        self.deferrals: dict[int, Deferral] = {}
        # By a step that is not complete, whose deferrals are fenced behind it.
        self.fences: dict[int, list[int]] = {}
        # Blocks that became free before the step they were fenced behind was complete, with that step.
        self.early: dict[int, int] = {}
        self.requests: dict[int, RequestState] = {}
        self.used = 0
        self.cached_idle = 0
        self.totals = Totals()
        self.prompt_blocks_cached = 0  # that entered the prefix cache for requests without a token of output yet
        self.evictions: Evictions | None = None  # whose prompt evicted what, if somebody judges it
        self.in_flight: dict[int, StepInFlight] = {}
        self.heartbeat: Heartbeat | None = None
        self.memory: list[int] = []
        self.tiers: dict[int, TierState] = {}
        self.stays: Stays | None = None  # what became of blocks, if somebody counts it
        # Audits. `orphans` are blocks that an audit showed to have more references than these books know owners for.
        self.damaged = False
        self.audit_cycles = 0
        self.audited_ns = 0
        self.orphans: set[int] = set()
        # What the last applies turned up, for whoever folds to take away: see take_ended and take_anomalies.
        self._ended: list[RequestState] = []
        self._finished: list[RequestState] = []
        self._lapsed: list[Lapse] = []
        self._preempted: deque[Preemption] = deque(maxlen=MAX_TURNS)
        self._prompts: deque[Prompt] = deque(maxlen=MAX_TURNS)
        self._recomputed = 0
        self._anomalies: list[Anomaly] = []
        # Where we are: which event of which batch is folded in, and where what is so of the whole engine was said.
        self._sequence = -1
        self._index = 0
        self.places = Places()

    # ---------------------------------------------------------------- what a reader asks

    @property
    def here(self) -> int:
        """The place in the stream of the event that is folded in: below 0 if its batch has no number."""
        return self._sequence << EVENT_BITS | self._index

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
            if record.status >= FIRST_FINISHED:
                suspects.update(record.blocks)
        return suspects

    def _holders(self, block: int) -> int:
        """How many legitimate references the books know of."""
        by_owner = sum(self.is_legitimate(owner, block) for owner in self.owners(block))
        return by_owner + sum(self.is_deferred(former, block) for former in self.detached.get(block, ()))

    def known_references(self, block: int) -> int:
        """How many references the books can name, legitimate or not."""
        return len(self.owners(block)) + len(self.detached.get(block, ()))

    def counts_match(self, free: int, cached_idle: int, used: int) -> bool:
        """Whether these are the pool's counts by the books too."""
        return used == self.used and cached_idle == self.cached_idle and free == self.free

    @property
    def has_news(self) -> bool:
        """Whether there is anything to take, of what follows."""
        return bool(
            self._ended
            or self._finished
            or self._lapsed
            or self._preempted
            or self._prompts
            or self._recomputed
            or self._anomalies
        )

    def take_ended(self) -> list[RequestState]:
        """Requests that ended and hold nothing any more, since last asked; the books forget them."""
        ended, self._ended = self._ended, []
        return ended

    def take_finished(self) -> list[RequestState]:
        """Requests that reached a terminal status since last asked, whatever they may still hold."""
        finished, self._finished = self._finished, []
        return finished

    def take_lapsed(self) -> list[Lapse]:
        """Deferrals that their lease has ended since last asked."""
        lapsed, self._lapsed = self._lapsed, []
        return lapsed

    def take_preempted(self) -> list[Preemption]:
        """Preemptions since last asked."""
        preempted = list(self._preempted)
        self._preempted.clear()
        return preempted

    def take_prompts(self) -> list[Prompt]:
        """Prompts that were looked up in the prefix cache and have been computed since last asked."""
        prompts = list(self._prompts)
        self._prompts.clear()
        return prompts

    def take_recomputed(self) -> int:
        """Tokens that had to be computed again after a preemption, of the requests let in again since last asked."""
        recomputed, self._recomputed = self._recomputed, 0
        return recomputed

    def take_anomalies(self) -> list[Anomaly]:
        """What was found since last asked, at most MAX_ANOMALIES of it."""
        found, self._anomalies = self._anomalies, []
        return found

    # ---------------------------------------------------------------- what a fold writes

    def anomaly(self, what: str, block: int, request: int, detail: str) -> None:
        """Note something that cannot be, unless the books are known to be wrong."""
        if not self.damaged and len(self._anomalies) < MAX_ANOMALIES:
            self._anomalies.append(Anomaly(what, block, request, self._index, detail))

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
                self.anomaly("counts", -1, -1, f"the engine counts {theirs} {what} blocks, the books {ours}")

    def defer(
        self, number: int, name: str, holder: int, fence: int, lease_deadline_ns: int, blocks: Iterable[int]
    ) -> None:
        """Note who holds these blocks beyond the request's end."""
        deferral = self.deferrals.get(number)
        if deferral is None:
            deferral = Deferral(number, name, holder, self.now_ns, fence, lease_deadline_ns, set(), since_at=self.here)
            self.deferrals[number] = deferral
            self._fence(deferral)
        elif deferral.holder != holder:
            deferral.holder, deferral.since_ns, deferral.fence = holder, self.now_ns, fence
            deferral.lease_deadline_ns, deferral.since_at = lease_deadline_ns, self.here
            self._fence(deferral)
        deferral.blocks.update(blocks)
        deferral.changed_at = self.here

    def undefer(self, number: int, blocks: Iterable[int]) -> None:
        """These blocks are kept for nobody any more."""
        deferral = self.deferrals.get(number)
        if deferral is not None:
            if 0 < deferral.lease_deadline_ns <= self.now_ns + LEASE_SLACK_NS:
                lapsed = tuple(deferral.blocks.intersection(blocks))
                self._lapsed.append(Lapse(deferral.id, deferral.since_ns, self.now_ns, lapsed, self.here))
            deferral.blocks.difference_update(blocks)
            deferral.changed_at = self.here
            if not deferral.blocks:
                del self.deferrals[number]

    def fences_anew(self) -> None:
        """Find again what waits for which step, after the deferrals were written from outside."""
        self.fences.clear()
        for deferral in self.deferrals.values():
            self._fence(deferral)

    def _fence(self, deferral: Deferral) -> None:
        if deferral.holder == Holder.FENCE and not deferral.fence_passed_ns:
            if deferral.fence <= self.last_step:
                deferral.fence_passed_ns, deferral.fence_passed_at = self.now_ns, self.here
            else:
                self.fences.setdefault(deferral.fence, []).append(deferral.request)

    def recount(self) -> None:
        """Count anew what `apply` keeps count of, after the columns were written from outside."""
        self.used = sum(1 for count in self.refs if count > 0)
        self.cached_idle = sum(1 for count, value in zip(self.refs, self.hashes, strict=True) if value and count <= 0)

    def names(self, numbers: Iterable[int]) -> str:
        """The ids of these requests, for an anomaly's detail."""
        return ", ".join(self.requests[n].id if n in self.requests else f"#{n}" for n in numbers)
