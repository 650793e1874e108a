"""A metrics page of an engine in virtual time, read as a scraped one is.

Names and labels of series are formatted and parsed once, not at each scrape: that took a third of a long run's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Series

from kvscope.monitor.contract.samples import Record
from kvscope.monitor.sources.metrics_page import MetricsPage

SERIES_KEPT: Final = 4_096


def page_of(families: Iterable[Metric]) -> str:
    """Return the page: one line for each series, and none of help or type."""
    return "".join(
        f"{_series_text(series.name, tuple(series.labels.items()))} {float(series.value)!r}\n"
        for family in families
        for series in family.samples
    )


@lru_cache(SERIES_KEPT)
def _series_text(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Return a series' name and labels as the library writes them."""
    family = Metric(name, "", "untyped")
    family.add_sample(name, dict(labels), 0)
    registry = CollectorRegistry()
    registry.register(_OneFamily(family))
    return generate_latest(registry).decode().splitlines()[-1].rpartition(" ")[0]


class _OneFamily:
    """A collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> list[Metric]:
        """Return it."""
        return [self._family]


class ScrapeClock:
    """The wall time of the page that is read."""

    def __init__(self) -> None:
        self.ns = 0

    def monotonic_ns(self) -> int:
        """Return the same as wall time."""
        return self.ns

    def time_ns(self) -> int:
        """When the page was scraped."""
        return self.ns


class KeptPages(MetricsPage):
    """Reads pages that were kept as text, instead of fetching them."""

    def __init__(self, clock: ScrapeClock) -> None:
        super().__init__("http://127.0.0.1:8000/metrics", clock=clock)
        self.text = ""

    def _get(self) -> str:
        return self.text

    def _families(self, text: str) -> Iterable[Metric]:
        """Return one family with all series of the page."""
        page = Metric("page", "", "untyped")
        lines = [line.rpartition(" ") for line in text.split("\n") if line]
        page.samples = [Series(*_parsed_series(series), float(value)) for series, _, value in lines]
        return [page]


@lru_cache(SERIES_KEPT)
def _parsed_series(text: str) -> tuple[str, dict[str, str]]:
    """Return a series' name and labels as the library reads them."""
    (family,) = text_string_to_metric_families(f"{text} 0\n")
    (series,) = family.samples
    return series.name, series.labels


def pages_as_records(pages: Sequence[tuple[int, str]]) -> Iterator[Record]:
    """Yield the samples and facts of pages, each with its wall time in ns."""
    clock = ScrapeClock()
    source = KeptPages(clock)
    try:
        for clock.ns, source.text in pages:
            yield from source.scrape()
    finally:
        source.close()
