"""From records to answers, in one process: feed it what sources bring, and query it through kvscope.monitor.query.

Judgement happens in the stream's own time, twice a second of it, so that a recording is judged as the live stream was.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import msgspec

from kvscope.monitor import detectors
from kvscope.monitor.analysis.retained_blocks import never_freed
from kvscope.monitor.analysis.usage_drop import Drop, drop, fall, steepest_fall
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Fact, Record
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.findings import Finding, FindingReport, Findings, Transition
from kvscope.monitor.history.history import History
from kvscope.monitor.ledger.engine_ledger import MAX_POINTS, EngineLedger, Fleet, Point
from kvscope.monitor.queries import BadQuestion, BadTime
from kvscope.monitor.queries import NotKnown as NotKnown
from kvscope.monitor.queries.block_colours import COLOURINGS, by_prefix
from kvscope.monitor.queries.blocks import block_detail, block_map
from kvscope.monitor.queries.comparison import compare
from kvscope.monitor.queries.engines import engine_view
from kvscope.monitor.queries.event_list import AROUND_NS, events_around, events_between, names_until, wanted
from kvscope.monitor.queries.memory_usage import calculator_view, memory_view
from kvscope.monitor.queries.past import Past
from kvscope.monitor.queries.points import point_views
from kvscope.monitor.queries.request_details import request_detail, request_views
from kvscope.monitor.queries.stream_time import Moment, read
from kvscope.monitor.queries.window_explanation import explanation
from kvscope.monitor.queries.window_stats import Stretches
from kvscope.monitor.schema import (
    AlertingView,
    BlockColours,
    BlockDetail,
    BlockMap,
    CalculatorView,
    Colouring,
    Diff,
    EngineView,
    EventView,
    ExplanationView,
    FindingDetail,
    FindingState,
    MemoryView,
    NeverFreedView,
    PointView,
    PrefixesView,
    RequestDetail,
    RequestView,
    SpanView,
    Stretch,
)
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import timestamp

JUDGE_EVERY_NS: Final = 500_000_000
BLOCK_STORY_NS: Final = 600_000_000_000
"""So much of a block's story is read from history; what is in memory is told in any case."""
MARGIN_NS: Final = 30_000_000_000
"""Of what was before a finding, and after it, so much is shown with it at least."""
MOST_POINTS: Final = 600
WINDOW_NS: Final = 600_000_000_000
PACKED_WITHIN_NS: Final = 1_000_000_000
FALL_S: Final = 60.0
"""Of a longer window, so much around where usage fell furthest is looked at event by event."""
FOREVER: Final = 1 << 62

BatchesSince = Callable[[int], Iterator[Batch]]
"""The batches that were packed from a time on (wall ns)."""


class Ended(NamedTuple):
    """A request that ended, with what is needed to put its times on the wall clock."""

    engine: str
    request: RequestState
    wall_minus_mono_ns: int


