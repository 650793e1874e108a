"""From records to findings, in one process: feed it what sources read, and ask it the questions of `Query`.

Detectors run in the stream's own time, twice a second of it, so that a recording is judged as the live stream was.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from ..base.supervision import Supervisor, WorkerFailure, WorkerKind
from ..contract.samples import Fact, Record, ReportedEvent, Sample
from ..detectors.blind.reader_failed import is_gap, judged_failure
from ..detectors.detector import Settings
from ..detectors.findings import Finding, Transition
from ..detectors.judgement import Judgement
from ..detectors.registry import judge_engine
from ..history.history import History
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.records import RequestState
from .handlers import QueryHandlers

JUDGE_EVERY_NS: Final = 500_000_000
JUDGE_REQUEST_NS: Final = 40_000
"""Or this long for each request, if that is longer: a judgement takes about 6 µs of processor time for each."""
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

    def __init__(
        self,
        settings: Settings | None = None,
        history: History | None = None,
        supervisor: Supervisor | None = None,
        judge_every_ns: int = JUDGE_EVERY_NS,
    ) -> None:
        """judge_every_ns: of the stream's time. An engine whose samples begin or cease to show work without a token is
        judged at once.
        """
        super().__init__(history)
        self._judge_every_ns = judge_every_ns
        self.settings = settings or Settings()
        self.supervisor = supervisor or Supervisor()
        """How the parts of this process are that the engines' pictures rest on."""
        self.observer = f"kvscope@{socket.gethostname()}"
        """The name under which findings are that concern no single engine."""
        self._unheard: set[str] = set()
        """Targets of sources that have brought no engine for too long."""
        self._named: set[str] = set()
        """Names other than engines' with open findings: the observer's, and those of targets."""
        self.own_names: set[str] = set()
        """Names other than engines' that had a finding: what is found there is this process's own word."""
        self._judged_ns: dict[str, int] = {}
        self._stands: dict[str, bool] = {}
        """Whether the last sample of an engine shows work and no token computed."""
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
                self._contain(ledger, "history", "the recent past", self._past.look, ledger, record)
                if isinstance(record, Fact | ReportedEvent):
                    last_facts[ledger.engine] = ledger  # a start-up has dozens: one judgement is enough for all
                elif self._has_turned(ledger, record) or self._is_due(ledger):
                    self._judge(ledger)
            for ledger in filter(self._is_due, last_facts.values()):
                self._judge(ledger)

    def learn(self, records: Iterable[Record]) -> None:
        """Apply records of a past that is shown and not judged."""
        with self._lock:
            for record in records:
                self.fleet.apply(record)

    def _has_turned(self, ledger: EngineLedger, record: Record) -> bool:
        if not isinstance(record, Sample) or self._judge_every_ns <= JUDGE_EVERY_NS:
            return False
        computed = record.generation_tokens_per_s or record.prompt_tokens_per_s
        stands = bool(record.running or record.waiting) and not computed
        before, self._stands[ledger.engine] = self._stands.get(ledger.engine, False), stands
        return stands != before

    def _is_due(self, ledger: EngineLedger) -> bool:
        every_ns = max(self._judge_every_ns, len(ledger.state.requests) * JUDGE_REQUEST_NS)
        return ledger.now_ns >= self._judged_ns.get(ledger.engine, 0) + every_ns

    def resume(self, records: Iterable[Record], points: Iterable[Point]) -> list[Transition]:
        """Continue an engine where an earlier service left it, from the last records and the `points` that it kept.
        Return what fired or ended by these records.

        The earlier service counted and notified these records, so this one does not. If it was killed before it kept
        its last points, those that the records give follow the `points`.
        """
        with self._lock:
            before = set(self.fleet.engines)
            self.feed(records)
            transitions = self.take_transitions()
            self.take_ended()
            for engine in set(self.fleet.engines) - before:
                ledger = self.fleet.engines[engine]
                ledger.recount()
                kept = deque(points, ledger.points.maxlen)
                next_ns = kept[-1].at_ns + ledger.point_every_ns if kept else 0
                kept.extend(point for point in ledger.points if point.at_ns >= next_ns)
                ledger.points = kept
            return transitions

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

    def expect(self, engine: str, findings: Iterable[Finding]) -> None:
        """Take what is open on an engine by the word of the service that watched it until now. A finding that is found
        again continues, and one that is not is resolved after LOOK_AGAIN_S.
        """
        with self._lock:
            self.lifecycle.expect(engine, findings)

    def report_failure(
        self, worker: str, kind: WorkerKind, error: BaseException | str, engines: Sequence[str] = ()
    ) -> None:
        """Report that a part of the service does not work, which `engines` depend on (none named: all)."""
        if self.supervisor.failed(worker, kind, error, engines):
            self.judge_health()

    def report_recovery(self, worker: str) -> None:
        """Report that it works."""
        if self.supervisor.works(worker):
            self.judge_health()

    def report_unheard(self, worker: str, target: str, error: str) -> None:
        """Report that a source has brought no engine for too long. The finding has its target's name."""
        with self._lock:  # the watchdog forgets targets without a failure
            self._unheard.add(target)
            self.report_failure(worker, "reader", error, (target,))

    def judge_health(self) -> None:
        """Run the detectors over the engines whose observers' health has changed, and judge the observer itself. No
        time passes by that.
        """
        with self._lock:
            for ledger in self.fleet.engines.values():
                if (ledger.observer_failures, ledger.grave_failures) != self._health_of(ledger.engine):
                    self._judge(ledger)
            self._judge_observer()

    def _health_of(self, engine: str) -> tuple[tuple[WorkerFailure, ...], frozenset[str]]:
        failures = self.supervisor.failures(engine)
        now_ns = time.time_ns()
        grave = (each.worker for each in failures if each.engines == (engine,) and not is_gap(each, now_ns))
        return failures, frozenset(grave)

    def _judge_observer(self) -> None:
        """Judge failures that concern no single engine, and sources that were never heard."""
        now_ns = time.time_ns()
        failures = self.supervisor.failures()
        self._unheard.intersection_update([name for failure in failures for name in failure.engines])
        judged: dict[str, list[Judgement]] = {}
        for failure in failures:
            if name := self._name_for(failure):
                is_grave = name in self._unheard or not is_gap(failure, now_ns)
                judged.setdefault(name, []).append(judged_failure(name, failure, is_grave=is_grave))
        for name in self._named | judged.keys():
            at_ns = now_ns if name in judged else now_ns + FORGOTTEN_AFTER_NS
            self._transitions += self.lifecycle.update(name, at_ns, judged.get(name, []))
        self._named = set(judged)
        self.own_names |= self._named

    def _name_for(self, failure: WorkerFailure) -> str:
        """Return the name under which a failure is judged beside the engines, or an empty string for none."""
        if len(failure.engines) != 1:
            return self.observer
        (name,) = failure.engines
        if name in self.fleet.engines:
            return ""  # its own finding
        if name in self._unheard:
            return name
        return self.observer if failure.kind == "discovery" else ""  # else its source is about to be heard

    def _judge(self, ledger: EngineLedger) -> None:
        self._judged_ns[ledger.engine] = ledger.now_ns
        ledger.observer_failures, ledger.grave_failures = self._health_of(ledger.engine)
        ledger.siblings = self.fleet.siblings(ledger)
        contain = functools.partial(self._contain, ledger, "detector")
        judgements = judge_engine(ledger, self.settings, contain)
        last_received_ns = ledger.now_ns if ledger.state.stopped_ns else ledger.last_received_ns
        self._transitions += self.lifecycle.update(
            ledger.engine, ledger.now_ns, judgements, ledger.epoch, last_received_ns
        )
        del self._transitions[:-MAX_TRANSITIONS]

    def _contain(
        self, ledger: EngineLedger, kind: WorkerKind, what: str, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Call, and let what it raises be a failure of this worker alone."""
        try:
            call(*arguments)
        except Exception as error:
            self.supervisor.failed(f"{what} of {ledger.engine}", kind, error, (ledger.engine,))
        else:
            if self.supervisor.has_failures:
                self.supervisor.works(f"{what} of {ledger.engine}")
