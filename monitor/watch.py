"""The road from records to answers, in one process: feed it what sources bring, and ask it through monitor.query.

Judgement happens in the stream's own time, twice a second of it, so that a recording is judged as the live stream was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from monitor import detectors
from monitor.detectors.thresholds import Settings
from monitor.events.kinds import FIRST_FINISHED, Cause, Status, name_of
from monitor.events.records import RequestState
from monitor.events.sample import Fact, Sample
from monitor.events.wire import Run
from monitor.findings import Finding, FindingReport, Findings, Transition
from monitor.ledger.because import because
from monitor.ledger.bill import measured
from monitor.ledger.drops import Drop, drop, steepest_fall
from monitor.ledger.ledger import EngineLedger, Fleet, Point, Position, Record
from monitor.ledger.life import in_words, phases
from monitor.ledger.story import StoryLine, events, names_in, story_of_block, story_of_request
from monitor.ledger.waits import Wait, wait_of
from monitor.ledger.words import counted, duration, moment, timestamp
from monitor.views import (
    BLOCK_STATES,
    BlockDetail,
    BlockMap,
    ConditionView,
    EngineView,
    FindingState,
    PhaseView,
    PointView,
    RequestDetail,
    RequestView,
    StoryView,
)  # fmt: skip

JUDGE_EVERY_NS: Final = 500_000_000
SILENT_AFTER_S: Final = 3.5
RATE_OVER_NS: Final = 5_000_000_000


class NotKnown(LookupError):
    """There is no such engine, request or block; the message says what there is."""


class Ended(NamedTuple):
    """A request that ended, with what is needed to put its times on the wall clock."""

    engine: str
    request: RequestState
    wall_minus_mono_ns: int


class Watch:
    """Ledgers and findings of all engines fed to it. Thread-safe; answers are copies."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.fleet = Fleet()
        self.findings = Findings()
        self.settings = settings or Settings()
        self._judged_ns: dict[str, int] = {}
        self._transitions: list[Transition] = []
        self._ended: list[Ended] = []
        self._lock = threading.RLock()

    def locked(self) -> threading.RLock:
        """The lock over all of it, for an outlet that reads the ledgers themselves: `with watch.locked(): …`."""
        return self._lock

    # ---------------------------------------------------------------- in

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order, judging as the stream's time passes."""
        with self._lock:
            for record in records:
                ledger = self.fleet.apply(record)
                if not isinstance(record, Fact):
                    due = self._judged_ns.get(ledger.engine, 0) + JUDGE_EVERY_NS
                    if ledger.now_ns >= due:
                        self._judge(ledger)

    def settle(self) -> None:
        """Judge every engine as it stands: at the end of a recording or a log."""
        with self._lock:
            for ledger in self.fleet.engines.values():
                self._judge(ledger)

    def take_transitions(self) -> list[Transition]:
        """Findings that began to fire or were resolved since last asked."""
        with self._lock:
            taken, self._transitions = self._transitions, []
            return taken

    def take_ended(self) -> list[Ended]:
        """Requests that ended since last asked, whether their blocks came back or not."""
        with self._lock:
            return [
                Ended(ledger.engine, record, ledger.wall(1) - 1)
                for ledger in self.fleet.engines.values()
                for record in ledger.take_just_finished()
            ]

    def _judge(self, ledger: EngineLedger) -> None:
        self._judged_ns[ledger.engine] = ledger.now_ns
        judgements = list(detectors.judge(ledger, self.settings))
        self._transitions += self.findings.update(ledger.engine, ledger.now_ns, judgements)
        del self._transitions[:-1000]

    # ---------------------------------------------------------------- out: monitor.query.Query

    def engines(self) -> list[EngineView]:
        """Every engine at a glance, by name."""
        with self._lock:
            return [self._engine(ledger) for _, ledger in sorted(self.fleet.engines.items())]

    def find(self, state: FindingState | None = None) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved: the worst first. Their effects are in them."""
        with self._lock:
            found: list[Finding] = []
            if state in (None, "firing"):
                found += self.findings.firing()
            if state in (None, "resolved"):
                found += self.findings.resolved()
            if state == "pending":
                found += self.findings.pending()
            if state == "suppressed":
                found += self.findings.suppressed()
            return [finding.report() for finding in found]

    def points(self, engine: str, seconds: float = 600.0, most: int = 600) -> list[PointView]:
        """The recent past, at most `most` moments of it, evenly thinned."""
        with self._lock:
            ledger = self._ledger(engine)
            since = ledger.now_ns - seconds * 1e9
            points = [point for point in ledger.points if point.at_ns >= since]
            stride = max(1, -(-len(points) // most))
            return [_point_view(point) for point in points[(len(points) - 1) % stride :: stride]]

    def requests(self, engine: str) -> list[RequestView]:
        """Requests that live or hold blocks, the longest in their state first; then those that ended of late."""
        with self._lock:
            ledger = self._ledger(engine)
            alive = sorted(ledger.state.requests.values(), key=lambda record: record.since_ns)
            return [_request_view(ledger, r) for r in alive] + [
                _request_view(ledger, r, ended=True) for r in list(ledger.ended)[:-101:-1]
            ]

    def request(self, engine: str, name: str) -> RequestDetail:
        """One request by its id or `#number`. Raises NotKnown."""
        with self._lock:
            ledger = self._streamed(engine)
            record = ledger.request(name)
            if record is None:
                raise NotKnown(f"{engine} has no request {name!r}, nor has one of that name ended there of late")
            began_ns = ledger.wall(record.received_ns or record.arrived_ns)
            about = list(events([b for b in ledger.recent if b.wall_ns >= began_ns], record.number))
            story = story_of_request(about, record.number, names_in(ledger))
            return RequestDetail(
                engine=engine,
                request=_request_view(ledger, record, ended=record.number not in ledger.state.requests),
                blocks=list(record.blocks),
                waited_s={name_of(Cause, cause): round(ns / 1e9, 3) for cause, ns in record.waited_ns.items()},
                story=[_story_view(line) for line in story],
                story_is_whole=any(line.what in ("received", "arrived") for line in story),
                life=_life(ledger, record, about),
                conditions=_conditions(ledger, record),
                waits=_waits(ledger, record),
                unused_tokens=_unused_tokens(ledger, record),
            )

    def block(self, engine: str, block: int) -> BlockDetail:
        """One block. Raises NotKnown."""
        with self._lock:
            ledger = self._streamed(engine)
            try:
                chains = because(ledger, block)
            except ValueError as error:
                raise NotKnown(str(error)) from None
            names = names_in(ledger)
            state = ledger.state
            return BlockDetail(
                engine=engine,
                block=block,
                state=BLOCK_STATES[_block_states(ledger)[block]],
                references=state.refs[block],
                owners=[names.get(number, f"#{number}") for number in state.owners(block)],
                hashed=bool(state.hashes[block]),
                because=chains,
                story=[_story_view(line) for line in story_of_block(ledger.recent, block, names)],
            )

    def block_map(self, engine: str) -> BlockMap:
        """What every block is now."""
        with self._lock:
            ledger = self._ledger(engine)
            return BlockMap(engine, timestamp(ledger.now_ns), ledger.state.total, bytes(_block_states(ledger)))

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, in the `window_s` seconds around the time `at`; where usage fell
        furthest if it is empty. Raises ValueError for what is no time.
        """
        with self._lock:
            ledger = self._streamed(engine)
            at_ns = moment(at, ledger.now_ns) if at else steepest_fall(ledger.points, window_s)
            return drop(ledger, at_ns, window_s)

    # ---------------------------------------------------------------- how answers are made

    def _ledger(self, engine: str) -> EngineLedger:
        ledger = self.fleet.engines.get(engine)
        if ledger is None:
            known = ", ".join(sorted(self.fleet.engines)) or "none yet"
            raise NotKnown(f"there is no engine {engine!r} here; there are: {known}")
        return ledger

    def _streamed(self, engine: str) -> EngineLedger:
        """The ledger of an engine whose requests and blocks are known one by one."""
        ledger = self._ledger(engine)
        if ledger.samples and not ledger.has_stream:
            raise NotKnown(f"{engine} is known by its figures alone: requests and blocks are in its event stream")
        return ledger

    def _engine(self, ledger: EngineLedger) -> EngineView:
        counts: dict[str, int] = {}
        for finding in self.findings.firing():
            if finding.judgement.engine == ledger.engine:
                counts[finding.severity] = counts.get(finding.severity, 0) + 1
        return _stream_view(ledger, counts) if ledger.has_stream else _figures_view(ledger, counts)


