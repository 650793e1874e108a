"""A metrics page of an engine in virtual time, read as a scraped one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvscope.monitor.events.samples import Record
from kvscope.monitor.sources.metrics_page import MetricsPage

FAMILY_BEGINS: Final = "\n# HELP "
FAMILIES_KEPT: Final = 2_048


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
        """Parse a page, the text of each family only once. Most families stay as they are from scrape to scrape."""
        beginning, *families = text.split(FAMILY_BEGINS)
        yield from text_string_to_metric_families(beginning)
        for family in families:
            yield from _parsed_family(FAMILY_BEGINS + family)


@lru_cache(FAMILIES_KEPT)
def _parsed_family(text: str) -> tuple[Metric, ...]:
    return tuple(text_string_to_metric_families(text))


def pages_as_records(pages: Sequence[tuple[int, str]]) -> Iterator[Record]:
    """Yield the samples and facts of pages, each with its wall time in ns."""
    clock = ScrapeClock()
    source = KeptPages(clock)
    try:
        for clock.ns, source.text in pages:
            yield from source.scrape()
    finally:
        source.close()
