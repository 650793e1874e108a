"""A prefix cache hit rate that fell far below the engine's own level: collapse.prefix-hits from metrics.

A fall alone does not show why. Where requests became longer or shorter, or far fewer, the load changed and nothing is
reported. Otherwise the finding names the causes that remain, and the verdict is cannot-tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvscope.monitor.detectors.arrival_rates import moved
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.stuck.sample_windows import scrape_interval_s
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, duration, percent

CELL_S: Final = 60.0
"""Hit rates are compared minute by minute: the longest usual scrape interval."""
CELLS_COMPARED: Final = 120
SPACING: Final = 0.9
"""Scrapes a little closer together than a cell still bound one."""
HIT_RATE_SPAN_S = Threshold(
    900, "s", "where only metrics are known: ten minutes of the level before, and five, a third of it, of the new one"
)
MIN_HIT_LEVEL = Threshold(0.2, "of the tokens", "a lower level of hits comes and goes with single prompts")
MAX_HIT_SHARE_LEFT = Threshold(0.25, "of the level", "where only metrics are known: a mix of loads shifts by less")
MIN_LOOKED_UP = Threshold(1000, "tokens", "looked up in a minute: fewer are one prompt")
SAME_LOAD = Threshold(
    1.5, "times", "tokens looked up for each request, and requests a minute, of one load vary by less"
)
PREFIX_HITS_NEED = SampleNeed(16, HIT_RATE_SPAN_S, "ten minutes at one hit rate, then five at a quarter of it or less")


class HitCell(NamedTuple):
    """About a minute of look-ups. looked_up: tokens. requests: that ended, -1 where not exposed."""

    first: Sample
    last: Sample
    looked_up: int
    rate: float
    requests: int

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return apart_s(self.first, self.last) or 0.0


def hit_cells(samples: Sequence[Sample]) -> list[HitCell]:
    """Return the samples as cells of a minute or a scrape interval, those without look-ups left out."""
    marks: list[Sample] = []
    for sample in reversed(samples):
        if marks and not _is_apart(sample, marks[-1]):
            continue
        if sample.at_ns is None or (sample.prefix_queries is None and sample.prefix_hit_rate is None):
            break
        marks.append(sample)
        if len(marks) > CELLS_COMPARED:
            break
    marks.reverse()
    cells = (_hit_cell(one, two) for one, two in pairwise(marks))
    return [cell for cell in cells if cell is not None]


def _is_apart(sample: Sample, later: Sample) -> bool:
    return sample.at_ns is None or later.at_ns is None or later.at_ns - sample.at_ns >= SPACING * CELL_S * 1e9


def _hit_cell(first: Sample, last: Sample) -> HitCell | None:
    requests = moved(first.finished, last.finished) if last.finished is not None else -1
    if first.prefix_queries is not None and last.prefix_queries is not None:
        looked_up = moved(first.prefix_queries, last.prefix_queries)
        rate = moved(first.prefix_hits, last.prefix_hits) / looked_up if looked_up > 0 else 0.0
    else:  # SGLang exposes the rate of its last batch, and tokens of prompts
        looked_up = round((last.prompt_tokens_per_s or 0.0) * (apart_s(first, last) or 0.0))
        rate = last.prefix_hit_rate or 0.0
    return HitCell(first, last, looked_up, rate, requests) if looked_up > 0 else None


class HitRateDrop(NamedTuple):
    """Cells before the hit rate fell, and since."""

    before: list[HitCell]
    since: list[HitCell]

    @property
    def level(self) -> float:
        """The hit rate before."""
        return statistics.median(cell.rate for cell in self.before)


def hit_rate_drop(samples: Sequence[Sample], settings: Settings) -> HitRateDrop | None:
    """Return the fall, if there is one and the load is the same as before."""
    if not samples or samples[-1].source == "log":
        return None  # vLLM's line has the mean of the last thousand requests
    cells = [cell for cell in hit_cells(samples) if cell.looked_up >= settings(MIN_LOOKED_UP) * cell.seconds / CELL_S]
    needed_since = round(settings(HIT_RATE_SPAN_S) / CELL_S / 3)
    if len(cells) < 3 * needed_since:
        return None
    high = sorted(cell.rate for cell in cells)[3 * len(cells) // 4]
    most = settings(MAX_HIT_SHARE_LEFT) * high
    start = len(cells)
    while start > 0 and cells[start - 1].rate <= most:
        start -= 1
    drop = HitRateDrop(cells[:start], cells[start:])
    if len(drop.since) < needed_since or len(drop.before) < 2 * needed_since:
        return None
    lowest_before = sorted(cell.rate for cell in drop.before)[len(drop.before) // 10]
    steady = lowest_before >= drop.level / 2 and drop.level >= settings(MIN_HIT_LEVEL)
    return drop if steady and _is_same_load(drop, settings(SAME_LOAD)) else None


def _is_same_load(drop: HitRateDrop, factor: float) -> bool:
    """Whether requests are as long and as many as before, as far as their number is exposed."""
    if any(cell.requests < 0 for cell in (*drop.before, *drop.since)):
        return True
    ratios = []
    for measure in (_tokens_each, _requests_a_second):
        before, since = measure(drop.before), measure(drop.since)
        ratios.append(max(before, since) / max(min(before, since), 1e-9))
    return all(ratio <= factor for ratio in ratios)


def _tokens_each(cells: Sequence[HitCell]) -> float:
    return sum(cell.looked_up for cell in cells) / max(sum(cell.requests for cell in cells), 1)


def _requests_a_second(cells: Sequence[HitCell]) -> float:
    return sum(cell.requests for cell in cells) / max(sum(cell.seconds for cell in cells), 1.0)


def prefix_hits_by_samples(
    ledger: EngineLedger, code: str, settings: Settings, change: tuple[str, ...], wont_help: tuple[str, ...]
) -> Judgement | None:
    """Return what the counters show, or None if the hit rate did not fall."""
    drop = hit_rate_drop(ledger.samples, settings)
    if drop is None:
        return None
    began, last = drop.since[0].first, drop.since[-1].last
    looked_up = sum(cell.looked_up for cell in drop.since)
    now = sum(cell.rate * cell.looked_up for cell in drop.since) / looked_up
    requests = sum(cell.requests for cell in drop.since) if drop.since[0].requests >= 0 else None
    as_before = (
        "How many requests that were is not exposed. "
        if requests is None
        else f"{counted(requests, 'request')} ended meanwhile, about as many a minute and as long as before. "
    )
    source, span = last.source, f"{began.position} to {last.position}"
    return Judgement(
        code=code,
        engine=ledger.engine,
        verdict="cannot-tell",
        since_ns=began.at_ns or 0,
        position=began.position,
        evidence=(
            Evidence("hit_rate_before", round(100 * drop.level, 1), "%", source, f"until {began.position}"),
            Evidence("hit_rate", round(100 * now, 1), "%", source, span),
            Evidence("tokens_looked_up", looked_up, "tokens", source, span),
            Evidence("requests_finished", "not exposed" if requests is None else requests, "requests", source, span),
            Evidence("usage", round(100 * (last.usage or 0.0), 1), "%", source, last.position),
        ),
        explanation=(
            f"Since {clock_time(began.at_ns or 0)} the prefix cache hits {percent(now)} of the tokens that are"
            f" looked up, after {percent(drop.level)} in the {duration(sum(cell.seconds for cell in drop.before))}"
            f" before. {as_before}Possible causes: prompts of the same length that share no prefix (another tenant,"
            " a router that no longer sends similar prompts here), prefixes evicted before their next use, or"
            " lookups that miss what the cache has."
        ),
        do_now=("Send one prompt twice with nothing else running. If the second is no faster, the cache never hits.",),
        change=change,
        wont_help=wont_help,
        missing="what the cache holds and what is looked up: KV events (monitor doctor"
        " http://HOST:8000/kv_event_sources) or the event stream."
        f" {PREFIX_HITS_NEED.text(settings, scrape_interval_s(list(ledger.samples)))}",
    )
