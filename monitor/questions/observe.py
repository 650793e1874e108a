"""Opens a target, with the part of its past that is asked for, and observes it: whatever it is, the result answers
kvscope.monitor.questions.query's questions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from ..base.errors import BadTarget, CannotTell, Unreachable
from ..base.text import counted, moment, percent, timestamp
from ..contract.samples import Fact, Record, Sample
from ..contract.wire import Batch, ContractError, Keyframe
from ..detectors.blind.log_silence import LogSilence
from ..detectors.blind.metric_wrong import MetricWrong
from ..detectors.detector import Settings
from ..detectors.findings import FindingReport, severity_at_least
from ..detectors.held.pool_reserved import PoolReserved
from ..detectors.written.written_view import WrittenView
from ..ledger.demand import capacity_tokens, demands, tokens_per_request
from ..ledger.engine_ledger import EngineLedger
from ..ledger.memory_breakdown import GIB_B, NoBreakdown, breakdown_of, fit_requested, over_requested, parts
from ..sources.log_file import NO_STATISTICS
from ..sources.prometheus_history import seconds
from ..sources.recording import record_ns
from ..sources.source import Source, SourceOptions, SourceStatus, read_to_end, until_in_step
from ..sources.source_registry import is_service, open_source
from ..sources.targets import PROMETHEUS_PREFIX, TargetKind
from .client import ServiceClient
from .pipeline import Pipeline
from .query import Query
from .schema import EngineView


class Span(NamedTuple):
    """A span in wall ns. `since_ns` is 0 where there is no beginning."""

    since_ns: int
    until_ns: int

    def __str__(self) -> str:
        began, ended = ((timestamp(at) or "its beginning").replace("T", " ") for at in self)
        return f"{began} to {ended}"


class Window(NamedTuple):
    """The window of the command line. Empty texts mean from the beginning, and to the end."""

    since: str = ""
    until: str = ""

    def span(self, end_ns: int) -> Span:
        """Return the span if the last record is at `end_ns`: relative times count back from there.

        Raises BadTarget for a window in which there is no time.
        """
        since_ns = when(self.since, end_ns) if self.since else 0
        until_ns = min(when(self.until, end_ns), end_ns) if self.until else end_ns
        if since_ns >= until_ns:
            backwards = self.until and since_ns >= when(self.until, end_ns)
            why = "--since must be earlier than --until" if backwards else "what there is ends with the second"
            began, ended = timestamp(since_ns) or "the beginning", timestamp(until_ns)
            raise BadTarget(f"from {began} to {ended} there is nothing to look at: {why}")
        return Span(since_ns, until_ns)


ALWAYS: Final = Window()
JUDGE_LOG_EVERY_NS: Final = 30_000_000_000
"""A log that is read whole is judged as often as an engine that is scraped twice a minute, when the engine stops
computing tokens or goes on, and at its end. Each line is in the window that a judgement reads, and weeks of a log have
more lines than there is time to judge.
"""


def when(text: str, end_ns: int) -> int:
    """Return `30m` before `end_ns`, or the time that `text` names, in wall ns. Raises ValueError for neither."""
    try:
        return end_ns - seconds(text) * 1_000_000_000
    except ValueError:
        pass
    try:
        return moment(text, end_ns)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a time (14:02:11, in UTC, or 2026-01-31T14:02:11Z) nor how long ago (30m, 2h, 1d12h)"
        ) from None


WATCH_S = 3.0
"""How long a live target is watched: two heartbeats, so that a moving engine differs from a still one."""
SCRAPE_EVERY_S = 1.0


@dataclass
class Observation:
    """A target that was inspected. `is_past`: its data is over, or has an end, so findings resolved by then count too.
    `since` and `until` (RFC 3339) restrict it to findings that touch that window, as of its end. `engine`: all that it
    is about, though `query` knows others.
    """

    target: str
    kind: str
    query: Query
    is_past: bool
    notes: list[str] = field(default_factory=list)
    since: str = ""
    until: str = ""
    engine: str = ""
    undecided: str = ""
    """Why silence of it is no sign of health: what is pending was watched for too short a time."""

    def engines(self) -> list[EngineView]:
        """As they are, or were at its end."""
        return [view for view in self.query.engines(self.until) if self.engine in ("", view.engine)]

    def findings(self) -> list[FindingReport]:
        """Return the findings that fire, and resolved ones of the past: the worst first."""
        if not self.is_past:
            return self.query.findings("firing", self.engine)
        found = self.query.findings(since=self.since, until=self.until)
        return [self._at_the_end(finding) for finding in found]

    def _at_the_end(self, finding: FindingReport) -> FindingReport:
        if self.until and finding.resolved_at and finding.resolved_at > self.until:
            return msgspec.structs.replace(finding, state="firing", resolved_at=None)
        return finding

    def close(self) -> None:
        """Let go of a service's connection."""
        if isinstance(self.query, ServiceClient):
            self.query.close()


