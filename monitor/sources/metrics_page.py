"""An engine's metrics page, scraped again and again: figures of an engine that has no probe.

A scrape that fails is counted and leaves a gap. The next one goes on from there.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from ..base import limits
from ..base.bounded_http import BoundedClient, HttpFailed, HttpTimeout, status_text
from ..base.http_url import address_of, shown
from ..contract.event_log import Clock
from ..contract.samples import Fact, Record, Sample
from .exposition import (
    CONFIGURATION,
    DURATIONS,
    FIELDS,
    NONE_KNOWN,
    NONE_VALID,
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
from .metric_families import UnusedFamilies, unused_families
from .source import POLL_WAIT_S, Source, SourceError, SourceStatus
from .targets import TargetKind

EVERY_S: Final = 5.0
"""Between scrapes, where a page is watched for good: a page costs an engine's front end 10 to 60 ms."""


class BadPage(SourceError):
    """The page cannot be read, or is no engine's. The message names the reason and the remedy."""


class MetricsPage(Source):
    """The page at `url`, of one server and all its ranks. `timeout_s` bounds each scrape. One thread only.

    Raises BadTarget if `url` is not an address.
    """

    def __init__(self, url: str, timeout_s: float = 10.0, clock: Clock = time, every_s: float = EVERY_S) -> None:
        address = address_of(url)
        self.url = shown(url)
        self.scrapes = 0
        self.failed_scrapes = 0
        self.last_failure = ""
        self.failing = False
        """Whether the last scrape failed."""
        self._address = address
        self._instance = address.netloc
        self._timeout_s = self.blocks_s = timeout_s
        self._every_ns = round(every_s * 1e9)
        self._clock = clock
        self._client = BoundedClient(timeout_s)
        self._samplers: dict[ExposedEngine, Sampler] = {}
        self._seen_ns: dict[ExposedEngine, int] = {}
        self.left_out = 0
        """Engines of the last page beyond PAGE_ENGINES."""
        self._unused = UnusedFamilies(0, [], [])
        self._next_ns = 0
        self._last_ns = 0

    def poll(self, timeout_s: float = POLL_WAIT_S) -> list[Record]:
        """Return the records of the page, if the next scrape is due within `timeout_s`. A failed one is counted."""
        due_s = (self._next_ns - self._clock.monotonic_ns()) / 1e9
        if due_s > timeout_s:
            time.sleep(timeout_s)
            return []
        time.sleep(max(due_s, 0.0))
        self._next_ns = self._clock.monotonic_ns() + self._every_ns
        try:
            return [*self.scrape()]
        except BadPage:
            return []

    def status(self) -> SourceStatus:
        """Report how the scrapes went."""
        failures = f"{self.failed_scrapes} of {self.scrapes} scrapes failed; the last: {self.last_failure}"
        return SourceStatus(
            target=self.url,
            kind=TargetKind.METRICS,
            engines=tuple(map(str, list(self._samplers))),
            in_step=bool(self._samplers) and not self.failing,
            error=self.last_failure if self.failing else self._left_out() if self.left_out else "",
            skipped=self.failed_scrapes,
            last_seen_ns=self._last_ns,
            notes=tuple(
                filter(
                    None,
                    (
                        failures if self.failed_scrapes else "",
                        self._left_out() if self.left_out else "",
                        self._unused.note(),
                    ),
                )
            ),
        )

    def _left_out(self) -> str:
        return (
            f"{self.left_out:,} engines of the page are left out: {limits.PAGE_ENGINES} are read. A page whose labels"
            " are new at each scrape has too many"
        )

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def scrape(self) -> list[Sample | Fact]:
        """Return a sample of each engine, and its facts when it is first seen. Raises BadPage."""
        self.scrapes += 1
        at_ns = self._clock.time_ns()
        try:
            records = self._read(self._get(), at_ns)
        except BadPage as error:
            self.failing = True
            self.failed_scrapes += 1
            self.last_failure = str(error)
            raise
        self.failing = False
        self._last_ns = at_ns
        return records

    def _get(self) -> str:
        try:
            answer = self._client.ask("GET", self._address)
        except HttpTimeout as error:
            raise BadPage(
                f"{self.url} {error}. A busy front end can take seconds for a"
                " scrape: try a longer --timeout. A frozen one never answers: check with ps -o stat= -p PID"
            ) from error
        except HttpFailed as error:
            raise BadPage(f"{self.url} {error}: is an engine's server running there?") from error
        if not answer.is_success:
            message = f"{self.url} answers {status_text(answer.status)}"
            if answer.status == HTTPStatus.NOT_FOUND:
                message += ": an engine's page is at http://HOST:PORT/metrics"
            if answer.status // 100 == 3:
                message += ": kvscope follows no redirects: give the address that it leads to"
            raise BadPage(message)
        return answer.body.decode("utf-8", errors="replace")

    def _read(self, text: str, at_ns: int) -> list[Sample | Fact]:
        figures: dict[ExposedEngine, ExposedFigures] = {}
        buckets: dict[ExposedEngine, ExposedBuckets] = {}
        configurations: dict[str, dict[str, str]] = {}
        names = set()
        cpu_s: float | None = None
        try:
            for family in text_string_to_metric_families(text):
                for series in family.samples:
                    names.add(series.name)
                    if series.name == PROCESS_CPU:
                        cpu_s = series.value
                    engine = engine_of(series.labels, self._instance)
                    if series.name == CONFIGURATION:
                        configurations[engine.rank] = series.labels
                    if series.name in FIELDS:
                        put_figure(figures.setdefault(engine, {}), series.name, series.labels, series.value)
                    elif series.name in DURATIONS:
                        put_bucket(buckets.setdefault(engine, {}), series.name, series.labels, series.value)
        except (ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise BadPage(
                f"{self.url} is not a metrics page that Prometheus could read: {type(error).__name__} in it"
            ) from error
        if not any(figures.values()):
            raise BadPage(f"{self.url}: {NONE_VALID if figures else NONE_KNOWN}")
        position = f"scrape {self.scrapes}"
        records: list[Sample | Fact] = []
        for engine in [each for each, seen_ns in self._seen_ns.items() if at_ns - seen_ns > limits.GONE_S * 1e9]:
            self._samplers.pop(engine, None)
            del self._seen_ns[engine]
        self.left_out = 0
        for engine, values in figures.items():
            is_new = engine not in self._samplers
            too_long = len(str(engine)) > limits.ENGINE_NAME_CHARS
            if too_long or (is_new and len(self._samplers) >= limits.PAGE_ENGINES):
                self.left_out += 1
                continue
            self._seen_ns[engine] = at_ns
            put_process_cpu(values, cpu_s)
            if is_new:
                self._samplers[engine] = Sampler(engine, "metrics")
                records += facts_of(engine, position, dialect_of(names), configurations.get(engine.rank, {}))
                self._unused = unused_families(names)
                records += self._unused.facts(str(engine), position)
            records.append(self._samplers[engine].sample(at_ns, position, values, buckets.get(engine, {})))
        return records
