"""Answers the questions of kvscope.monitor.questions.query from ledgers, findings and the history."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..base.errors import BadQuestion, BadTime, NotKnown
from ..base.text import timestamp
from ..detectors.detector import Settings
from ..detectors.findings import Finding, FindingReport, Findings
from ..detectors.registry import thresholds
from ..history.history import History
from ..ledger.engine_ledger import MAX_POINTS, EngineLedger, Fleet
from ..ledger.partial_replay import still_ledger
from ..ledger.retained_blocks import retained_blocks
from ..ledger.usage_drop import UsageDrop, steepest_fall, usage_drop, usage_fall
from ..planning.plan_request import PlanRequest
from ..planning.plan_types import CapacityPlan
from . import schema, windows
from .availability import require
from .blocks import COLOURINGS, block_detail, block_map, by_prefix
from .comparison import WindowStatsCache, compare
from .engines import engine_view, past_metrics_view, past_stream_view
from .event_list import AROUND_NS, events_around, events_between, names_until, wanted
from .fleet_overview import findings_by_engine, fleet_engine, fleet_view, ledger_strip
from .fleet_schema import FleetView
from .memory_usage import calculator_view, memory_view, plan_of_engine
from .past import WINDOW_NS, Past, ReadStored, StoredPast, is_without_stream
from .query import Query, Question
from .recent_past import StreamTime
from .request_details import Found, HistorySearch, in_ledger, ordered, request_detail, request_views

BLOCK_HISTORY_NS: Final = 600_000_000_000
"""How much of a block's event history is read from disk. The history in memory is always included."""
MARGIN_NS: Final = 30_000_000_000
"""The least that is shown of the time before and after a finding."""
MAX_PAST_S: Final = 10_000_000_000
"""The longest past that a question may be about."""
MAX_FINDING_POINTS: Final = 600
PACKED_WITHIN_NS: Final = 1_000_000_000
MAX_FALL_WINDOW_S: Final = 60.0
"""Length of the part of a longer window, around the furthest fall of usage, that is analysed event by event."""
MIN_DROP_WINDOW_S: Final = 1e-3
MAX_DROP_WINDOW_S: Final = 86_400.0