def observe(
    target: str,
    settings: Settings,
    streams: Pipeline | None = None,
    *,
    timeout_s: float = 10.0,
    watch_s: float = WATCH_S,
    token: str = "",
    window: Window = ALWAYS,
) -> Observation:
    """Observe `target`. `streams` watches other event streams too. Raises BadTarget for what is none, or has no past
    where a window of it is asked for, and CannotTell.
    """
    try:
        if is_service(target):
            return _ask_service(target, token, timeout_s, window)
        options = SourceOptions(timeout_s=timeout_s, interval_s=min(SCRAPE_EVERY_S, watch_s / 3))
        with closing(open_source(target, options)) as source:
            if source.has_past:
                return _read_past(target, source, settings, window)
            if window != ALWAYS:
                raise BadTarget(
                    f"{target} is live and has no past: use --since and --until with a recording, a log, a service,"
                    " or a Prometheus server"
                )
            return _watch_live(source, streams or Pipeline(settings), settings, timeout_s, watch_s)
    except (ContractError, Unreachable) as error:
        raise CannotTell(str(error)) from error


# ---------------------------------------------------------------- what is live


def _watch_live(source: Source, streams: Pipeline, settings: Settings, timeout_s: float, watch_s: float) -> Observation:
    """Watch for `watch_s` from when its state is known. An event stream of one engine goes into `streams`, which
    watches the others too: a rank that stands still is known by its siblings. Where a source brings samples, it is
    watched for as long as a finding is pending, `timeout_s` at most.
    """
    watch = streams
    samples: dict[str, int] = {}
    in_step_s = 0.0

    def feed(records: Sequence[Record]) -> None:
        nonlocal watch
        if watch is streams and not is_one_stream(source, records):
            watch = Pipeline(settings)
        watch.feed(records)
        for record in records:
            if isinstance(record, Sample):
                samples[record.engine] = samples.get(record.engine, 0) + 1
        if samples:
            watch.settle()

    for records in until_in_step(source, timeout_s):
        feed(records)
    in_step_s = time.monotonic()
    pending: list[str] = []
    undecided = ""
    while True:
        watched_s = time.monotonic() - in_step_s
        pending = sorted({finding.code for finding in watch.findings("pending")}) if samples else []
        too_few = bool(samples) and max(samples.values()) < 2  # one page has no rates
        if watched_s > (max(watch_s, timeout_s) if pending else watch_s) and not too_few:
            break
        if too_few and watched_s > watch_s + timeout_s:
            break
        if records := source.poll():
            feed(records)
    if watch is not streams or not samples:
        watch.settle()
    status = source.status()
    notes = _notes_of(status, watch)
    if pending:
        codes = ", ".join(pending)
        too_short = f"{watched_s:.0f} s were too short to decide whether it is {codes}: give a longer --timeout"
        notes.append(too_short)
        if not _alarms(watch.findings()) and _alarms(watch.findings("pending")):
            undecided = f"{status.target}: {notes.pop()}"
    engine = status.engine if watch is streams else ""
    return Observation(
        status.target, status.kind, watch, is_past=bool(samples), notes=notes, engine=engine, undecided=undecided
    )


def _alarms(findings: Sequence[FindingReport]) -> bool:
    return any(severity_at_least(finding.severity, "warning") for finding in findings)


def is_one_stream(source: Source, records: Sequence[Record]) -> bool:
    """Return whether these records are frames of one engine."""
    return (
        source.has_events
        and len(source.status().engines) <= 1
        and all(isinstance(record, Batch | Keyframe) for record in records)
    )


