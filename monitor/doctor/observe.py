"""Opens a target and looks at it: whatever it is, what comes out answers kvscope.monitor.query's questions."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

import msgspec

from kvscope.monitor.client import ServiceClient
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.facts_text import in_words, kv_events_in_words
from kvscope.monitor.doctor.time_window import ALWAYS, Span, Window, at_of
from kvscope.monitor.errors import CannotTell as CannotTell
from kvscope.monitor.errors import Unreachable
from kvscope.monitor.events.samples import Fact, Sample
from kvscope.monitor.events.wire import ContractError
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.query import Query
from kvscope.monitor.schema import EngineView
from kvscope.monitor.sources.exposition import shown
from kvscope.monitor.sources.kv_events import KvEventStream, Publisher, publisher_at, publishers
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.prometheus_history import BadHistory, history
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.sources.support_bundle import NotABundle, unpack_events
from kvscope.monitor.sources.targets import SOURCES_PATH, BadTarget, Kind, kind_of, read_log, read_prose
from kvscope.monitor.text import counted, timestamp

WATCH_S = 3.0
"""How long what is live is watched: two heartbeats, so that what moves can be told from what does not."""
SCRAPE_EVERY_S = 1.0
LOOK_BACK_NS = 7_200_000_000_000
"""How far a Prometheus server is asked to look back, unless told."""


@dataclass
class Observation:
    """A target that was looked at. `is_past`: what it shows is over, or has an end, so what was resolved by then counts
    too; `since` and `until` (RFC 3339): but only what touches that window, and as it was at its end. `engine`: all that
    it is about, though `query` knows others.
    """

    target: str
    kind: Kind
    query: Query
    is_past: bool
    notes: list[str] = field(default_factory=list)
    since: str = ""
    until: str = ""
    engine: str = ""

    def engines(self) -> list[EngineView]:
        """As they are, or were at its end."""
        return [view for view in self.query.engines(self.until) if self.engine in ("", view.engine)]

    def findings(self) -> list[FindingReport]:
        """What fires; and, of what is past, what was resolved: the worst first."""
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
    """Look at `target`; `streams` is what watches other event streams too. Raises BadTarget for what is
    none, or has no past where a window of it is asked for, and CannotTell.
    """
    kind = kind_of(target)
    if window != ALWAYS and kind in (Kind.STREAM, Kind.KV_EVENTS, Kind.METRICS):
        raise BadTarget(
            f"{target} is live and has no past to look at: --since and --until are for a recording, a log, a service,"
            " or what a Prometheus server stored"
        )
    try:
        match kind:
            case Kind.STREAM:
                return _watch_stream(target, streams or Pipeline(settings), settings, timeout_s, watch_s)
            case Kind.SERVICE:
                return _ask_service(target, token, timeout_s, window)
            case Kind.RECORDING:
                return _read_recording(target, Path(target), settings, window)
            case Kind.BUNDLE:
                return _read_bundle(target, settings, window)
            case Kind.KV_EVENTS:
                return _watch_kv_events(target, publishers(target, timeout_s), settings, timeout_s, watch_s)
            case Kind.LOG | Kind.PROSE:
                return _read_log(target, settings, window)
            case Kind.METRICS:
                return _watch_page(target, settings, timeout_s, watch_s)
            case Kind.PROMETHEUS:
                raise BadTarget(f"{target}: the past of a Prometheus server is asked for by --prometheus URL")
    except (ContractError, Unreachable) as error:
        raise CannotTell(str(error)) from error


def _watch_stream(target: str, watch: Pipeline, settings: Settings, timeout_s: float, watch_s: float) -> Observation:
    """Into what watches the other streams too: a rank that stands still is known by its siblings."""
    stream = LiveStream(target)
    started = time.monotonic()
    in_step_at: float | None = None
    try:
        while (in_step_at is None or time.monotonic() - in_step_at < watch_s) and not stream.has_kv_events:
            watch.feed(received.frame for received in stream.poll(0.1))
            if in_step_at is None and stream.in_step:
                in_step_at = time.monotonic()
            if in_step_at is None and time.monotonic() - started > timeout_s:
                raise nothing_heard(target, bool(stream.engine), timeout_s)
    finally:
        stream.close()
    if stream.has_kv_events:
        return _watch_kv_events(target, [publisher_at(target)], settings, timeout_s, watch_s)
    watch.settle()
    notes = [f"{stream.bad_frames} messages were not of the contract and were left out"] if stream.bad_frames else []
    return Observation(target, Kind.STREAM, watch, is_past=False, notes=notes, engine=stream.engine)


def nothing_heard(target: str, publishes: bool, timeout_s: float) -> CannotTell:
    """Of a stream that gave no state in that time."""
    heard = "it publishes, but its replay socket does not answer" if publishes else "nothing was heard"
    return CannotTell(
        f"{target}: {heard} for {timeout_s:.0f} s. Is the engine running, with its event stream at that"
        f" address (--events {target})? A frozen process looks the same: ps -o stat= -p PID tells. vLLM's"
        f" KV events come only while requests run; http://HOST:8000{SOURCES_PATH} tells where they are"
    )


def _watch_kv_events(
    target: str, found: Sequence[Publisher], settings: Settings, timeout_s: float, watch_s: float
) -> Observation:
    """Take what the publishers still have of their past, and what they say for `watch_s` from their first word on."""
    watch = Pipeline(settings)
    name = shown(target)
    started = time.monotonic()
    heard_at: float | None = None
    with contextlib.ExitStack() as opened:
        streams = [opened.enter_context(contextlib.closing(KvEventStream(publisher))) for publisher in found]
        while heard_at is None or time.monotonic() - heard_at < watch_s:
            for stream in streams:
                watch.feed(stream.poll(0.1 / len(streams)))
            if heard_at is None and any(stream.batches for stream in streams):
                heard_at = time.monotonic()
            if heard_at is None and time.monotonic() - started > timeout_s:
                raise CannotTell(
                    f"{name}: no KV event came for {timeout_s:.0f} s, and no replay socket has any. They come only"
                    " while requests run and prefix caching is on; an endpoint without * in it, or an address of an"
                    " interface, makes vLLM connect and not bind, and then nobody hears it"
                )
    watch.settle()
    notes = kv_events_in_words(watch.fleet.engines.values())
    for stream in streams:
        if stream.bad_messages:
            notes.append(f"{stream.bad_messages} messages were no KV events and were left out")
        if stream.lost:
            notes.append(f"{counted(stream.lost, 'batch', 'batches')} never came: what was kept before is forgotten")
    return Observation(name, Kind.KV_EVENTS, watch, is_past=False, notes=notes)


def _watch_page(target: str, settings: Settings, timeout_s: float, watch_s: float) -> Observation:
    """Scrape it for `watch_s`, and for as long as something is within its grace, `timeout_s` at most. What began and
    ended meanwhile is told too.
    """
    try:
        from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage
    except ImportError as error:
        raise CannotTell(
            f"{target}: a metrics page needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    watch = Pipeline(settings)
    page = MetricsPage(target, timeout_s)
    started = time.monotonic()
    try:
        while True:
            try:
                watch.feed(page.scrape())
            except BadPage as error:
                if not watch.engines():
                    raise CannotTell(str(error)) from error
            watch.settle()
            watched_s = time.monotonic() - started
            pending = sorted({finding.code for finding in watch.findings("pending")})
            until_s = max(watch_s, timeout_s) if pending else watch_s
            if watched_s > until_s and page.scrapes > 1:  # one page has no rates
                break
            time.sleep(min(SCRAPE_EVERY_S, watch_s / 3, max(until_s - watched_s, 0.0) + 0.01))
    finally:
        page.close()
    notes = []
    if page.failed_scrapes:
        notes.append(f"{page.failed_scrapes} of {page.scrapes} scrapes failed; the last: {page.last_failure}")
    if pending:
        codes = ", ".join(pending)
        notes.append(f"{watched_s:.0f} s were too few to tell whether it is {codes}: give a longer --timeout")
    return Observation(page.url, Kind.METRICS, watch, is_past=True, notes=notes)


def look_back(url: str, window: Window, settings: Settings, *, timeout_s: float = 10.0) -> Observation:
    """Look at what the Prometheus server at `url` stored in the window, or in the last two hours of it. Raises
    CannotTell.
    """
    watch = Pipeline(settings)
    now_ns = time.time_ns()
    until_ns = window.span(now_ns).until_ns
    since_ns = window.span(now_ns).since_ns or until_ns - LOOK_BACK_NS
    try:
        records = history(url, -(-(until_ns - since_ns) // 1_000_000_000), timeout_s, until_s=until_ns / 1e9)
    except BadHistory as error:
        raise CannotTell(str(error)) from error
    watch.feed(records)
    watch.settle()
    times = [record.at_ns for record in records if isinstance(record, Sample) and record.at_ns]
    first, last = (datetime.fromtimestamp(at / 1e9, UTC).strftime("%d %b %H:%M:%S") for at in (times[0], times[-1]))
    engines = counted(len(watch.engines()), "engine")
    notes = [f"it has {counted(len(times), 'scrape')} of {engines}, from {first} to {last} UTC"]
    return Observation(shown(url), Kind.PROMETHEUS, watch, is_past=True, notes=notes)


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
        return Observation(target, Kind.SERVICE, query, is_past=False, notes=notes)
    span = window.span(time.time_ns())
    since, until = (timestamp(at) or "" for at in span)
    return Observation(target, Kind.SERVICE, query, is_past=True, notes=[_looked_at(span)], since=since, until=until)


def _read_bundle(target: str, settings: Settings, window: Window) -> Observation:
    with tempfile.TemporaryDirectory(prefix="kvscope-bundle-") as folder:
        try:
            unpack_events(Path(target), Path(folder))
        except NotABundle as error:
            raise BadTarget(str(error)) from error
        observation = _read_recording(target, Path(folder), settings, window)
    observation.kind = Kind.BUNDLE
    return observation


def _read_recording(target: str, path: Path, settings: Settings, window: Window) -> Observation:
    """All of it, or until the end of the window: what is held at its beginning is known from what came before."""
    watch = Pipeline(settings)
    recording = Recording(path)
    notes, since = [], ""
    if window == ALWAYS:
        watch.feed(recording)
    else:
        times = [at for at in map(at_of, Recording(path)) if at]
        span = window.span(max(times, default=0))
        if times and span.until_ns < min(times):
            raise CannotTell(
                f"{target} begins at {timestamp(min(times))}: there is nothing of it until {timestamp(span.until_ns)}"
            )
        watch.feed(takewhile(lambda record: at_of(record) <= span.until_ns, recording))
        notes, since = [_looked_at(span)], timestamp(span.since_ns) or ""
    watch.settle()
    if recording.bad_frames:
        notes.append(f"{recording.bad_frames} records were not of the contract and were left out")
    if recording.bytes_lost:
        notes.append(f"its last {recording.bytes_lost} bytes are no whole record: the writer was stopped in mid-write")
    if not any(engine.signal == "stream" for engine in watch.engines()):
        raise CannotTell(f"{target}: the recording has neither an engine's start nor a keyframe, so no state is known")
    return Observation(target, Kind.RECORDING, watch, is_past=True, notes=notes, since=since)


def _read_log(target: str, settings: Settings, window: Window) -> Observation:
    """All of it, or the figures of the window alone."""
    watch = Pipeline(settings)
    path = Path(target)
    log, records = read_log(path)
    if window != ALWAYS:
        end_ns = max((record.at_ns or 0 for record in records), default=0)
        if not end_ns:
            raise CannotTell(f"{target}: no line has a time, so that what was between --since and --until is not known")
        span = window.span(end_ns)
        records = [record for record in records if _within(record, span)]
        if not any(isinstance(record, Sample) for record in records):
            raise CannotTell(f"{target}: no line between --since and --until has an engine's figures")
        log.notes.append(_looked_at(span))
    if log.stats_lines:
        watch.feed(records)
        watch.settle()
        return Observation(target, Kind.LOG, watch, is_past=True, notes=log.notes)
    facts = read_prose(path, log, [record for record in records if isinstance(record, Fact)])
    notes = log.notes + in_words(facts)
    watch.feed(facts)
    watch.settle()
    if all(
        finding.severity == "info" for finding in watch.findings()
    ):  # that a pool is taken at the start is no verdict
        raise CannotTell(
            f"{target}: no line has an engine's figures (Avg prompt throughput: …, Running: …, KV cache usage: …). They"
            " are logged every 10 s while requests run, unless --disable-log-stats is given. Nor is it a report that"
            " tells of a trouble with the command of the load, its lengths and the size of the pool",
            notes,
        )
    notes.insert(0, "it is no log but a report: what it tells is taken as told, and nothing could be measured")
    return Observation(target, Kind.PROSE, watch, is_past=True, notes=notes)


def _within(record: Sample | Fact, span: Span) -> bool:
    """What was said once holds from then on."""
    if isinstance(record, Fact):
        return (record.at_ns or 0) <= span.until_ns
    return record.at_ns is not None and span.since_ns <= record.at_ns <= span.until_ns


def _looked_at(span: Span) -> str:
    return f"only what was so between {span} UTC was judged"
