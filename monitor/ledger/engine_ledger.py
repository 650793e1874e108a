"""One engine's ledger: a fold of frames, and of samples where there is no stream.

`apply` takes what a source brings, in order. The state itself is kvscope.monitor.state. This module adds the data that
judgement needs: the position in the stream, the time there, lost batches, ended requests, the recent past.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final

from kvscope.monitor.events.description import EngineDescription, parse_description
from kvscope.monitor.events.kinds import Cause, EngineMode, Kind, Stage, Status
from kvscope.monitor.events.samples import Fact, KvEvents, Record, ReportedEvent, Sample
from kvscope.monitor.events.wire import ADDED_BY_SOURCE, NO_REQUEST, STACK_TEXT, Batch, Keyframe, NotAFrame
from kvscope.monitor.ledger import validation
from kvscope.monitor.ledger.balance import Balance, balance_of, keeps_balance
from kvscope.monitor.ledger.cached_prefixes import CachedPrefixes
from kvscope.monitor.ledger.epoch_overlaps import EpochOverlaps, is_next_epoch
from kvscope.monitor.ledger.heartbeat_history import HeartbeatHistory
from kvscope.monitor.ledger.held_back import HeldBackQueue
from kvscope.monitor.ledger.idle_floors import IdleFloors
from kvscope.monitor.ledger.ledger_records import FoundAnomaly as FoundAnomaly
from kvscope.monitor.ledger.ledger_records import Loss as Loss
from kvscope.monitor.ledger.ledger_records import Point as Point
from kvscope.monitor.ledger.ledger_records import Position as Position
from kvscope.monitor.ledger.living_requests import Living, refused_last, sort_living
from kvscope.monitor.ledger.pool_points import batch_bytes, point_now
from kvscope.monitor.ledger.reported_events import ReportedEvents
from kvscope.monitor.ledger.step_model import StepModel
from kvscope.monitor.ledger.stream_clock import StreamClock
from kvscope.monitor.ledger.tally import Tally
from kvscope.monitor.state import keyframe_codec
from kvscope.monitor.state.cached_prompts import CachedPrompts, with_kept
from kvscope.monitor.state.engine_state import EVENT_BITS, EngineState
from kvscope.monitor.state.evictions import Evictions
from kvscope.monitor.state.fold import apply_events
from kvscope.monitor.state.outside_waits import OutsideWaits
from kvscope.monitor.state.records import (
    UNKNOWN_POSITION,
    Anomaly,
    ComputedPrompt,
    EngineStack,
    Heartbeat,
    LapsedLease,
    Preemption,
    RequestState,
)
from kvscope.monitor.state.step_times import StepTimes
from kvscope.monitor.supervision import WorkerFailure

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
    """The ledger of the engine named `engine`. One of the past is not `counting`: its points are kept elsewhere."""

    used_by_engine = -1
    """Blocks in use by the engine's own counter, which each batch carries, or -1 before the first."""
    _balance: Balance | None = None
    _unexplained: dict[int, int] | None = None
    """Unexplained references of the current state, dropped with the next record that may change them."""
    max_recent_bytes = MAX_RECENT_BYTES

    def __init__(self, engine: str, *, counting: bool = True, validate: bool | None = None) -> None:
        self.engine = engine
        self.validates = validation.is_enabled() if validate is None else validate
        """Whether every invariant is checked after every batch, by default according to KVSCOPE_VALIDATE."""
        self.counting = counting
        self.point_every_ns = POINT_EVERY_NS if counting else SPARSE_POINT_EVERY_NS
        self.epoch = 0
        self.sequence = -1
        self.step_times, self.outside_waits = StepTimes(), OutsideWaits()
        """Step times and waits of this epoch, as far as received."""
        self.state = self._begun(EngineState())
        self.description = EngineDescription()
        self.ready = False
        """Whether the state is known: from the engine's start, or a keyframe, on."""
        self.now_ns = 0
        """The latest wall time that the stream has shown, in ns since 1970."""
        self.last_received_ns = 0
        """When the last event came from the engine itself, on the same clock."""
        self.joined_ns = 0
        self.uncertain_since_ns = 0
        """Since when figures may be wrong because events were lost, or 0 once an audit has corrected them."""
        self.restarts = 0
        self.losses: deque[Loss] = deque(maxlen=MAX_LOSSES)
        self.lost_batches = dict.fromkeys(Stage, 0)
        """All losses in this epoch. `losses` keeps only the last of them."""
        self.dropped_batches = self.dropped_events = 0
        self.observer_failures: tuple[WorkerFailure, ...] = ()
        """Failed parts of the service that this engine's data depends on, not of the stream."""
        self.refused_records = 0
        """Records that could not be folded in."""
        self.ended: deque[RequestState] = deque(maxlen=MAX_ENDED_REQUESTS)
        self.just_finished: deque[RequestState] = deque(maxlen=MAX_ENDED_REQUESTS)
        self.anomalies: list[FoundAnomaly] = []
        """The first MAX_ANOMALIES of each kind: each step and audit finds the same problem again, with less detail."""
        self._anomalies: Counter[str] = Counter()
        self.lapses: deque[LapsedLease] = deque(maxlen=MAX_LAPSES)
        """Blocks that only the end of a lease has brought back."""
        self.preempted: deque[Preemption] = deque(maxlen=MAX_PREEMPTED)
        self.prompts: deque[ComputedPrompt] = deque(maxlen=MAX_PROMPTS)
        """Computed prompts that were looked up in the prefix cache."""
        self.floors = IdleFloors()
        """In blocks that no living request holds."""
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.recent: deque[Batch] = deque()
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.past_samples: deque[Sample] = deque(maxlen=MAX_PAST_SAMPLES)
        self.facts: dict[str, Fact] = {}
        self.reported = ReportedEvents()
        self.prefixes = CachedPrefixes()
        """The cache by KV events, where there are any."""
        self.tally = Tally()
        self.beats, self.held_back = HeartbeatHistory(), HeldBackQueue()
        self.recent_bytes = 0  # about what `recent` takes
        self.clock = StreamClock()
        self.overlaps = EpochOverlaps()
        """Other engine processes that use this name, and batches that came twice."""
        self._step_model: tuple[int, StepModel] | None = None
        self._head: RequestState | None = None
        self._head_is_known = False
        self._living: Living | None = None

    # ---------------------------------------------------------------- the fold

    def apply(self, record: Record) -> None:
        """Fold one record in. No record from an engine makes this raise. An unusable one counts as lost, and the state
        is in doubt until a keyframe or the engine's audits correct it. A ledger that validates raises InvariantError.
        """
        self._head_is_known, self._living = False, None
        if not (isinstance(record, Batch) and keeps_balance(self.state, record)):
            self._balance = self._unexplained = None
        try:
            self._apply(record)
        except validation.InvariantError:
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
        if missing > 0:
            self._lost(missing, Stage.TRANSPORT)
        if batch.dropped_batches > self.dropped_batches:
            self._lost(batch.dropped_batches - self.dropped_batches, Stage.ENGINE_BUFFER)
        self.dropped_batches, self.dropped_events = batch.dropped_batches, batch.dropped_events
        self.ready = True
        self.sequence = batch.sequence
        self._fold(batch)
        self._keep(batch)
        if self.validates and not (self.state.damaged or self.losses or self.anomalies):
            validation.validate(self.engine, str(self.last_received_at), self.state, self.recent)

    def _fold(self, batch: Batch) -> None:
        state = self.state
        before = state.heartbeat
        try:
            runs, args, ids = batch.columns()
            apply_events(state, runs, args, ids, batch.texts, batch.sequence)
            if self.counting:
                self.tally.follow(state)
            if NO_REQUEST in batch.texts:
                self.description = parse_description(batch.texts[NO_REQUEST])
        except Exception as error:
            # The event breaks the layout of the contract: its meaning, and the rest of the batch, is lost.
            self._unreadable(batch, f"{type(error).__name__}: {error}")
        if state.heartbeat is not before:
            self._heartbeat_received(before, state.heartbeat)
        if batch.total > 0 and not state.counts_match(batch.free, batch.cached_idle, batch.used):
            state.check(batch.free, batch.cached_idle, batch.used)
        if batch.total > 0:
            self.used_by_engine = batch.used
        if state.has_news:
            self._take_news(batch)
        if self.uncertain_since_ns and not state.damaged:
            self.uncertain_since_ns = 0
        if not self.points or self.now_ns - self.points[-1].at_ns >= self.point_every_ns:
            position = Position(batch.epoch, batch.sequence, max(len(batch.runs) // RUN_BYTES - 1, 0))
            causes = self.waiting_by_cause()
            point = point_now(state, self.description, self.now_ns, position, causes, self.balance())
            if not state.damaged:
                self._look_at_floor(point)
            if self.counting:
                self.held_back.note(self.looked_ns, state, self.description, self.living(), self.head())
            self.points.append(point)

    def _take_news(self, batch: Batch) -> None:
        state = self.state
        finished, preempted = state.take_finished(), state.take_preempted()
        prompts = with_kept(state.take_prompts(), self.description)
        self.ended.extend(state.take_ended())
        self.just_finished.extend(finished)
        self.lapses.extend(state.take_lapsed())
        self.preempted.extend(preempted)
        self.prompts.extend(prompts)
        self.tally.finished(finished)
        self.tally.recompute.recomputed(batch.wall_ns, state.take_recomputed())
        self.tally.recompute.add(preempted, prompts, state.block_size)
        for anomaly in state.take_anomalies():
            position = Position(batch.epoch, batch.sequence, anomaly.position)
            self._note_anomaly(FoundAnomaly(position, batch.wall_ns, anomaly))

    def _note_anomaly(self, found: FoundAnomaly) -> None:
        what = found.anomaly.what
        self._anomalies[what] += 1
        if self._anomalies[what] <= MAX_ANOMALIES:
            self.anomalies.append(found)

    def _look_at_floor(self, point: Point) -> None:
        worked = bool(self.points) and point.finished_requests != self.points[-1].finished_requests
        in_use = point.balance.finished + point.balance.unaccounted
        idle = not (point.running or point.waiting)
        self.floors.look(point.at_ns, idle=idle, worked=worked, in_use=in_use, where=str(point.position))

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
                at_ns = self.now_ns - self.clock.offset_ns
                self.state.stack = EngineStack(
                    at_ns, -1, 0, (*event.args, 0, 0, 0, 0)[3], batch.texts.get(STACK_TEXT, "")
                )
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
        self.state = self._begun(state)
        self.tally.in_step = False
        self._heartbeat_received(before, state.heartbeat)
        self.ready = True
        self.sequence = keyframe.sequence
        self.uncertain_since_ns = self.now_ns if self.state.damaged else 0
        return None

    def _begun(self, state: EngineState) -> EngineState:
        """Books that are ours from here on."""
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
        self._new_epoch(frame.epoch)
        return True

    def _new_epoch(self, epoch: int) -> None:
        self.restarts += self.epoch != 0
        self.epoch = epoch
        self.clock.begin_epoch()
        self.sequence = -1
        self.step_times, self._step_model, self.outside_waits = StepTimes(), None, OutsideWaits()
        self.state = self._begun(EngineState())
        self.tally = Tally()
        self.description = EngineDescription()
        self.ready = False
        self.uncertain_since_ns = 0
        self.beats, self.held_back, self.used_by_engine = HeartbeatHistory(), HeldBackQueue(), -1
        self.lapses.clear()
        self.preempted.clear()
        self.prompts.clear()
        self.floors.clear()
        self.dropped_batches = self.dropped_events = 0
        self.ended.clear()
        self.anomalies.clear()
        self._anomalies.clear()
        self.losses.clear()
        self.lost_batches = dict.fromkeys(Stage, 0)

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
        anomaly = Anomaly("what the engine sent cannot be read", -1, -1, 0, why)
        self._note_anomaly(FoundAnomaly(Position(frame.epoch, frame.sequence), self.now_ns, anomaly))
        self._lost(1, Stage.TRANSPORT)

    def _keep(self, batch: Batch) -> None:
        self.recent.append(batch)
        self.recent_bytes += batch_bytes(batch)
        self.drop_oldest_batches()

    def drop_oldest_batches(self) -> None:
        """Drop batches beyond `max_recent_bytes`."""
        while self.recent_bytes > self.max_recent_bytes and len(self.recent) > 1:
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
        """How many wait, by `cause_of_wait` of each: in one go, since there may be thousands."""
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