def _notes_of(status: SourceStatus, watch: Pipeline) -> list[str]:
    if status.kind != TargetKind.KV_EVENTS:
        return list(status.notes)
    return [*kv_events_in_words(watch.fleet.engines.values()), *status.notes]


# ---------------------------------------------------------------- what has a past


def look_back(url: str, window: Window, settings: Settings, *, timeout_s: float = 10.0) -> Observation:
    """Observe what the Prometheus server at `url` stored in the window, or in the last two hours of it. Raises
    CannotTell.
    """
    return observe(f"{PROMETHEUS_PREFIX}{url}", settings, timeout_s=timeout_s, window=window)


def _read_past(target: str, source: Source, settings: Settings, window: Window) -> Observation:
    """Read all of it, or until the end of the window. The events before the window determine what is held at its
    beginning. Of samples, only those of the window count.
    """
    is_log = source.status().kind == TargetKind.LOG
    watch = Pipeline(settings, judge_every_ns=JUDGE_LOG_EVERY_NS) if is_log else Pipeline(settings)
    span = _span_of(target, source, window)
    kinds: set[type[Record]] = set()
    facts: list[Fact] = []
    for records in read_to_end(source):
        within = records if span is None else list(_within_span(records, span))
        kinds.update(map(type, within))
        facts += (record for record in within if isinstance(record, Fact))
        watch.feed(within)
        if span is not None and source.has_events and records and record_ns(records[-1]) > span.until_ns:
            break
    watch.settle()
    watch.lifecycle.close()
    status = source.status()
    notes = _notes_of(status, watch)
    if span is not None:
        notes.append(_judged_within(span))
        if Sample not in kinds and not source.has_events:
            raise CannotTell(f"{target}: no line between --since and --until has an engine's figures")
    if status.kind in (TargetKind.LOG, TargetKind.PROSE):
        notes = _text_notes(target, status, watch, notes, facts)
    if kinds <= {Batch, Keyframe} and not any(engine.signal == "stream" for engine in watch.engines()):
        lacks = f"{target}: the recording has neither an engine's start nor a keyframe, so no state is known"
        raise CannotTell("; ".join([lacks, *status.notes]))
    since = timestamp(span.since_ns) or "" if span is not None and Batch in kinds else ""
    return Observation(status.target, status.kind, watch, is_past=True, notes=notes, since=since)


def _span_of(target: str, source: Source, window: Window) -> Span | None:
    """Return the window as times, which the source gets. Raises BadTarget, CannotTell and SourceError."""
    if window == ALWAYS:
        return None
    first_ns, last_ns = source.bounds()
    span = window.span(last_ns)
    if first_ns and span.until_ns < first_ns:
        raise CannotTell(
            f"{target} begins at {timestamp(first_ns)}: there is nothing of it until {timestamp(span.until_ns)}"
        )
    source.select(*span)
    return span


def _within_span(records: Sequence[Record], span: Span) -> Iterator[Record]:
    """Yield records of the span. A fact holds from then on, and events add up from the beginning. Samples count by
    themselves.
    """
    for record in records:
        at_ns = record_ns(record)
        if isinstance(record, Sample):
            if at_ns and span.since_ns <= at_ns <= span.until_ns:
                yield record
        elif at_ns <= span.until_ns:
            yield record


def _judged_within(span: Span) -> str:
    return f"only the window {span} UTC was judged"


def _text_notes(
    target: str, status: SourceStatus, watch: Pipeline, notes: list[str], facts: Sequence[Fact]
) -> list[str]:
    """Return the notes of a log or a report. Raises CannotTell if it is too thin to be judged."""
    is_report = status.kind == TargetKind.PROSE
    if is_report:
        notes = notes + facts_in_words(facts)
    refuse_too_little(target, notes, watch.findings(), watch.fleet.engines.values())
    if not is_report:
        return notes
    return ["it is a report and not a log: its statements are taken as given, and nothing could be measured", *notes]


# ---------------------------------------------------------------- a service


