"""From records to findings, in one process: feed it what sources read, and ask it the questions of `Query`.

Detectors run in the stream's own time, twice a second of it, so that a recording is judged as the live stream was.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.harm import graded
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.registry import PLUGINS, detectors_for, judge_beside, severities
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Fact, Record, ReportedEvent
from kvscope.monitor.findings import Finding, Transition
from kvscope.monitor.history.history import History
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.queries.handlers import QueryHandlers
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.supervision import Supervisor, WorkerKind

JUDGE_EVERY_NS: Final = 500_000_000
MAX_TRANSITIONS: Final = 1_000
FORGOTTEN_AFTER_NS: Final = 900_000_000_000
"""Longer than any finding takes to be resolved."""


class EndedRequest(NamedTuple):
    """A request that ended, with what is needed to put its times on the wall clock."""

    engine: str
    request: RequestState
    wall_minus_mono_ns: int


class Pipeline(QueryHandlers):
    """Applies records to the ledgers of all engines and runs the detectors over them. Thread-safe."""

    def __init__(self, settings: Settings | None = None, history: History | None = None) -> None:
        super().__init__(history)
        self.settings = settings or Settings()
        self.supervisor = Supervisor()
        """How the parts of this process are that the engines' pictures rest on."""
        self._judged_ns: dict[str, int] = {}
        self._transitions: list[Transition] = []

    def locked(self) -> threading.RLock:
        """Return the lock over ledgers and findings, for an exporter that reads them: `with pipeline.locked(): …`."""
        return self._lock

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order, and run the detectors as the stream's time passes."""
        with self._lock:
            last_facts: dict[str, EngineLedger] = {}
            for record in records:
                ledger = self.fleet.apply(record)
                self._contain("the recent past", "history", ledger, self._past.look, ledger, record)
                if isinstance(record, Fact | ReportedEvent):
                    last_facts[ledger.engine] = ledger  # a start-up has dozens: one judgement is enough for all
                elif self._is_due(ledger):
                    self._judge(ledger)
            for ledger in filter(self._is_due, last_facts.values()):
                self._judge(ledger)

    def learn(self, records: Iterable[Record]) -> None:
        """Apply records of a past that is shown and not judged."""
        with self._lock:
            for record in records:
                self.fleet.apply(record)

    def _is_due(self, ledger: EngineLedger) -> bool:
        return ledger.now_ns >= self._judged_ns.get(ledger.engine, 0) + JUDGE_EVERY_NS

    def resume(self, records: Iterable[Record], points: Iterable[Point]) -> None:
        """Continue an engine where an earlier service left it, from the last records and the `points` that it kept.

        The earlier service counted and notified these records, so this one does not. Points that a killed service did
        not keep are left out, so that memory and history show the same.
        """
        with self._lock:
            before = set(self.fleet.engines)
            self.feed(records)
            self.take_transitions()
            self.take_ended()
            for engine in set(self.fleet.engines) - before:
                ledger = self.fleet.engines[engine]
                ledger.recount()
                ledger.points = deque(points, ledger.points.maxlen) or ledger.points

    def settle(self) -> None:
        """Run the detectors over every engine as it stands: at the end of a recording or a log."""
        with self._lock:
            for ledger in self.fleet.engines.values():
                self._judge(ledger)

    def take_transitions(self) -> list[Transition]:
        """Return the findings that began to fire or were resolved since the last call."""
        with self._lock:
            taken, self._transitions = self._transitions, []
            return taken

    def take_ended(self) -> list[EndedRequest]:
        """Return the requests that ended since the last call, whether their blocks were freed or not."""
        with self._lock:
            return [
                EndedRequest(ledger.engine, record, ledger.wall(1) - 1)
                for ledger in self.fleet.engines.values()
                for record in ledger.take_just_finished()
            ]

    def forget(self, engine: str) -> None:
        """Drop an engine that is gone from the ledgers: its findings are resolved, and what history has of it stays."""
        with self._lock:
            ledger = self.fleet.engines.pop(engine, None)
            if ledger is not None:
                self._judged_ns.pop(engine, None)
                self._past.forget(engine)
                self._transitions += self.lifecycle.update(engine, ledger.now_ns + FORGOTTEN_AFTER_NS, [])

    def remove(self, engine: str) -> None:
        """Drop an engine that is not watched here any more. No finding fires or is resolved by it (see `set_aside`)."""
        with self._lock:
            ledger = self.fleet.engines.pop(engine, None)
            if ledger is not None:
                self._judged_ns.pop(engine, None)
                self._past.forget(engine)
                self._gone.pop(engine, None)
                self.lifecycle.set_aside(engine, ledger.now_ns)

    def expect(self, engine: str, findings: Iterable[Finding], now_ns: int) -> None:
        """Take what is open on an engine by the word of the service that watched it until `now_ns` (wall). A finding
        that is found again continues, and one that is not is resolved after LOOK_AGAIN_S.
        """
        with self._lock:
            self.lifecycle.expect(engine, findings, now_ns)

    def report_failure(
        self, worker: str, kind: WorkerKind, error: BaseException | str, engines: Sequence[str] = ()
    ) -> None:
        """Report that a part of the service does not work, which `engines` depend on (none named: all)."""
        if self.supervisor.failed(worker, kind, error, engines):
            self._judge_health()

    def report_recovery(self, worker: str) -> None:
        """Report that it works."""
        if self.supervisor.works(worker):
            self._judge_health()

    def _judge_health(self) -> None:
        """Run the detectors over the engines whose observers' health has changed. No time passes by that."""
        with self._lock:
            for ledger in self.fleet.engines.values():
                if ledger.observer_failures != self.supervisor.failures(ledger.engine):
                    self._judge(ledger)

    def _judge(self, ledger: EngineLedger) -> None:
        self._judged_ns[ledger.engine] = ledger.now_ns
        judgements: list[Judgement] = []
        siblings = self.fleet.siblings(ledger)
        ledger.observer_failures = self.supervisor.failures(ledger.engine)
        for detector in detectors_for(ledger):
            name, rest = f"the detector {detector.code}", (ledger, siblings, self.settings)
            self._contain(name, "detector", ledger, _extend, judgements, detector, *rest)
        self._contain("what a text shows", "detector", ledger, _extend_by_text, judgements, ledger, self.settings)
        judgements += PLUGINS.judge(ledger, siblings, self.settings)
        judgements = graded(ledger, judgements, severities())
        last_received_ns = ledger.now_ns if ledger.state.stopped_ns else ledger.last_received_ns
        self._transitions += self.lifecycle.update(
            ledger.engine, ledger.now_ns, judgements, ledger.epoch, last_received_ns
        )
        del self._transitions[:-MAX_TRANSITIONS]

    def _contain(
        self, what: str, kind: WorkerKind, ledger: EngineLedger, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Call, and let what it raises be a failure of this worker alone."""
        try:
            call(*arguments)
        except Exception as error:
            self.supervisor.failed(f"{what} of {ledger.engine}", kind, error, (ledger.engine,))
        else:
            if self.supervisor.has_failures:
                self.supervisor.works(f"{what} of {ledger.engine}")


def _extend_by_text(judgements: list[Judgement], ledger: EngineLedger, settings: Settings) -> None:
    judgements += list(judge_beside(ledger, judgements, settings))


def _extend(
    judgements: list[Judgement],
    detector: Detector[Any],
    ledger: EngineLedger,
    siblings: Sequence[EngineLedger],
    settings: Settings,
) -> None:
    judgements += detector.detect_rank(ledger, siblings, settings)
