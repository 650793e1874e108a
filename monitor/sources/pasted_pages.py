"""Metrics pages in a text, as `curl …/metrics` prints them. Each is a sample of its engines, two or more with rates.

A page's time is the last one printed above it: by `date` in its default or ISO form, or a stamp of a line.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final

import msgspec

from ..contract.samples import Sample
from .exposition import FIELDS, ExposedEngine, ExposedFigures, Sampler, put_figure

_SERIES: Final = re.compile(
    r"((?:vllm|sglang|kvscope_engine):[a-z_]{3,80}|kvscope_engine_[a-z_]{3,80})(?:\{([^{}]{0,600})\})?"
    r" (-?\d{1,18}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)\s*$",
    re.ASCII,
)
LABEL: Final = re.compile(r'(\w{1,60})="([^"]{0,200})"')
_DATE: Final = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w{0,6},? (?P<month>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2})"
    r" (?P<time>\d\d:\d\d:\d\d) (?:UTC|GMT) (?P<year>\d{4})",
    re.ASCII,
)
MOST_PAGES: Final = 1_000


class PastedPages:
    """Pass it the lines of one text in their order, with their times, and ask for samples at the end."""

    def __init__(self) -> None:
        self._pages: deque[tuple[int, int | None, dict[str, ExposedFigures]]] = deque(maxlen=MOST_PAGES)
        self._seen: set[tuple[str, str]] = set()
        self._at_ns: int | None = None
        self.begun = 0
        """Pages of the text. The last MOST_PAGES of them are kept."""

    def line(self, number: int, text: str, at_ns: int | None) -> None:
        """Take a line. A series that the page has already begins another page."""
        if ":" not in text and "kvscope_" not in text:
            return
        series = _SERIES.match(text)
        if series is None:
            self._at_ns = at_ns if at_ns is not None else _printed_date(text) or self._at_ns
            return
        name, labels, value = series[1], series[2] or "", float(series[3])
        if name not in FIELDS:
            return
        if not self._pages or (name, labels) in self._seen:
            self._pages.append((number, self._at_ns, {}))
            self.begun += 1
            self._seen.clear()
            self._at_ns = None
        self._seen.add((name, labels))
        named = dict(LABEL.findall(labels))
        figures = self._pages[-1][2].setdefault(named.get("engine") or named.get("dp_rank") or "0", {})
        put_figure(figures, name, named, value)

    def __len__(self) -> int:
        return len(self._pages)

    def samples(self, name: str, engine_of: Callable[[str], str]) -> Iterator[Sample]:
        """Yield a sample of each engine on each page of the text `name`. `engine_of` returns the id of a rank."""
        samplers: dict[str, Sampler] = {}
        has_times = all(at_ns is not None for _, at_ns, _ in self._pages)
        for number, at_ns, engines in self._pages:
            for rank, figures in engines.items():
                sampler = samplers.setdefault(rank, Sampler(ExposedEngine("", "", rank), "log"))
                sample = sampler.sample(at_ns or 0, f"{name}:{number}", figures)
                yield msgspec.structs.replace(sample, engine=engine_of(rank), at_ns=at_ns if has_times else None)


def _printed_date(text: str) -> int | None:
    if (found := _DATE.search(text)) is None:
        return None
    printed = f"{found['year']} {found['month']} {found['day']} {found['time']} +0000"
    try:
        moment = datetime.strptime(printed, "%Y %b %d %H:%M:%S %z")
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000