def _stream_view(ledger: EngineLedger, findings: dict[str, int]) -> EngineView:
    state, described = ledger.state, ledger.description
    balance = ledger.balance()
    reasons: dict[str, int] = {}
    running = 0
    for record in state.requests.values():
        running += record.is_running
        if record.is_waiting:
            reason = ledger.cause_of_wait(record).name
            reasons[reason] = reasons.get(reason, 0) + 1
    silent_s = (ledger.now_ns - ledger.heard_ns) / 1e9
    if state.stopped_ns:
        status = "stopped"
    elif silent_s > SILENT_AFTER_S:
        status = "silent"
    else:
        status = "serving" if running or reasons else "idle"
    totals = state.totals
    recent = [point for point in ledger.points if point.at_ns >= ledger.now_ns - RATE_OVER_NS]
    over_s = (recent[-1].at_ns - recent[0].at_ns) / 1e9 if len(recent) > 1 else 0.0
    usable = balance.total - balance.reserved
    return EngineView(
        engine=ledger.engine,
        model=described.served_model_name or described.model,
        version=" ".join(filter(None, (described.engine, described.version))),
        attached="stream",
        status=status,  # type: ignore[arg-type]
        at=timestamp(ledger.now_ns),
        heard_s_ago=round(silent_s, 3),
        epoch=ledger.epoch,
        restarts=ledger.restarts,
        step=state.last_step,
        running=running,
        waiting=sum(reasons.values()),
        waiting_by_reason=reasons,
        usage=state.used / usable if usable else None,
        balance=balance,
        output_tokens_per_s=round((recent[-1].output_tokens - recent[0].output_tokens) / over_s, 1) if over_s else None,
        computed_tokens_per_s=(
            round((recent[-1].computed_tokens - recent[0].computed_tokens) / over_s, 1) if over_s else None
        ),
        preemptions=sum(totals.preemptions.values()),
        prefix_hit_rate=totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else None,
        batches_lost=sum(loss.batches for loss in ledger.losses),
        events_dropped=ledger.dropped_events,
        uncertain_since=timestamp(ledger.uncertain_since_ns),
        faults=list(described.faults),
        configuration={
            field: value
            for field, value in msgspec.to_builtins(described).items()
            if field not in ("faults", "other") and value
        },
        findings=findings,
        memory=measured(state.memory),
    )