class Watch:
    """Ledgers and findings of all engines fed to it, and what `history` has kept of their past. Thread-safe; answers
    are copies.
    """

    def __init__(self, settings: Settings | None = None, history: History | None = None) -> None:
        self.fleet = Fleet()
        self.findings = Findings()
        self.settings = settings or Settings()
        self._judged_ns: dict[str, int] = {}
        self._transitions: list[Transition] = []
        self._lock = threading.RLock()
        self._past = Past(self._lock, history)
        self._stretches = Stretches(self._past)
        self._gone: dict[str, EngineView] = {}
        """Engines that only history knows, as they were last."""
        self.tells: Callable[[str], AlertingView] = lambda _finding: AlertingView()
        """What was told of a finding by its id; of a service that sends alerts, these."""

    def locked(self) -> threading.RLock:
        """The lock over all of it, for an outlet that reads the ledgers themselves: `with watch.locked(): …`."""
        return self._lock

    # ---------------------------------------------------------------- in

    def feed(self, records: Iterable[Record]) -> None:
        """Apply records in order, judging as the stream's time passes."""
        with self._lock:
            for record in records:
                ledger = self.fleet.apply(record)
                self._past.look(ledger, record)
                if not isinstance(record, Fact):
                    due = self._judged_ns.get(ledger.engine, 0) + JUDGE_EVERY_NS
                    if ledger.now_ns >= due:
                        self._judge(ledger)

    def resume(self, records: Iterable[Record], points: Iterable[Point]) -> None:
        """Take up an engine where it was left, from the last of what was kept of it: `records`, and its `points` from
        before them. What follows from it was told, counted and handed over then.
        """
        with self._lock:
            before = set(self.fleet.engines)
            self.feed(records)
            self.take_transitions()
            self.take_ended()
            for engine in set(self.fleet.engines) - before:
                ledger = self.fleet.engines[engine]
                ledger.count_anew()
                first_ns = ledger.points[0].at_ns if ledger.points else ledger.now_ns
                older = [point for point in points if point.at_ns < first_ns]
                ledger.points = deque((*older, *ledger.points), MAX_POINTS)

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
        judgements = list(detectors.judge(ledger, self.settings, self.fleet.siblings(ledger)))
        self._transitions += self.findings.update(ledger.engine, ledger.now_ns, judgements)
        del self._transitions[:-1000]

    # ---------------------------------------------------------------- out: kvscope.monitor.query.Query

    def engines(self, at: str = "") -> list[EngineView]:
        """Every engine at a glance, by name: those that were there."""
        if not at:
            with self._lock:
                return [engine_view(ledger, self._firing(name)) for name, ledger in sorted(self.fleet.engines.items())]
        views = []
        moment, owner = self._moment_of_any(at)
        for live in self._all(heard_since_ns=moment.at_ns):
            then = moment if live.engine == owner else Moment(min(moment.at_ns, live.now_ns))
            try:
                ledger = self._past.ledger_at(live, then)
            except NotKnown:
                continue
            if ledger.has_stream:
                views.append(engine_view(ledger, self._firing(live.engine, ledger.now_ns)))
        if not views:
            raise NotKnown(f"of no engine is it kept how it was at {moment}")
        return views

    def past_engines(self) -> list[EngineView]:
        """Engines that only history knows, as each was last: those that were not heard since the service began."""
        with self._lock:
            live = set(self.fleet.engines)
        known: dict[str, EngineView] = {}
        for engine in self._past.engines():
            if engine in live:
                continue
            view = self._gone.get(engine)
            ledger = self._past.last(engine) if view is None else None
            if ledger is not None and ledger.has_stream:
                view = msgspec.structs.replace(engine_view(ledger, {}), status="gone")
            if view is not None:
                known[engine] = view
        self._gone = known
        return list(known.values())

    def find(
        self, state: FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved: the worst first. Their effects are in them."""
        from_ns = self._moment_of_any(since)[0].at_ns if since else 0
        to_ns = self._moment_of_any(until)[0].at_ns if until else FOREVER
        return self._findings_between(state, engine, from_ns, to_ns)

    def _findings_between(
        self, state: FindingState | None, engine: str, from_ns: int, to_ns: int
    ) -> list[FindingReport]:
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
            return [
                finding.report()
                for finding in found
                if engine in ("", finding.judgement.engine) and _touches(finding, from_ns, to_ns)
            ]

    def finding(self, id: str) -> FindingDetail:
        """One finding, with what the pool was meanwhile. Raises NotKnown."""
        with self._lock:
            found = self.findings.by_id(id)
            if found is None:
                raise NotKnown(f"there is no finding {id!r}: it is not known here, or ended too long ago")
            report = found.report()
        try:
            live = self._live(report.engine)
        except NotKnown:  # it is over, and of its engine nothing else is kept
            return FindingDetail(report, [])
        began_ns, ended_ns = found.life(live.now_ns)
        margin = max(MARGIN_NS, (ended_ns - began_ns) // 10)
        points = self._past.points(live, began_ns - margin, ended_ns + margin, MOST_POINTS)
        return FindingDetail(report, point_views(points, MOST_POINTS))

    def alerting(self, finding: str) -> AlertingView:
        """Who was told of a finding, and how that went."""
        return self.tells(finding)

    def points(
        self, engine: str, seconds: float = 600.0, most: int = 600, since: str = "", until: str = ""
    ) -> list[PointView]:
        """The past, at most `most` moments of it, evenly thinned."""
        live = self._live(engine)
        moment = self._moment(live, until)
        since_ns = self._moment(live, since).at_ns if since else round(moment.at_ns - seconds * 1e9)
        return point_views(self._past.points(live, since_ns, moment.at_ns, most), most)

    def requests(self, engine: str, at: str = "") -> list[RequestView]:
        """Requests that live or hold blocks, the longest in their state first; then those that ended of late."""
        with self._as_of(engine, at) as (ledger, _):
            return request_views(ledger)

    def request(self, engine: str, name: str, at: str = "") -> RequestDetail:
        """One request by its id or `#number`. Raises NotKnown."""
        self._streamed(engine)
        with self._as_of(engine, at, story=True) as (ledger, batches):
            return request_detail(ledger, name, batches)

    def block(self, engine: str, block: int, at: str = "") -> BlockDetail:
        """One block. Raises NotKnown."""
        self._streamed(engine)
        with self._as_of(engine, at, story=True) as (ledger, batches):
            return block_detail(ledger, block, batches(ledger.now_ns - BLOCK_STORY_NS))

    def block_map(self, engine: str, at: str = "") -> BlockMap:
        """What every block is."""
        with self._as_of(engine, at) as (ledger, _):
            return block_map(ledger)

    def block_colours(self, engine: str, by: Colouring, at: str = "") -> BlockColours:
        """Every block by one of its properties."""
        live = self._streamed(engine)
        if by == "prefix":
            moment = self._moment(live, at)
            ledger = self._past.window(live, moment.at_ns - WINDOW_NS, moment)
            return by_prefix(ledger, self._past.prefix_blocks(ledger, now=not at))
        with self._as_of(engine, at) as (ledger, _):
            return COLOURINGS[by](ledger)

    def events(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        most: int = 200,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
    ) -> list[EventView]:
        """What happened, in order: the last `most` events of a window, or those around a position."""
        live = self._streamed(engine)
        if around:
            middle = self._moment(live, around)
            from_ns, to_ns = middle.at_ns - AROUND_NS, middle.at_ns + AROUND_NS
        else:
            first, last = self._window(live, since, until)
            from_ns, to_ns = first.at_ns, last.at_ns + PACKED_WITHIN_NS  # an event is in a batch packed a little later
        batches = self._past.between(live, from_ns, to_ns)
        with self._as_of(engine, around or until) as (ledger, _):
            names = names_until(ledger, batches)
            which = wanted(ledger, names, kinds, request, block)
        if around:
            return events_around(batches, names, middle, which, most)
        return events_between(batches, names, first, last if until else Moment(FOREVER), which, most)

    def never_freed(self, engine: str, since: str = "", until: str = "") -> NeverFreedView:
        """What was handed out in a window and not free by its end, by owner and reason."""
        live = self._streamed(engine)
        first, last = self._window(live, since, until)
        return never_freed(self._past.window(live, first.at_ns, last), first.at_ns)

    def prefixes(self, engine: str, at: str = "") -> PrefixesView:
        """The prefix cache as a forest, and what was evicted of late."""
        live = self._streamed(engine)
        moment = self._moment(live, at)
        ledger = self._past.window(live, moment.at_ns - WINDOW_NS, moment)
        return self._past.prefixes(ledger, now=not at)

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, in the `window_s` seconds around the time `at`; where usage fell
        furthest if it is empty. Raises BadTime.
        """
        live = self._streamed(engine)
        if at:
            at_ns = self._moment(live, at).at_ns
        else:
            with self._lock:
                points = [point for point in live.points if point.at_ns >= self._past.oldest_ns(live)]
            at_ns = steepest_fall(points, window_s) or live.now_ns
        return drop(self._around(live, at_ns, window_s), at_ns, window_s)

    def _around(self, live: EngineLedger, at_ns: int, window_s: float) -> EngineLedger:
        """The ledger as it was at the end of the window around a time (wall), with what was heard in it and before."""
        until = Moment(min(at_ns + round(window_s * 5e8), live.now_ns))
        return self._past.window(live, at_ns - round(window_s * 2e9), until)

    def explain(self, engine: str, since: str = "", until: str = "") -> ExplanationView:
        """What happened in a window, in two or three sentences."""
        live = self._streamed(engine)
        first, last = self._window(live, since, until)
        points = self._past.points(live, first.at_ns, last.at_ns, MAX_POINTS)
        width_s = min((last.at_ns - first.at_ns) / 1e9, FALL_S)
        half_ns = round(width_s * 5e8)
        at_ns = min(max(steepest_fall(points, width_s), first.at_ns + half_ns), last.at_ns - half_ns)
        told = fall(self._around(live, at_ns, width_s), at_ns, width_s)
        found = self._findings_between(None, engine, first.at_ns, last.at_ns)
        return explanation(told, first.at_ns, last.at_ns, points, found)

    def compare(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> Diff:
        """What got better and what got worse in a window of an engine, held against another of it or of another."""
        live = self._streamed(engine)
        against = live if other in ("", engine) else self._streamed(other)
        last_ns = self._moment(live, until).at_ns
        if since:
            first_ns = self._moment(live, since).at_ns
        else:
            known_ns = self._first_ns(live)
            if against is live and not other_until:  # the other half is there to be held against it
                known_ns = (last_ns + known_ns) // 2
            first_ns = max(last_ns - WINDOW_NS, known_ns)
        if other_since or other_until:
            to_ns = self._moment(against, other_until).at_ns
            from_ns = self._moment(against, other_since).at_ns if other_since else to_ns - (last_ns - first_ns)
        elif against is live:
            from_ns, to_ns = 2 * first_ns - last_ns, first_ns
        else:
            to_ns = last_ns if self._first_ns(against) < last_ns <= against.now_ns else against.now_ns
            from_ns = to_ns - (last_ns - first_ns)
        return compare(self._stretch(against, from_ns, to_ns), self._stretch(live, first_ns, last_ns))

    def _stretch(self, live: EngineLedger, since_ns: int, until_ns: int) -> Stretch:
        """Of a window; its findings are those that had fired by its end."""
        if since_ns >= until_ns:
            raise BadTime(
                f"from {timestamp(since_ns)} to {timestamp(until_ns)} nothing of {live.engine} is known: what is ends"
                f" at {timestamp(live.now_ns)}"
            )
        with self._lock:
            told = [
                finding.report()
                for finding in (*self.findings.firing(), *self.findings.suppressed(), *self.findings.resolved())
                if finding.judgement.engine == live.engine
                and 0 < finding.fired_ns <= until_ns
                and _touches(finding, since_ns, until_ns)
            ]
        return self._stretches.of(live, since_ns, until_ns, told)

    def _first_ns(self, live: EngineLedger) -> int:
        """From when on an engine's past is known (wall)."""
        first = self._past.span(live).first
        return read(first, live.now_ns).at_ns if first else live.now_ns

    def memory(self, engine: str) -> MemoryView:
        """The bill of the device's memory, as the engine measured it."""
        with self._as_of(engine, "") as (ledger, _):
            return memory_view(ledger)

    def calculator(self, engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1) -> CalculatorView:
        """What so many requests of that length ask of the pool, and how many of them fit."""
        with self._as_of(engine, "") as (ledger, _):
            return calculator_view(ledger, prompt_tokens, max_tokens, concurrency)

    def span(self, engine: str) -> SpanView:
        """Which past can be asked about."""
        return self._past.span(self._live(engine))

    # ---------------------------------------------------------------- which engine, and when

    def _live(self, engine: str) -> EngineLedger:
        """The ledger of an engine as it is now; of one that only history knows, as it was last."""
        with self._lock:
            ledger = self.fleet.engines.get(engine)
        if ledger is None:
            ledger = self._past.last(engine)
        if ledger is None:
            known = ", ".join(sorted({*self.fleet.engines, *self._past.engines()})) or "none yet"
            raise NotKnown(f"there is no engine {engine!r} here; there are: {known}")
        return ledger

    def _all(self, heard_since_ns: int = 0) -> Iterator[EngineLedger]:
        """Those of all engines, by name; of those that only history knows, of which something was heard since then."""
        with self._lock:
            live = dict(self.fleet.engines)
        for engine in sorted({*live, *self._past.engines()}):
            ledger = live.get(engine)
            if ledger is None and self._past.last_ns(engine) >= heard_since_ns:
                ledger = self._past.last(engine)
            if ledger is not None:
                yield ledger

    def _now_ns(self) -> int:
        """The latest that any engine has shown."""
        with self._lock:
            live = [ledger.now_ns for ledger in self.fleet.engines.values()]
        return max(live or map(self._past.last_ns, self._past.engines()), default=0)

    def _streamed(self, engine: str) -> EngineLedger:
        """The same, of an engine whose requests and blocks are known one by one."""
        ledger = self._live(engine)
        if ledger.samples and not ledger.has_stream:
            raise NotKnown(f"{engine} is known by its figures alone: requests and blocks are in its event stream")
        return ledger

    @contextmanager
    def _as_of(self, engine: str, at: str, *, story: bool = False) -> Iterator[tuple[EngineLedger, BatchesSince]]:
        """The ledger as it was, and what gives the batches until then from a time on. Of now it is the live one, under
        the lock; but a `story` that goes back to what only history has is not read from disk under it.
        """
        live = self._live(engine)
        if at or (story and self._past.history is not None):
            ledger = self._past.ledger_at(live, self._moment(live, at))
            yield ledger, partial(self._past.batches, live, ledger)
            return
        with self._lock:
            yield live, partial(self._past.batches, live, live)

    def _moment(self, live: EngineLedger, text: str) -> Moment:
        """What `text` names, its time known in any case; now if it is empty, or later. Raises BadTime and NotKnown."""
        moment = read(text, live.now_ns) if text else Moment(live.now_ns)
        if moment.position is not None:
            return moment._replace(at_ns=self._past.ledger_at(live, moment).now_ns)
        return Moment(min(moment.at_ns, live.now_ns))

    def _window(self, live: EngineLedger, since: str, until: str) -> tuple[Moment, Moment]:
        """From when to when: until now, and for WINDOW_NS, where nothing is said. Raises BadQuestion and NotKnown."""
        last = self._moment(live, until)
        first = self._moment(live, since) if since else Moment(last.at_ns - WINDOW_NS)
        if first.at_ns >= last.at_ns:
            raise BadQuestion(
                f"a window from {since} until {until or 'now'} has nothing in it: it ends where it begins"
            )
        return first, last

    def _moment_of_any(self, text: str) -> tuple[Moment, str]:
        """The same, where no engine is named: a position is in the stream of one of them, which is named with it."""
        moment = read(text, self._now_ns())
        if moment.position is None:
            return moment, ""
        for live in self._all():
            try:
                return self._moment(live, text), live.engine
            except NotKnown:
                continue
        raise NotKnown(f"{moment} is in the stream of no engine, as far as it is kept")

    def _firing(self, engine: str, at_ns: int = FOREVER) -> dict[str, int]:
        """How many findings about the engine fire, or did at that time (wall), by severity."""
        counts: dict[str, int] = {}
        with self._lock:
            for finding in (*self.findings.firing(), *self.findings.resolved()):
                ended_ns = finding.resolved_ns or FOREVER + 1
                if finding.judgement.engine == engine and finding.fired_ns <= at_ns < ended_ns:
                    counts[finding.severity] = counts.get(finding.severity, 0) + 1
        return counts


def _touches(finding: Finding, from_ns: int, to_ns: int) -> bool:
    began_ns, ended_ns = finding.life(FOREVER)
    return began_ns <= to_ns and ended_ns >= from_ns
