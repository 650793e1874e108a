"""One engine's ledger: a fold of frames, and of samples where there is no stream. A fleet has one for each engine.

`apply` takes what a source brings, in order. The state itself is an EngineState. This module adds the data that
judgement needs: the position in the stream, the time there, lost batches, ended requests, the recent past.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final

from ..base.supervision import WorkerFailure
from ..contract.description import EngineDescription, parse_description
from ..contract.kinds import Cause, EngineMode, Kind, Stage, Status
from ..contract.samples import Fact, KvEvents, Record, ReportedEvent, Sample
from ..contract.wire import ADDED_BY_SOURCE, NO_REQUEST, STACK_TEXT, Batch, Keyframe, NotAFrame
from . import invariants, keyframe_codec
from .balance import Balance, balance_of, keeps_balance
from .cached_prefixes import CachedPrefixes
from .durations import OutsideWaits, StepModel, StepTimes
from .engine_state import EVENT_BITS, EngineState
from .fold import apply_events, require_few_requests
from .heartbeat_history import HeartbeatHistory
from .ledger_records import FoundAnomaly as FoundAnomaly
from .ledger_records import Loss as Loss
from .ledger_records import Point as Point
from .ledger_records import Position as Position
from .ledger_records import ReportedEvents, batch_bytes, most_missing, point_now, span_ns
from .pool_forecast import IdleFloors
from .prefix_reuse import CachedPrompts, Evictions, with_kept
from .queue_state import HeldBackQueue, Living, refused_last, sort_living
from .records import (
    UNKNOWN_POSITION,
    Anomaly,
    AnomalyKind,
    ComputedPrompt,
    EngineStack,
    Heartbeat,
    LapsedLease,
    Preemption,
    RequestState,
)
from .sample_window import SampleWindow
from .stream_clock import EpochOverlaps, StreamClock, is_next_epoch
from .tally import Tally

logger = logging.getLogger(__name__)

POINT_EVERY_NS: Final = 100_000_000
SPARSE_POINT_EVERY_NS: Final = 1_000_000_000
MAX_POINTS: Final = 36_000
MAX_ENDED_REQUESTS: Final = 4_096
MAX_ANOMALIES: Final = 1_000
MAX_LOSSES: Final = 1_000
MAX_LAPSES: Final = 1_000
MAX_PREEMPTED: Final = 4_096
MAX_PROMPTS: Final = 4_096
MAX_SAMPLES: Final = 2_000
MAX_PAST_SAMPLES: Final = 8_640  # for charts, over restarts: 12 hours at a scrape each 5 s
MAX_RECENT_BYTES: Final = 128 << 20
RUN_BYTES: Final = 20
EVENT_MASK: Final = (1 << EVENT_BITS) - 1
REFIT_AFTER: Final = 1.1
"""The model of step times is fitted again after this many times the steps."""


class EngineLedger:
    """The ledger of the engine named `engine`. One of the past is not `counting`: its points are kept elsewhere.

    Read its attributes as you like, and change none of them: `apply` keeps them consistent.
    """

    max_recent_bytes, max_recent_ns = MAX_RECENT_BYTES, 1 << 62

    def __init__(self, engine: str, *, counting: bool = True, validate: bool | None = None) -> None:
        self.engine = engine
        self.validates = invariants.is_enabled() if validate is None else validate
        """Whether every invariant is checked after every batch, by default according to KVSCOPE_VALIDATE."""
        self.counting = counting
        self.point_every_ns = POINT_EVERY_NS if counting else SPARSE_POINT_EVERY_NS
        """The least time between two points."""

        # The stream, over all epochs
        self.now_ns = 0
        """The latest wall time that a record has shown, in ns since 1970. It never goes back."""
        self.last_received_ns = 0
        """When the last record came from the engine itself, on the same clock. At most `now_ns`."""
        self.joined_ns = 0
        """The first time that the stream showed, or 0 before it."""
        self.clock = StreamClock()
        self.overlaps = EpochOverlaps()
        """Signs of other processes that use this name, and batches that came twice."""
        self.restarts = 0
        """Starts of the engine after the first one seen, by its epochs, its counters or its KV events."""
        self.recent: deque[Batch] = deque()
        """The last batches, within `max_recent_bytes` and `max_recent_ns`, and at least the very last."""
        self.recent_bytes = 0
        """About what `recent` takes: the sum of `batch_bytes` over it."""
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        """The pool and the queues over time, at least `point_every_ns` apart."""
        self.just_finished: deque[RequestState] = deque(maxlen=MAX_ENDED_REQUESTS)
        """Requests that ended since `take_just_finished` was last called, whether or not they hold blocks."""
        self.refused_records = 0
        """Records that could not be folded in. A batch or keyframe among them counts as lost too."""
        self.siblings: list[EngineLedger] = []
        """The other data-parallel ranks of its server, when it was last judged."""
        self.observer_failures: tuple[WorkerFailure, ...] = ()
        """Failed parts of the service that this engine's data depends on. The service sets them."""
        self.grave_failures: frozenset[str] = frozenset()
        """The workers among them that have failed for long and serve this engine alone."""

        # Samples, KV events and texts
        self.samples = SampleWindow(MAX_SAMPLES)
        """Samples since the engine last restarted, oldest first."""
        self.past_samples: deque[Sample] = deque(maxlen=MAX_PAST_SAMPLES)
        """Samples with a time, over restarts, for charts."""
        self.facts: dict[str, Fact] = {}
        """The last fact of each name."""
        self.reported = ReportedEvents()
        """Events in the lines of a log or the phrases of a report."""
        self.prefixes = CachedPrefixes()
        """The prefix cache as far as KV events show it."""

        # Derived from the state when asked for, and dropped with the next record that may change it
        self._balance: Balance | None = None
        self._unexplained: dict[int, int] | None = None
        self._living: Living | None = None
        self._head: RequestState | None = None
        self._head_is_known = False
        self._begin_epoch(0)

    def _begin_epoch(self, epoch: int) -> None:
        """Set everything that belongs to one start of the engine, which `epoch` names."""
        self.epoch = epoch
        """The wall clock of the engine's start, by which it names the epoch, or 0 before the first frame."""
        self.sequence = -1
        """The last batch that was folded in. Each one before it was too, or is counted in `lost_batches`."""
        self.ready = False
        """Whether the state is known: from the engine's start, or a keyframe, on."""
        self.step_times, self.outside_waits = StepTimes(), OutsideWaits()
        """How long steps, transfers and grammars took, as far as received. Kept when a keyframe replaces the state."""
        self._step_model: tuple[int, StepModel] | None = None
        """The model of step times, and the number of steps that it was fitted to."""
        self.state = self._counted(EngineState())
        self.description = EngineDescription()
        self.used_by_engine = -1
        """Blocks in use by the engine's own counter, which each batch carries, or -1 before the first."""
        self.uncertain_since_ns = 0
        """Since when figures may be wrong because events were lost, or 0 once an audit has corrected them."""
        self.losses: deque[Loss] = deque(maxlen=MAX_LOSSES)
        self.lost_batches = dict.fromkeys(Stage, 0)
        """All lost batches. `losses` has only the last of them."""
        self.dropped_batches = self.dropped_events = 0
        """What the engine itself has dropped because its buffer was full, by its last batch."""
        self.ended: deque[RequestState] = deque(maxlen=MAX_ENDED_REQUESTS)
        """Requests that finished and hold no block any more."""
        self.anomalies: list[FoundAnomaly] = []
        """The first MAX_ANOMALIES of each kind: each step and audit finds the same problem again, with less detail."""
        self._anomaly_counts: Counter[AnomalyKind] = Counter()
        self.lapses: deque[LapsedLease] = deque(maxlen=MAX_LAPSES)
        """Blocks that only the end of a lease has brought back."""
        self.preempted: deque[Preemption] = deque(maxlen=MAX_PREEMPTED)
        self.prompts: deque[ComputedPrompt] = deque(maxlen=MAX_PROMPTS)
        """Computed prompts that were looked up in the prefix cache."""
        self.floors = IdleFloors()
        """Floors in blocks that no living request holds."""
        self.beats, self.held_back, self.tally = HeartbeatHistory(), HeldBackQueue(), Tally()

    def apply(self, record: Record) -> None:
        """Fold one record in. No record from an engine makes this raise. An unusable one counts as lost, and the state
        is in doubt until a keyframe or the engine's audits correct it. A ledger that validates raises InvariantError.
        """
        self._head_is_known, self._living = False, None
        if not (isinstance(record, Batch) and keeps_balance(self.state, record)):
            self._balance = self._unexplained = None
        try:
            self._apply(record)
        except invariants.InvariantError:
            raise
        except Exception as error:
            self.refused_records += 1
            if isinstance(record, Batch | Keyframe):
                self._unreadable(record, f"{type(error).__name__}: {error}")
            logger.warning("%s: a %s was refused: %r", self.engine, type(record).__name__, error)

    def _apply(self, record: Record) -> None:
        if isinstance(record, Batch):
            if record.sequence == ADDED_BY_SOURCE:
                self._apply_source_batch(record)
            else:
                self._apply_batch(record)
        elif isinstance(record, Keyframe):
            self._apply_keyframe(record)
        elif isinstance(record, Sample):
            if record.restarted:
                self.restarts += 1
                self.samples.clear()
            self.samples.append(record)
            self.tally.sampled(record)
            if record.at_ns is not None:
                self.past_samples.append(record)
            self.now_ns = self.last_received_ns = max(self.now_ns, record.at_ns or 0)
        elif isinstance(record, KvEvents):
            self.restarts += record.restarted
            self.prefixes.apply(record)
            self.now_ns = self.last_received_ns = max(self.now_ns, record.at_ns)
        else:
            if isinstance(record, ReportedEvent):
                self.reported.add(record)
            else:
                self.facts[record.name] = record
            self.now_ns = max(self.now_ns, record.at_ns or 0)

    def _apply_batch(self, batch: Batch) -> None:
        if batch.epoch != self.epoch and not self._follows(batch):
            return  # the tail of an epoch that has ended, or another engine of this name
        if self.ready and batch.sequence <= self.sequence:
            self.overlaps.note_repeat(batch, self.now_ns, self.clock.offset_ns)
            return  # seen already
        self._advance(batch.wall_ns, batch.mono_ns, (batch.epoch, batch.sequence))
        if not self.ready and batch.sequence > 0:
            return  # without its past this batch means nothing; the source brings a keyframe
        missing = batch.sequence - self.sequence - 1
        if missing > most_missing(batch, self.recent):
            self._unreadable(batch, f"{missing:,} batches before it would be missing, and there was no time for them")
            return
        if missing > 0:
            self._lost(missing, Stage.TRANSPORT)
        if batch.dropped_batches > self.dropped_batches:
            self._lost(batch.dropped_batches - self.dropped_batches, Stage.ENGINE_BUFFER)
        self.dropped_batches, self.dropped_events = batch.dropped_batches, batch.dropped_events
        self.ready = True
        self.sequence = batch.sequence
        self._fold(batch)
        self.recent.append(batch)
        self.recent_bytes += batch_bytes(batch)
        self.drop_oldest_batches()
        if self.validates and not self.state.damaged:
            invariants.validate(self.engine, str(self.last_received_at), self.state, self.recent)

    def _fold(self, batch: Batch) -> None:
        state = self.state
        before = state.heartbeat
        try:
            runs, args, ids = batch.columns()
            require_few_requests(state, runs)
            apply_events(state, runs, args, ids, batch.texts, batch.sequence)
            if self.counting:
                self.tally.follow(state)
            if NO_REQUEST in batch.texts:
                self.description = parse_description(batch.texts[NO_REQUEST])
        except Exception as error:
            # The event breaks the contract or a limit: its meaning, and the rest of the batch, is lost.
            self._unreadable(batch, f"{type(error).__name__}: {error}")
        if state.heartbeat is not before:
            self._heartbeat_received(before, state.heartbeat)
        if batch.total > 0 and not state.counts_match(batch.free, batch.cached_idle, batch.used):
            state.check(batch.free, batch.cached_idle, batch.used)
        if batch.total > 0:
            self.used_by_engine = batch.used
        if state.news:
            self._take_news(batch)
        if self.uncertain_since_ns and not state.damaged:
            self.uncertain_since_ns = 0
        if not self.points or self.now_ns - self.points[-1].at_ns >= self.point_every_ns:
            position = Position(batch.epoch, batch.sequence, max(len(batch.runs) // RUN_BYTES - 1, 0))
            causes = self.waiting_by_cause()
            point = point_now(state, self.description, self.now_ns, position, causes, self.balance())
            if not state.damaged:
                self.floors.look_at(point, self.points[-1] if self.points else None)
            if self.counting:
                self.held_back.note(self.looked_ns, state, self.description, self.living(), self.head())
            self.points.append(point)
            # By age, too: jitter makes fewer than MAX_POINTS an hour, and the deque would go on growing for longer.
            while self.now_ns - self.points[0].at_ns > MAX_POINTS * POINT_EVERY_NS:
                self.points.popleft()

    def _take_news(self, batch: Batch) -> None:
        news = self.state.take_news()
        finished, preempted = news.finished, news.preempted
        prompts = with_kept([*news.prompts], self.description)
        self.ended.extend(news.ended)
        self.just_finished.extend(finished)
        self.lapses.extend(news.lapsed)
        self.preempted.extend(preempted)
        self.prompts.extend(prompts)
        self.tally.finished(finished)
        self.tally.recompute.recomputed(batch.wall_ns, news.recomputed)
        self.tally.recompute.add(preempted, prompts, self.state.block_size)
        for anomaly in news.anomalies.values():
            position = Position(batch.epoch, batch.sequence, anomaly.position)
            group = batch.runs.cast("i")[5 * anomaly.position + 1] if anomaly.blocks else 0  # as `fives` has it
            self._note_anomaly(FoundAnomaly(position, batch.wall_ns, anomaly, group))

    def _note_anomaly(self, found: FoundAnomaly) -> None:
        kind = found.anomaly.kind
        self._anomaly_counts[kind] += 1
        if self._anomaly_counts[kind] <= MAX_ANOMALIES:
            self.anomalies.append(found)

    def _heartbeat_received(self, before: Heartbeat | None, last: Heartbeat | None) -> None:
        wall_ns = self.wall(last.at_ns) if last is not None else 0
        ended = self.outside_waits.sends.ended if self.state.mode == EngineMode.UNPAUSED else ()
        self.beats.add(before, last, wall_ns, self.state.places.heartbeat, self.description.engine == "vllm", ended)

    def _apply_source_batch(self, batch: Batch) -> None:
        for event in batch.events():
            if event.kind == Kind.OBSERVED and event.args:
                observed_ns = self.clock.observed(event.args[0], batch.mono_ns, self.now_ns)
                self.now_ns = max(self.now_ns, observed_ns)
                self.joined_ns = self.joined_ns or self.now_ns
            elif event.kind == Kind.STACK and self.ready:  # of an engine that cannot send it
                at_ns, layer = self.now_ns - self.clock.offset_ns, (*event.args, 0, 0, 0, 0)[3]
                self.state.stack = EngineStack(at_ns, -1, 0, layer, batch.texts.get(STACK_TEXT, ""))
            elif event.kind == Kind.LOST and self.ready:
                first, last, stage = (*event.args, 0, 0, 0)[:3]
                self._lost(max(last - first + 1, 1), Stage(stage) if stage in set(Stage) else Stage.TRANSPORT)

    def _apply_keyframe(self, keyframe: Keyframe) -> None:
        if keyframe.epoch != self.epoch and not self._follows(keyframe):
            return None
        self._advance(keyframe.wall_ns, keyframe.mono_ns, (keyframe.epoch, keyframe.sequence))
        if self.ready and keyframe.sequence <= self.sequence and not self.state.damaged:
            return None  # in step already: the events show it better
        try:
            state = keyframe_codec.load_state(keyframe.state)
            self.description = parse_description(state.description)
        except NotAFrame as error:
            return self._unreadable(keyframe, str(error))
        state.lost_at = (keyframe.sequence << EVENT_BITS | EVENT_MASK) if state.damaged else UNKNOWN_POSITION
        before = self.state.heartbeat if self.ready else None
        self.state = self._counted(state)
        self.tally.in_step = False
        self._heartbeat_received(before, state.heartbeat)
        self.ready = True
        self.sequence = keyframe.sequence
        self.uncertain_since_ns = self.now_ns if self.state.damaged else 0
        return None

    def _counted(self, state: EngineState) -> EngineState:
        """Return a state that replaces the current one, set to report to this ledger what it counts."""
        self._balance = self._unexplained = None
        state.evictions = Evictions() if self.counting else None
        state.cached_prompts = CachedPrompts() if self.counting else None
        state.step_times = self.step_times if self.counting else None
        state.outside_waits = self.outside_waits if self.counting else None
        return state

    def _follows(self, frame: Batch | Keyframe) -> bool:
        """Begin the epoch of `frame`, if it follows this one."""
        if not is_next_epoch(frame, self.epoch, self.now_ns - self.last_received_ns):
            self.overlaps.note_other(frame, self.now_ns)
            return False
        self.restarts += self.epoch != 0
        self.clock.begin_epoch()
        self._begin_epoch(frame.epoch)
        return True

    def _advance(self, wall_ns: int, mono_ns: int, place: tuple[int, int]) -> None:
        at_ns = self.clock.frame(wall_ns, mono_ns, self.now_ns, self.last_received_ns, place)
        self.now_ns = max(self.now_ns, at_ns)
        self.last_received_ns = max(self.last_received_ns, at_ns)
        self.joined_ns = self.joined_ns or self.now_ns

    def _lost(self, batches: int, stage: Stage) -> None:
        self.lost_batches[stage] += batches
        self.losses.append(Loss(batches, stage, self.now_ns, str(Position(self.epoch, self.sequence))))
        self.state.mark_damaged()
        self._balance = self._unexplained = None
        self.uncertain_since_ns = self.uncertain_since_ns or self.now_ns

    def _unreadable(self, frame: Batch | Keyframe, why: str) -> None:
        anomaly = Anomaly(AnomalyKind.UNREADABLE, [], -1, 0, why)
        self._note_anomaly(FoundAnomaly(Position(frame.epoch, frame.sequence), self.now_ns, anomaly))
        self._lost(1, Stage.TRANSPORT)

    def drop_oldest_batches(self) -> None:
        """Drop batches beyond `max_recent_bytes`, and those from longer than `max_recent_ns` before the last."""
        while len(self.recent) > 1 and (
            self.recent_bytes > self.max_recent_bytes or span_ns(self.recent) > self.max_recent_ns
        ):
            self.recent_bytes -= batch_bytes(self.recent.popleft())

    def recount(self) -> None:
        """Begin the counts at this time: earlier events were received by others."""
        self.tally = Tally()
        self.state.residency_samples = None

    def take_just_finished(self) -> list[RequestState]:
        """Return the requests that ended since the last call, at most the last MAX_ENDED_REQUESTS."""
        finished = list(self.just_finished)
        self.just_finished.clear()
        return finished

    # ---------------------------------------------------------------- what others ask

    @property
    def has_stream(self) -> bool:
        """Whether blocks and requests are known one by one, not only as figures."""
        return self.ready

    def balance(self) -> Balance:
        """Return the balance of the pool now."""
        if self._balance is None:
            self._balance = balance_of(self.state, self.unexplained_references())
        return self._balance

    def unexplained_references(self) -> dict[int, int]:
        """Return by block the references that no owner explains, for several detectors."""
        if self._unexplained is None:
            self._unexplained = self.state.unexplained_references()
        return self._unexplained

    def wall(self, mono_ns: int) -> int:
        """Return a time of the engine's monotonic clock as ns since 1970. 0 stays 0."""
        return mono_ns + self.clock.offset_ns if mono_ns else 0

    def age_s(self, mono_ns: int) -> float:
        """Seconds from a time of the engine's monotonic clock until now."""
        return max(0.0, (self.now_ns - self.wall(mono_ns)) / 1e9)

    @property
    def looked_ns(self) -> int:
        """When the scheduler is last known to have gone over its queue, on the engine's monotonic clock: it launched a
        step then, or has made a pass since. Requests that were left in place until then do stay there.
        """
        return max(self.state.launched_ns, self.beats.passed_ns)

    def step_model(self) -> StepModel | None:
        """Return the step-time model of this epoch, or None before one step was seen from launch to end."""
        count = self.step_times.count
        if self._step_model is None or count >= REFIT_AFTER * self._step_model[0]:
            self._step_model = (count, StepModel(self.step_times.steps)) if count else None
        return self._step_model[1] if self._step_model else None

    def unpolled_s(self) -> float:
        """Return for how long the KV connector has not been polled, or 0 if the engine counts no polls."""
        beat = self.state.heartbeat
        return (beat.at_ns - self.beats.polled_ns) / 1e9 if beat is not None and beat.connector_polls else 0.0

    def position(self) -> Position:
        """Where the ledger is in the stream."""
        return Position(self.epoch, self.sequence)

    @property
    def last_received_at(self) -> Position:
        """The ledger's position in the stream: the last event received."""
        last = self.recent[-1] if self.recent else None
        events = len(last.runs) // RUN_BYTES if last is not None and last.sequence == self.sequence else 1
        return Position(self.epoch, self.sequence, max(events - 1, 0))

    def at(self, *places: int) -> str:
        """Return the last of these positions in this epoch's stream, or an empty string if none is known."""
        place = max(places, default=UNKNOWN_POSITION)
        return str(Position(self.epoch, place >> EVENT_BITS, place & EVENT_MASK)) if place >= 0 else ""

    def request(self, name: str) -> RequestState | None:
        """Return a request by its id or `#number`, live or recently ended."""
        for record in (*self.state.requests.values(), *reversed(self.ended)):
            if name in (record.id, f"#{record.number}"):
                return record
        return None

    def cause_of_wait(self, record: RequestState) -> Cause:
        """Return why a request waits: the engine names the head of the queue's reason, and a request without one stands
        behind that head.
        """
        if record.is_waiting and record.cause in (Cause.NEW, Cause.PREEMPTED) and self.head() not in (None, record):
            return Cause.BEHIND_HEAD
        try:
            return Cause(record.cause)
        except ValueError:
            return Cause.NONE

    def waiting_by_cause(self) -> Counter[int]:
        """Count the waiting requests by `cause_of_wait`, all at once, since there may be thousands."""
        requests = self.state.requests.values()
        counts = Counter([r.cause for r in requests if r.status != Status.RUNNING and r.is_waiting])
        head = self.head() if counts else None
        if head is not None:
            for cause in (Cause.NEW, Cause.PREEMPTED):
                behind = counts.pop(cause, 0)
                if head.cause == cause:
                    counts[cause] = 1
                    behind -= 1
                counts[Cause.BEHIND_HEAD] += behind
        return +counts

    def living(self) -> Living:
        """Return the requests that have not ended, for every detector of requests."""
        if self._living is None:
            self._living = sort_living(self.state.requests.values())
        return self._living

    def head(self) -> RequestState | None:
        """Return the waiting request that the scheduler skipped last: the one the others stand behind."""
        if not self._head_is_known:  # a caller that explains each waiting request calls this as often
            self._head, self._head_is_known = refused_last(self.state.requests.values()), True
        return self._head


class Fleet:
    """The ledgers of all engines, by name."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLedger] = {}
        self.max_recent_ns = EngineLedger.max_recent_ns
        """The bound that each new ledger gets."""

    def apply(self, record: Record) -> EngineLedger:
        """Fold a record into the ledger of the engine it names, which it returns."""
        ledger = self.engines.get(record.engine)
        if ledger is None:
            ledger = self.engines[record.engine] = EngineLedger(record.engine)
            ledger.max_recent_ns = self.max_recent_ns
        ledger.apply(record)
        return ledger

    def siblings(self, ledger: EngineLedger) -> list[EngineLedger]:
        """Return the other data-parallel ranks of its server, which are named NAME@HOST:PORT/RANK."""
        server, rank, _ = ledger.engine.rpartition("/")
        others = (other for other in self.engines.values() if rank and other is not ledger)
        return [other for other in others if other.engine.rpartition("/")[0] == server]