def _figures_view(ledger: EngineLedger, findings: dict[str, int]) -> EngineView:
    last = ledger.samples[-1] if ledger.samples else Sample(ledger.engine, "")
    facts = {name: fact.value for name, fact in ledger.facts.items() if name not in ("last_stamp", "exposition")}
    return EngineView(
        engine=ledger.engine,
        model=str(facts.get("served_model_name", facts.get("model", ""))),
        version=str(facts.get("version", "")),
        attached="figures",
        status="unknown" if last.running is None else "serving" if last.running or last.waiting else "idle",
        at=timestamp(ledger.now_ns),
        heard_s_ago=0.0,
        epoch=0,
        restarts=ledger.restarts,
        step=last.steps,
        running=last.running,
        waiting=last.waiting,
        waiting_by_reason={"DEFERRED": last.deferred} if last.deferred else {},
        usage=last.usage,
        balance=None,
        output_tokens_per_s=last.generation_tokens_per_s,
        computed_tokens_per_s=last.prompt_tokens_per_s,
        preemptions=last.preemptions,
        prefix_hit_rate=last.prefix_hit_rate,
        batches_lost=0,
        events_dropped=0,
        uncertain_since=None,
        faults=[],
        configuration=dict(facts),
        findings=findings,
    )


def _request_view(ledger: EngineLedger, record: RequestState, ended: bool = False) -> RequestView:
    return RequestView(
        id=record.id,
        number=record.number,
        state=name_of(Status, record.status),
        reason=_reason(ledger, record),
        since=timestamp(ledger.wall(record.since_ns)),
        for_s=round(ledger.age_s(record.since_ns), 3),
        arrived=timestamp(ledger.wall(record.arrived_ns)),
        blocks=len(record.blocks),
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        computed_tokens=record.computed_tokens,
        output_tokens=record.output_tokens,
        hit_tokens=record.hit_tokens,
        preemptions=record.preemptions,
        tokens_lost=record.tokens_lost,
        blocks_needed=record.blocks_needed,
        deferred=record.number in ledger.state.deferrals,
        client_gone=bool(record.client_gone_ns),
        stalled=bool(record.stalled_ns),
        ended=ended,
    )


