"""The past of engines that a Prometheus server scraped, without a kvscope service at the time.

Asked for are the series as they were stored (a range selector in an instant query): each sample at its own time, a gap
as a gap, a counter's reset where it was. Any server with Prometheus's HTTP API will do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from ..base.bounded_http import BoundedClient, HttpFailed, HttpTimeout, status_text
from ..base.http_url import HttpUrl, address_of, shown
from ..base.text import counted
from ..contract.samples import Record, Sample
from .exposition import (
    CONFIGURATION,
    DURATIONS,
    FIELDS,
    NONE_KNOWN,
    PROCESS_CPU,
    ExposedBuckets,
    ExposedEngine,
    ExposedFigures,
    Sampler,
    dialect_of,
    engine_of,
    facts_of,
    put_bucket,
    put_figure,
    put_process_cpu,
)
from .source import POLL_WAIT_S, Source, SourceError, SourceOptions, SourceStatus
from .targets import TargetKind

UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
DEFAULT_PAST_S: Final = 7200.0
"""How far back a Prometheus server is read, unless a window is given."""
MOST_STORED: Final = 600
"""Number of times in a query for a window from before the read span: a chart has no more."""
LEAST_STEP_S: Final = 60
"""Between them: scrapes are that far apart at most, or one would count as several."""
MANY_STORED: Final = 200_000
"""Figures of more than this, some twenty engines over two hours, come with the histograms of a shorter time."""
DURATIONS_S: Final = 300
"""But of no shorter than this: what the overview shows."""
FOLLOW_EVERY_S: Final = 5.0
"""Between queries, where a server is followed."""


class BadHistory(SourceError):
    """The server does not answer, or has no data of an engine. The message names the reason and the remedy."""


AtSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class _StoredSeries(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[AtSeconds, str]]


class _PrometheusData(msgspec.Struct):
    result: list[_StoredSeries]


ERROR_TYPES: Final = frozenset(
    ("timeout", "canceled", "execution", "bad_data", "internal", "unavailable", "not_found", "not_acceptable")
)
"""Prometheus's own. The error's text is not repeated: it may be any server's that the address leads to."""


class _PrometheusAnswer(msgspec.Struct):
    status: str
    data: _PrometheusData | None = None
    error_type: str = msgspec.field(default="", name="errorType")


def seconds(text: str) -> int:
    """`90s`, `30m`, `2h`, `1d12h` in seconds. Raises ValueError."""
    if not re.fullmatch(r"(\d{1,6}[smhdw])+", text):
        raise ValueError(f"{text!r} is not a length of time such as 30m, 2h or 1d12h")
    return sum(int(number) * UNIT_SECONDS[unit] for number, unit in re.findall(r"(\d+)([smhdw])", text))