class QueryHandlers(Query):
    """The ledgers and findings of all engines, and what `history` keeps of their past.

    Thread-safe. Answers are copies.
    """

    def __init__(self, history: History | None = None) -> None:
        self.fleet = Fleet()
        self.lifecycle = Findings()
        self.find_notifications: Callable[[str], schema.NotificationsView] = lambda _finding: schema.NotificationsView()
        """Gives the notifications about a finding by its id. A service that sends alerts sets it."""
        self.find_alerts: Callable[[], schema.AlertStateView] = schema.AlertStateView
        """Gives alerts without thresholds. A service that sends alerts sets it."""
        self.settings = Settings()
        self._lock = threading.RLock()
        self._past = Past(self.fleet, self._lock, history)
        self._window_stats = WindowStatsCache(self._past)
        self._gone: dict[str, schema.EngineView] = {}
        """Engines that only the history knows, as each was last."""

    def read_stored_with(self, stored: ReadStored) -> None:
        """Read what a server kept of an engine from before memory and history with this."""
        self._past.stored = StoredPast(stored)

    def answer(self, question: Question, arguments: Mapping[str, Any]) -> Any:
        """Call the handler of a question. The parameters of a plan are the fields of its request."""
        return self._plan(**arguments) if question.name == "plan" else getattr(self, question.name)(**arguments)

    def snapshot(self, engine: str) -> Query:
        """Return handlers for which the engine's state and its findings stay fixed."""
        with self._lock:
            live = self.fleet.engines.get(engine)
            if live is None:
                return self
            still = copy.copy(self)
            still.fleet = Fleet()
            still.fleet.engines = self.fleet.engines | {engine: still_ledger(live)}
            still.lifecycle = self.lifecycle.still()
        still._past = copy.copy(self._past)
        still._past.fleet = still.fleet
        return still

    def engines(self, at: str = "", engine: str = "") -> list[schema.EngineView]:
        """Every engine at a glance, by name."""
        if not at:
            with self._lock:
                firing: defaultdict[str, list[Finding]] = defaultdict(list)
                for finding in self.lifecycle.firing():
                    firing[finding.judgement.engine].append(finding)
                live_ones = [each for each in sorted(self.fleet.engines.items()) if engine in ("", each[0])]
                return [engine_view(ledger, firing[name]) for name, ledger in live_ones]
        views = []
        time, owner = self._past.time_of_any(at)
        for live in self._past.all(seen_since_ns=time.at_ns):
            if engine not in ("", live.engine):
                continue
            then = time if live.engine == owner else StreamTime(min(time.at_ns, live.now_ns))
            try:
                if is_without_stream(live):
                    samples = self._past.samples_until(live, then.at_ns)
                    views.append(past_metrics_view(live, self._firing(live.engine, then.at_ns), samples))
                    continue
                ledger = self._past.ledger_at(live, then)
            except NotKnown:
                continue
            if ledger.has_stream:
                views.append(past_stream_view(ledger, self._firing(live.engine, ledger.now_ns), live))
        if not views:
            raise NotKnown(f"no engine has a stored state at {time}")
        return views

    def fleet_overview(self) -> FleetView:
        """Return every engine in a line. Here all are this service's own."""
        with self._lock:
            strips = {name: ledger_strip(ledger) for name, ledger in self.fleet.engines.items()}
            found = self.findings("firing")
            own = findings_by_engine(found)
            return fleet_view(
                [fleet_engine(view, own.get(view.engine, ()), strips[view.engine]) for view in self.engines()], found
            )

    def past_engines(self) -> list[schema.EngineView]:
        """Engines that only the history knows, each as it was last."""
        with self._lock:
            live = set(self.fleet.engines)
        known: dict[str, schema.EngineView] = {}
        for engine in self._past.engines():
            if engine in live:
                continue
            view = self._gone.get(engine)
            ledger = self._past.last(engine) if view is None else None
            if ledger is not None and (ledger.has_stream or is_without_stream(ledger)):
                view = msgspec.structs.replace(engine_view(ledger, ()), status="gone")
            if view is not None:
                known[engine] = view
        self._gone = known
        return list(known.values())

    # ---------------------------------------------------------------- findings

    def findings(
        self, state: schema.FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Return findings, the most severe first, with their effects."""
        from_ns = self._past.time_of_any(since)[0].at_ns if since else 0
        to_ns = self._past.time_of_any(until)[0].at_ns if until else windows.FOREVER
        with self._lock:
            return windows.findings_between(self.lifecycle, state, engine, from_ns, to_ns)

    def finding(self, id: str) -> schema.FindingDetail:
        """One finding, with the points around it."""
        with self._lock:
            found = self.lifecycle.by_id(id)
            if found is None:
                raise NotKnown(f"there is no finding {id!r}: it is not known here, or ended too long ago")
            report = found.report()
        try:
            live = self._past.ledger(report.engine)
        except NotKnown:  # it is over, and of its engine nothing else is kept
            return schema.FindingDetail(report, [])
        lived = found.intervals(live.now_ns)
        began_ns, ended_ns = lived[0].since_ns, lived[-1].resolved_ns
        margin = max(MARGIN_NS, (ended_ns - began_ns) // 10)
        return schema.FindingDetail(
            report, self._points(live, began_ns - margin, ended_ns + margin, MAX_FINDING_POINTS)
        )

    def notifications(self, finding: str) -> schema.NotificationsView:
        """Notifications about one finding."""
        return self.find_notifications(finding)

    def alert_state(self) -> schema.AlertStateView:
        """Return alerts as a whole, and the thresholds in force."""
        in_force = [
            schema.ThresholdView(name, self.settings(one), one.value, one.unit, one.reason)
            for name, one in sorted(thresholds().items())
        ]
        return msgspec.structs.replace(self.find_alerts(), thresholds=in_force)

    def _firing(self, engine: str, at_ns: int) -> list[Finding]:
        with self._lock:
            return windows.firing_at(self.lifecycle, engine, at_ns)

    # ---------------------------------------------------------------- requests, blocks, events

    def points(
        self, engine: str, seconds: float = 600.0, limit: int = 600, since: str = "", until: str = ""
    ) -> list[schema.PointView]:
        """Return the pool and the queues over time, evenly thinned."""
        if not abs(seconds) <= MAX_PAST_S:  # nor is it NaN
            raise BadQuestion(f"seconds is a number up to {MAX_PAST_S:,}")
        live = self._past.ledger_for("points", engine)
        last = self._past.time(live, until)
        since_ns = self._past.time(live, since).at_ns if since else round(last.at_ns - seconds * 1e9)
        return self._points(live, since_ns, last.at_ns, limit)

    def _points(self, live: EngineLedger, since_ns: int, until_ns: int, limit: int) -> list[schema.PointView]:
        if is_without_stream(live):
            return windows.sample_points(live, self._past.samples(live, since_ns, until_ns), limit)
        return windows.point_views(self._past.points(live, since_ns, until_ns, limit), limit)

    def requests(self, engine: str, at: str = "") -> list[schema.RequestView]:
        """Return requests that are active or hold blocks, then those that ended recently."""
        self._past.ledger_for("requests", engine)
        with self._past.as_of(engine, at) as (ledger, _):
            return request_views(ledger)

    def request(self, engine: str, id: str, at: str = "") -> schema.RequestDetail:
        """One request."""
        self._past.ledger_for("request", engine)
        with self._past.as_of(engine, at, history=True) as (ledger, batches):
            return request_detail(ledger, id, batches)

    def find_request(
        self, id: str, engine: str = "", since: str = "", until: str = "", limit: int = 50
    ) -> schema.RequestSearch:
        """Return requests by a part of their id."""
        part = id.strip().lower()
        if not part:
            raise BadQuestion("name a part of the request's id")
        from_ns = self._past.time_of_any(since)[0].at_ns if since else 0
        to_ns = self._past.time_of_any(until)[0].at_ns if until else windows.FOREVER
        found: Found = {}
        with self._lock:
            if engine in self.fleet.engines:
                require(self.fleet.engines[engine], "find_request")
            for ledger in self.fleet.engines.values():
                if engine in ("", ledger.engine):
                    for one in in_ledger(ledger, part, from_ns, to_ns):
                        found[one.engine, one.epoch, one.number] = one
        if self._past.history is None:
            return ordered(found, limit, from_ns, True)
        search = HistorySearch(self._past.history, part, from_ns, min(to_ns, time.time_ns()), found, limit)
        for name in [engine] if engine else self._past.engines():
            search.search(name)
        return ordered(found, limit, from_ns if search.is_complete else search.searched_ns, search.is_complete)

    def block(self, engine: str, id: int, at: str = "") -> schema.BlockDetail:
        """One block."""
        self._past.ledger_for("block", engine)
        with self._past.as_of(engine, at, history=True) as (ledger, batches):
            return block_detail(ledger, id, batches(ledger.now_ns - BLOCK_HISTORY_NS))

    def block_map(self, engine: str, at: str = "") -> schema.BlockMap:
        """Return the state of every block."""
        self._past.ledger_for("block_map", engine)
        with self._past.as_of(engine, at) as (ledger, _):
            return block_map(ledger)

    def block_colours(self, engine: str, by: schema.Colouring, at: str = "") -> schema.BlockColours:
        """Every block by one of its properties."""
        live = self._past.ledger_for("block_colours", engine)
        if by == "prefix":
            time = self._past.time(live, at)
            ledger = self._past.window(live, time.at_ns - WINDOW_NS, time)
            return by_prefix(ledger, self._past.prefix_blocks(ledger, now=not at))
        with self._past.as_of(engine, at) as (ledger, _):
            return COLOURINGS[by](ledger)

    def events(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        limit: int = 200,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
    ) -> list[schema.EventView]:
        """Events in order: of a window, or around a position."""
        live = self._past.ledger_for("events", engine)
        if around:
            middle = self._past.time(live, around)
            from_ns, to_ns = middle.at_ns - AROUND_NS, middle.at_ns + AROUND_NS
        else:
            first, last = self._past.times(live, since, until)
            from_ns, to_ns = first.at_ns, last.at_ns + PACKED_WITHIN_NS  # an event is in a batch packed a little later
        batches = self._past.between(live, from_ns, to_ns)
        with self._past.as_of(engine, around or until) as (ledger, _):
            names = names_until(ledger, batches)
            which = wanted(ledger, names, kinds, request, block)
        if around:
            return events_around(batches, names, middle, which, limit)
        return events_between(batches, names, first, last if until else StreamTime(windows.FOREVER), which, limit)

    def prefix_cache(self, engine: str, at: str = "") -> schema.PrefixCacheView:
        """Return the prefix cache as a forest, and its recent evictions."""
        live = self._past.ledger_for("prefix_cache", engine)
        time = self._past.time(live, at)
        ledger = self._past.window(live, time.at_ns - WINDOW_NS, time)
        return self._past.prefixes(ledger, now=not at)

    # ---------------------------------------------------------------- windows

    def retained_blocks(self, engine: str, since: str = "", until: str = "") -> schema.RetainedBlocksView:
        """Return every block that is held, and the fate of those that were allocated in a window."""
        live = self._past.ledger_for("retained_blocks", engine)
        first, last = self._past.times(live, since, until)
        return retained_blocks(self._past.window(live, first.at_ns, last), first.at_ns)

    def usage_drop(self, engine: str, at: str = "", window_s: float = 10.0) -> UsageDrop:
        """Why usage fell, or throughput stopped, around a time."""
        if not MIN_DROP_WINDOW_S <= window_s <= MAX_DROP_WINDOW_S:
            raise BadQuestion(f"window_s={window_s:g} is not a number of seconds from 0.001 to 86400")
        live = self._past.ledger_for("usage_drop", engine)
        if at:
            at_ns = self._past.time(live, at).at_ns
        else:
            with self._lock:
                points = [point for point in live.points if point.at_ns >= self._past.oldest_ns(live)]
            at_ns = steepest_fall(points, window_s) or live.now_ns
        return usage_drop(self._around(live, at_ns, window_s), at_ns, window_s)

    def explain(self, engine: str, since: str = "", until: str = "") -> schema.ExplanationView:
        """Return a summary of a window."""
        live = self._past.ledger_for("explain", engine)
        first, last = self._past.times(live, since, until)
        if is_without_stream(live):
            samples = self._past.samples(live, first.at_ns, last.at_ns)
            with self._lock:
                found = windows.findings_between(self.lifecycle, None, engine, first.at_ns, last.at_ns)
            return windows.sample_explanation(engine, samples, first.at_ns, last.at_ns, found)
        points = self._past.points(live, first.at_ns, last.at_ns, MAX_POINTS)
        width_s = min((last.at_ns - first.at_ns) / 1e9, MAX_FALL_WINDOW_S)
        half_ns = round(width_s * 5e8)
        at_ns = min(max(steepest_fall(points, width_s), first.at_ns + half_ns), last.at_ns - half_ns)
        fall = usage_fall(self._around(live, at_ns, width_s), at_ns, width_s)
        with self._lock:
            found = windows.findings_between(self.lifecycle, None, engine, first.at_ns, last.at_ns)
        return windows.explanation(fall, first.at_ns, last.at_ns, points, found)

    def _around(self, live: EngineLedger, at_ns: int, window_s: float) -> EngineLedger:
        """Return the ledger as it was at the end of the window around a time (wall ns), with the batches before it."""
        until = StreamTime(min(at_ns + round(window_s * 5e8), live.now_ns))
        return self._past.window(live, at_ns - round(window_s * 2e9), until)

    def compare(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> schema.Diff:
        """Return the improvements and regressions in a window."""
        live = self._past.ledger_for("compare", engine)
        against = live if other in ("", engine) else self._past.ledger(other)
        last_ns = self._past.time(live, until).at_ns
        if since:
            first_ns = self._past.time(live, since).at_ns
        else:
            known_ns = self._past.first_ns(live)
            if against is live and not other_until:  # the other half is there to be compared with
                known_ns = (last_ns + known_ns) // 2
            first_ns = max(last_ns - WINDOW_NS, known_ns)
        if other_since or other_until:
            to_ns = self._past.time(against, other_until).at_ns
            from_ns = self._past.time(against, other_since).at_ns if other_since else to_ns - (last_ns - first_ns)
        elif against is live:
            from_ns, to_ns = 2 * first_ns - last_ns, first_ns
        else:
            to_ns = last_ns if self._past.first_ns(against) < last_ns <= against.now_ns else against.now_ns
            from_ns = to_ns - (last_ns - first_ns)
        return compare(self._stats(against, from_ns, to_ns), self._stats(live, first_ns, last_ns))

    def _stats(self, live: EngineLedger, since_ns: int, until_ns: int) -> schema.WindowStats:
        """Return the statistics of a window. Its findings are those that had fired by its end."""
        if since_ns >= until_ns:
            raise BadTime(
                f"from {timestamp(since_ns)} to {timestamp(until_ns)} nothing of {live.engine} is known: what is ends"
                f" at {timestamp(live.now_ns)}"
            )
        with self._lock:
            found = windows.fired_between(self.lifecycle, live.engine, since_ns, until_ns)
        if is_without_stream(live):
            samples = self._past.samples(live, since_ns, until_ns)
            if len(samples) < 2:
                raise BadTime(
                    f"from {timestamp(since_ns)} to {timestamp(until_ns)} there are fewer than two samples of"
                    f" {live.engine}: they begin at {timestamp(self._past.first_ns(live))} and end at"
                    f" {timestamp(live.now_ns)}"
                )
            return windows.sample_stats(live.engine, samples, found)
        return self._window_stats.of(live, since_ns, until_ns, found)

    # ---------------------------------------------------------------- memory, history

    def memory(self, engine: str) -> schema.MemoryView:
        """Return the breakdown of the device's memory."""
        with self._past.as_of(engine, "") as (ledger, _):
            return memory_view(ledger)

    def calculator(
        self, engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1
    ) -> schema.CalculatorView:
        """How many blocks a number of requests need, and how many of them fit."""
        with self._past.as_of(engine, "") as (ledger, _):
            return calculator_view(ledger, prompt_tokens, max_tokens, concurrency)

    def _plan(self, engine: str, **asked: Any) -> CapacityPlan:
        """Return the capacity plan of the engine, or of the model that is named, with the engine's load."""
        with self._past.as_of(engine, "") as (ledger, _):
            return plan_of_engine(ledger, PlanRequest(**asked))

    def history(self, engine: str) -> schema.HistoryView:
        """Which past of an engine can be queried."""
        return self._past.span(self._past.ledger(engine))
