"""The road from records to answers, in one process: feed it what sources bring, and ask it through monitor.query.

Judgement happens in the stream's own time, twice a second of it, so that a recording is judged as the live stream was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from monitor import detectors
from monitor.answers import NotKnown as NotKnown
from monitor.answers.blocks import block_detail, block_map
from monitor.answers.engines import engine_view
from monitor.answers.points import point_views
from monitor.answers.requests import request_detail, request_views
from monitor.detectors.thresholds import Settings
from monitor.events.records import RequestState
from monitor.events.sample import Fact
from monitor.findings import Finding, FindingReport, Findings, Transition
from monitor.ledger.drops import Drop, drop, steepest_fall
from monitor.ledger.ledger import EngineLedger, Fleet, Record
from monitor.ledger.words import moment
from monitor.views import BlockDetail, BlockMap, EngineView, FindingState, PointView, RequestDetail, RequestView

JUDGE_EVERY_NS: Final = 500_000_000


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
            return point_views(points, most)

    def requests(self, engine: str) -> list[RequestView]:
        """Requests that live or hold blocks, the longest in their state first; then those that ended of late."""
        with self._lock:
            return request_views(self._ledger(engine))

    def request(self, engine: str, name: str) -> RequestDetail:
        """One request by its id or `#number`. Raises NotKnown."""
        with self._lock:
            ledger = self._streamed(engine)
            return request_detail(ledger, name, ledger.recent)

    def block(self, engine: str, block: int) -> BlockDetail:
        """One block. Raises NotKnown."""
        with self._lock:
            ledger = self._streamed(engine)
            return block_detail(ledger, block, ledger.recent)

    def block_map(self, engine: str) -> BlockMap:
        """What every block is now."""
        with self._lock:
            return block_map(self._ledger(engine))

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
        return engine_view(ledger, counts)