class PrometheusHistory(Source):
    """The data of the server at `url` about engines: the latest two hours or the span that `select` names, or, when
    followed, each sample as the server gets it. Raises BadTarget if `url` is not an address.
    """

    has_past = True

    def __init__(self, url: str, options: SourceOptions) -> None:
        self._address = address_of(url)
        self._url = url
        self._options = options
        self._every_s = options.interval_s or FOLLOW_EVERY_S
        self._since_ns = self._until_ns = 0
        self._samplers: dict[ExposedEngine, Sampler] = {}
        self._last_ms: dict[ExposedEngine, int] = {}
        self._times: list[int] = []
        self._samples = 0
        self._ended = False
        self._error = ""
        self._failed = 0
        self._due_s = 0.0

    def bounds(self) -> tuple[int, int]:
        """Return 0 and now: how far back the server reaches is not known."""
        return 0, time.time_ns()

    def select(self, since_ns: int, until_ns: int) -> None:
        """Read what was stored between these times (wall ns), or in the two hours before the second."""
        self._since_ns, self._until_ns = since_ns, until_ns

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what was stored since the last poll, in order. Raises BadHistory where it reads a past."""
        if not self._options.follow:
            return self._read_past()
        due_s = self._due_s - time.monotonic()
        if due_s > timeout_s:
            time.sleep(timeout_s)
            return []
        time.sleep(max(due_s, 0.0))
        self._due_s = time.monotonic() + self._every_s
        try:
            records = self._read(self._seconds_to_ask(), time.time(), must_have=not self._last_ms, durations=True)
            self._error = ""
            return records
        except BadHistory as error:
            self._failed += 1
            self._error = str(error)
            return []

    def stored(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return what the server stored of an engine between these times, at MOST_STORED moments if it is long.

        Raises BadHistory.
        """
        known = next((one for one in list(self._last_ms) if str(one) == engine), None)
        if known is None or since_ns >= until_ns:
            return []
        past = PrometheusHistory(self._url, SourceOptions(timeout_s=self._options.timeout_s))
        span_s = -(-(until_ns - since_ns) // 1_000_000_000)
        step_s = max(LEAST_STEP_S, -(-span_s // MOST_STORED)) if span_s > DEFAULT_PAST_S else 0
        records = past._read(
            span_s, until_ns / 1e9, must_have=False, durations=True, step_s=step_s, instance=known.instance
        )
        found = (one for one in records if isinstance(one, Sample) and one.engine == engine)
        return [one for one in found if since_ns <= (one.at_ns or 0) < until_ns]

    def status(self) -> SourceStatus:
        """Report what was read, and how the queries went."""
        engines = tuple(map(str, list(self._last_ms)))
        notes = []
        if self._times:
            texts = (datetime.fromtimestamp(ms / 1e3, UTC).strftime("%d %b %H:%M:%S") for ms in self._times)
            scrapes = f"{counted(self._samples, 'scrape')} of {counted(len(engines), 'engine')}"
            notes.append(f"it has {scrapes}, from {' to '.join(texts)} UTC")
        return SourceStatus(
            target=shown(self._url),
            kind=TargetKind.PROMETHEUS,
            engines=engines,
            in_step=bool(engines) and not self._error,
            ended=self._ended,
            error=self._error,
            skipped=self._failed,
            last_seen_ns=self._times[1] * 1_000_000 if self._times else 0,
            notes=tuple(notes),
        )

    def _read_past(self) -> Sequence[Record]:
        if self._ended:
            return []
        until_ns = self._until_ns or time.time_ns()
        since_ns = self._since_ns or until_ns - round(DEFAULT_PAST_S * 1e9)
        seconds = -(-(until_ns - since_ns) // 1_000_000_000)
        records = self._read(seconds, until_ns / 1e9, must_have=True, durations=False)  # no detector reads them
        self._ended = True
        return records

    def _seconds_to_ask(self) -> int:
        """Return the length of the past to ask for at first, and later the time since the last sample of the engine
        that is behind.
        """
        look_back_s = self._options.look_back_s or DEFAULT_PAST_S
        if not self._last_ms:
            return round(look_back_s)
        return round(min(look_back_s, max(time.time() - min(self._last_ms.values()) / 1e3, 0.0) + 1.0))

    def _read(
        self, seconds: int, until_s: float, *, must_have: bool, durations: bool, step_s: int = 0, instance: str = ""
    ) -> list[Record]:
        """Return what is new in the `seconds` until `until_s` (Unix time). Raises BadHistory.

        durations: with the histograms, which are twice as much as all else: of many engines, of a shorter time. None,
        if the server refuses them.
        step_s: as it was every so many seconds (0: each scrape). instance: of this one alone.
        """
        only = f',instance="{_promql_text(instance)}"' if instance else ""
        every = f":{step_s}s" if step_s else ""

        def asked(span_s: int, *names: str) -> list[_StoredSeries]:
            query = f'{{__name__=~"{"|".join(names)}"{only}}}[{span_s}s{every}]'
            return _ask(self._address, query, self._options.timeout_s, until_s)

        series = asked(seconds, *FIELDS, CONFIGURATION)
        bucket_series: list[_StoredSeries] = []
        if durations and series:
            stored = sum(len(one.values) for one in series)
            span_s = min(seconds, max(seconds * MANY_STORED // max(stored, 1), DURATIONS_S))
            with suppress(BadHistory):
                bucket_series = asked(span_s, *DURATIONS)
        instances = sorted({re.escape(one.metric["instance"]) for one in series if "instance" in one.metric})
        cpu_series: list[_StoredSeries] = []
        if instances:  # of these alone: every other exporter has this series, too
            query = f'{PROCESS_CPU}{{instance=~"{_promql_text("|".join(instances))}"}}[{seconds}s{every}]'
            with suppress(BadHistory):
                cpu_series = _ask(self._address, query, self._options.timeout_s, until_s)
        try:
            records = sorted(
                self._new_records(series, bucket_series, _process_cpu(cpu_series)), key=lambda found: found[0]
            )
        except (ValueError, ArithmeticError) as error:
            raise BadHistory(
                f"{shown(self._url)} has a sample whose time or value is not a number ({type(error).__name__})"
            ) from error
        if must_have and not records:
            raise BadHistory(
                f"{shown(self._url)}: of these {seconds} s {NONE_KNOWN}. Is the engine's page among its scrape targets?"
            )
        return [record for _, record in records]

    def _new_records(
        self,
        all_series: list[_StoredSeries],
        bucket_series: list[_StoredSeries],
        cpu_s: dict[tuple[str, int], float],
    ) -> Iterator[tuple[int, Record]]:
        """Yield each with its time, in ns."""
        moments: dict[ExposedEngine, dict[int, ExposedFigures]] = {}
        names: dict[ExposedEngine, set[str]] = {}
        configurations: dict[tuple[str, str], dict[str, str]] = {}
        for series in all_series:
            name = series.metric.pop("__name__", "")
            engine = engine_of(series.metric, series.metric.get("instance", "prometheus"))
            if name == CONFIGURATION:
                configurations[engine.instance, engine.rank] = series.metric
                continue
            names.setdefault(engine, set()).add(name)
            for at_s, value in series.values:
                figures = moments.setdefault(engine, {}).setdefault(round(at_s * 1000), {})
                put_figure(figures, name, series.metric, float(value))
        buckets = _exposed_buckets(bucket_series)
        for engine, figures_at in moments.items():
            if not any(figures_at.values()):
                continue
            for at_ms, figures in figures_at.items():
                put_process_cpu(figures, cpu_s.get((engine.instance, at_ms)))
            if engine not in self._samplers:
                self._samplers[engine] = Sampler(engine, "prometheus")
                began_ns = min(figures_at) * 1_000_000
                configuration = configurations.get((engine.instance, engine.rank), {})
                for fact in facts_of(engine, str(began_ns), dialect_of(names[engine]), configuration):
                    yield began_ns, fact
            yield from self._new_samples(engine, figures_at, buckets.get(engine, {}))

    def _new_samples(
        self, engine: ExposedEngine, figures_at: dict[int, ExposedFigures], buckets_at: dict[int, ExposedBuckets]
    ) -> Iterator[tuple[int, Record]]:
        kept_until_ns = self._options.kept_until_ns(str(engine))
        for at_ms, figures in sorted(figures_at.items()):
            if figures and at_ms > self._last_ms.get(engine, 0):
                self._last_ms[engine] = at_ms
                self._samples += 1
                self._times = [min([*self._times, at_ms]), max([*self._times, at_ms])]
                at_ns = at_ms * 1_000_000
                position = f"{at_ms / 1000:.3f}"
                sample = self._samplers[engine].sample(at_ns, position, figures, buckets_at.get(at_ms))
                if at_ns > kept_until_ns:  # rates are of the sample before, which may be kept
                    yield at_ns, sample


def _promql_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _process_cpu(all_series: list[_StoredSeries]) -> dict[tuple[str, int], float]:
    """Return the CPU time of the servers, by instance and by the time of the scrape in ms."""
    return {
        (series.metric.get("instance", ""), round(at_s * 1000)): float(value)
        for series in all_series
        for at_s, value in series.values
    }


def _exposed_buckets(all_series: list[_StoredSeries]) -> dict[ExposedEngine, dict[int, ExposedBuckets]]:
    """Return the histograms of each engine, by the time of the scrape in ms."""
    found: dict[ExposedEngine, dict[int, ExposedBuckets]] = {}
    for series in all_series:
        name = series.metric.pop("__name__", "")
        buckets_at = found.setdefault(engine_of(series.metric, series.metric.get("instance", "prometheus")), {})
        for at_s, value in series.values:
            put_bucket(buckets_at.setdefault(round(at_s * 1000), {}), name, series.metric, float(value))
    return found


def _ask(url: HttpUrl, query: str, timeout_s: float, at_s: float) -> list[_StoredSeries]:
    try:
        with BoundedClient(timeout_s) as client:
            answer = client.ask("GET", url.below("/api/v1/query", {"query": query, "time": at_s}))
    except HttpTimeout as error:
        raise BadHistory(f"{url} {error}: ask for less (--since) or wait longer (--timeout)") from error
    except HttpFailed as error:
        raise BadHistory(f"{url} {error}: is a Prometheus server running there?") from error
    try:
        stored = answer.decoded(_PrometheusAnswer)
    except HttpFailed as error:
        raise BadHistory(
            f"{url} does not answer as a Prometheus server does ({answer.status}). Give its base"
            " address, such as http://127.0.0.1:9090"
        ) from error
    if stored.status != "success" or stored.data is None:
        kind = stored.error_type if stored.error_type in ERROR_TYPES else status_text(answer.status)
        raise BadHistory(f"{url} refuses the query ({kind}): see its log for the reason")
    return stored.data.result