def _life(ledger: EngineLedger, record: RequestState, about: list[tuple[Position, int, Run]]) -> list[PhaseView]:
    views = []
    for phase in phases(about, record.number, ledger.now_ns):
        state, reason = in_words(phase)
        views.append(
            PhaseView(
                state=state,
                reason=reason,
                since=timestamp(phase.since_ns),
                for_s=round(phase.seconds, 3),
                blocks=phase.blocks,
                computed_tokens=phase.computed_tokens,
                output_tokens=phase.output_tokens,
                computed=phase.computed,
                recomputed=phase.recomputed,
            )
        )
    if views:  # no event says that it stands behind another, or that its blocks are kept
        views[-1] = msgspec.structs.replace(views[-1], reason=_reason(ledger, record))
    return views


def _waits(ledger: EngineLedger, record: RequestState) -> Wait | None:
    wait = wait_of(ledger, record)
    return wait if wait.waits_for or record.is_waiting else None


def _conditions(ledger: EngineLedger, record: RequestState) -> list[ConditionView]:
    """What is so of a request, and what is not."""
    usable = ledger.state.total - ledger.state.reserved
    fits = not record.blocks_to_finish or record.blocks_to_finish <= usable
    quiet = duration(ledger.age_s(record.progressed_ns)) if record.progressed_ns else ""
    conditions = [
        ("Admitted", bool(record.admitted_ns), record.admitted_ns, ""),
        ("FirstToken", bool(record.first_token_ns), record.first_token_ns, ""),
        ("Running", record.is_running, record.since_ns, f"last progress {quiet} ago" if quiet else ""),
        ("FitsThePool", fits, 0, f"{counted(record.blocks_to_finish, 'block')} to finish, of {usable:,}"),
        ("ClientThere", not record.client_gone_ns, record.client_gone_ns, ""),
        (
            "Stalled",
            bool(record.stalled_ns),
            record.stalled_ns,
            "by the engine's own watchdog" if record.stalled_ns else "",
        ),
        ("Finished", record.is_finished, record.finished_ns, ""),
    ]
    if record.is_finished:
        conditions.append(("BlocksFreed", not record.blocks, 0, _reason(ledger, record)))
    return [ConditionView(name, holds, timestamp(ledger.wall(at)), why) for name, holds, at, why in conditions]


def _unused_tokens(ledger: EngineLedger, record: RequestState) -> int | None:
    if len(ledger.description.groups) > 1 or not ledger.state.block_size:
        return None
    return max(0, len(record.blocks) * ledger.state.block_size - record.computed_tokens) if record.blocks else 0


def _reason(ledger: EngineLedger, record: RequestState) -> str:
    if record.status >= FIRST_FINISHED:
        if record.number in ledger.state.deferrals:
            return "FREE_DEFERRED"
        return "UNACCOUNTED" if record.blocks else ""
    cause = ledger.cause_of_wait(record)
    return "" if cause == Cause.NONE else cause.name


def _point_view(point: Point) -> PointView:
    balance = point.balance
    return PointView(
        at=timestamp(point.at_ns) or "",
        at_ns=point.at_ns,
        free=balance.free,
        cached_idle=balance.cached_idle,
        running=balance.running,
        waiting=balance.waiting,
        finished=balance.finished,
        reserved=balance.reserved,
        unaccounted=balance.unaccounted,
        requests_running=point.running,
        requests_waiting=point.waiting,
        preemptions=point.preemptions,
        output_tokens=point.output_tokens,
        computed_tokens=point.computed_tokens,
    )


def _story_view(line: StoryLine) -> StoryView:
    return StoryView(timestamp(line.at_ns), line.what, line.text, str(line.position))


def _block_states(ledger: EngineLedger) -> bytearray:
    """An index into BLOCK_STATES for each block."""
    state = ledger.state
    free, cached, running, waiting, finished, reserved, unaccounted = range(7)
    states = bytearray(
        unaccounted if refs > 0 else cached if value else free
        for refs, value in zip(state.refs, state.hashes, strict=True)
    )
    states[: state.reserved] = bytes([reserved]) * state.reserved
    # Liveliest last, so that it is what a shared block shows.
    for deferral in state.deferrals.values():
        for block in deferral.blocks:
            states[block] = finished
    for status in (waiting, running):
        for record in state.requests.values():
            if not record.is_finished and record.is_running == (status == running):
                for block in record.blocks:
                    states[block] = status
    return states