def _ask_service(target: str, token: str, timeout_s: float, window: Window) -> Observation:
    query = ServiceClient(target, token, timeout_s)
    try:
        engines = query.engines()
    except Unreachable:
        query.close()
        raise
    notes = [] if engines else ["the service knows no engine yet: see its --events"]
    if not engines:
        query.close()
        raise CannotTell(f"{target}: {notes[0]}")
    if window == ALWAYS:
        return Observation(target, TargetKind.SERVICE, query, is_past=False, notes=notes)
    span = window.span(time.time_ns())
    since, until = (timestamp(at) or "" for at in span)
    return Observation(
        target, TargetKind.SERVICE, query, is_past=True, notes=[_judged_within(span)], since=since, until=until
    )


# -------------------------------------------------------------------- is it enough?


LEAST_STATISTICS: Final = 3
"""The fewest statistics: two are one interval, in which an engine may as well have been about to stop."""


def refuse_too_little(
    target: str, notes: Sequence[str], findings: Sequence[FindingReport], ledgers: Iterable[EngineLedger]
) -> None:
    """Raise CannotTell where silence would be taken for health."""
    views = [WrittenView(ledger) for ledger in ledgers]
    complains = any(view.is_report() for view in views)
    if any(finding.severity != "info" for finding in findings):
        return
    explains = [finding for finding in findings if not finding.code.startswith(("blind.", "held.pool", "held.prefix"))]
    contradicts = any(finding.code == MetricWrong.code for finding in findings)
    if explains or contradicts:
        return
    samples = sum(len(view.samples) for view in views)
    if complains and samples:
        raise CannotTell(
            f"{target} describes a problem, but the lines that it quotes do not show one. Give at least a minute of"
            " the log or the metrics page while it happens",
            notes,
        )
    if not samples:
        asks = any(view.states("question", "memory_taken") for view in views)
        if asks and any(finding.code == PoolReserved.code and not complains for finding in findings):
            return
        raise CannotTell(
            f"{target}: {NO_STATISTICS}. Nor is it a report that describes a problem with the load's command, its"
            " lengths and the pool's size",
            notes,
        )
    if samples < LEAST_STATISTICS and not any(finding.code == LogSilence.code for finding in findings):
        raise CannotTell(
            f"{target}: {samples} line{'s' if samples > 1 else ''} of statistics are too few: at least three in a"
            " row show whether the engine progresses",
            notes,
        )


# -------------------------------------------------------------------- facts in words


def facts_in_words(facts: Sequence[Fact]) -> list[str]:
    """Return a sentence for each, or nothing if the facts allow no sums."""
    return [*_breakdown_in_words(facts), *_demand_in_words(facts)]


def _breakdown_in_words(facts: Sequence[Fact]) -> list[str]:
    try:
        breakdown, _ = breakdown_of(facts)
    except NoBreakdown:
        return []
    sizes = ", ".join(f"{size / GIB_B:.2f} {name}" for name, size in parts(breakdown).items())
    over, fits = over_requested(breakdown), fit_requested(breakdown).kv_cache_memory
    words = f"it has a memory breakdown: of {breakdown.device_total / GIB_B:.2f} GiB, {sizes}"
    if over is not None and over > 0:
        words += f"; that is {over / GIB_B:.2f} GiB more than it was given, and --kv-cache-memory={fits} would fit"
    return [f"{words} (monitor explain memory --log FILE does the sums)"]


def _demand_in_words(facts: Sequence[Fact]) -> list[str]:
    named = {fact.name: fact for fact in facts}
    asked = demands(named)
    if not asked:
        return []
    each = ", ".join(f"{d.clients} x {tokens_per_request(named):,} = {d.tokens:,} ({percent(d.share)})" for d in asked)
    return [f"the pool holds {capacity_tokens(named):,} tokens, and the load asks for {each}"]


def kv_events_in_words(ledgers: Iterable[EngineLedger]) -> list[str]:
    """Return a sentence for each engine, and one on the limits of KV events."""
    lines = [
        f"{ledger.engine} keeps {counted(kept.kept_blocks, 'block')} for their prefixes, by the KV events received:"
        f" {kept.stored:,} stored, {kept.removed:,} removed, cleared {counted(kept.cleared, 'time')}"
        for ledger, kept in ((ledger, ledger.prefixes) for ledger in ledgers)
    ]
    return [
        *lines,
        "KV events do not show usage, running or waiting requests, block owners, hits or preemptions: give its /metrics"
        " page or its log too",
    ]
