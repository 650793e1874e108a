"""How long requests waited for their first token and in the queue, and the point of a chart that carries it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Final

import msgspec

from ..contract.samples import DurationCount, Sample
from .engine_ledger import EngineLedger
from .first_token_pace import duration_quantile

LATENCY_OVER_S: Final = 300.0
"""The window over which the current latency of an engine is computed."""
MAX_RECENT_REQUESTS: Final = 1_000
"""The most ended requests in it, the latest: it is computed each time that somebody looks."""


class SlowView(msgspec.Struct, frozen=True):
    """Clients that wait longer than usual for their first token: half of the last requests `p50_s` seconds or longer,
    where 95 % of `usual_of` earlier ones waited at most `usual_p95_s`.
    """

    since: str | None
    p50_s: float
    usual_p95_s: float
    usual_of: int


class LatencyView(msgspec.Struct, frozen=True):
    """How long requests took, in seconds: half of them at most `p50_s`, 95 % at most `p95_s`. From metrics, within the
    bounds of the engine's histogram.
    """

    p50_s: float
    p95_s: float
    requests: int


def exact_latency(durations: Iterable[float], unit_s: float = 1.0) -> LatencyView | None:
    """Return the percentiles of these durations, which are in units of so many seconds, or None if there are none."""
    ordered = sorted(durations)
    if not ordered:
        return None
    p50_s, p95_s = (ordered[math.ceil(share * len(ordered)) - 1] * unit_s for share in (0.5, 0.95))
    return LatencyView(p50_s, p95_s, len(ordered))


def histogram_latency(counts: Iterable[DurationCount], within: LatencyView | None = None) -> LatencyView | None:
    """Return the percentiles of requests that are known by their histogram buckets, or None if there are none.

    within: of a duration that contains this one. A bucket is wide, and a part is not longer than the whole.
    """
    merged: Counter[tuple[float, float]] = Counter()
    for lower, upper, requests in counts:
        merged[lower, upper] += requests
    total = sum(merged.values())
    if not total:
        return None
    most_p50_s, most_p95_s = (within.p50_s, within.p95_s) if within is not None else (math.inf, math.inf)
    return LatencyView(duration_quantile(merged, 0.5, most_p50_s), duration_quantile(merged, 0.95, most_p95_s), total)


def sample_latency(samples: Sequence[Sample]) -> tuple[LatencyView | None, LatencyView | None]:
    """Return the time to the first token and the time in the queue of the requests that these samples count."""
    first_token = histogram_latency(one for sample in samples for one in sample.first_token_s or ())
    return first_token, histogram_latency((one for sample in samples for one in sample.queue_s or ()), first_token)


def recent_sample_latency(samples: Sequence[Sample]) -> tuple[LatencyView | None, LatencyView | None]:
    """Return the same of the last LATENCY_OVER_S."""
    since_ns = (samples[-1].at_ns or 0) - round(LATENCY_OVER_S * 1e9)
    recent = []
    for sample in reversed(samples):
        if (sample.at_ns or 0) <= since_ns:
            break
        recent.append(sample)
    return sample_latency(recent)


def recent_request_latency(ledger: EngineLedger) -> tuple[LatencyView | None, LatencyView | None]:
    """Return the same by the stream: of requests that got their first token, or were admitted first, in that time.

    A ledger that was joined later has those since then: it knows no request that had ended before.
    """
    oldest_ns = max(ledger.now_ns - round(LATENCY_OVER_S * 1e9), ledger.joined_ns) - ledger.clock.offset_ns
    since_ns = max(oldest_ns, 1)  # a time of 0 is not known
    first_tokens: list[int] = []
    admissions: list[int] = []
    for one in chain(islice(reversed(ledger.ended), MAX_RECENT_REQUESTS), ledger.state.requests.values()):
        if arrived_ns := one.arrived_ns:
            if one.admitted_ns >= since_ns:
                admissions.append(one.admitted_ns - arrived_ns)
            if one.first_token_ns >= since_ns:
                first_tokens.append(one.first_token_ns - arrived_ns)
    return exact_latency(first_tokens, 1e-9), exact_latency(admissions, 1e-9)


class PointView(msgspec.Struct, frozen=True):
    """The pool and the queues at a time in the past, in blocks and requests; preemptions, tokens, failed allocations
    and steps (`limits`: by the bound on their size) are sums since the engine began. `unused_tokens`: free room in the
    blocks of live requests, None where KV groups differ in what they keep. `usable`: blocks that requests could have.
    `usage`: the share of them in use. `epoch`: the start that sums count from (wall ns). `restarted`: the engine was
    started since the point before. From metrics, holders are not known. `first_token` and `queue_time`: of requests of
    the last minute, from metrics.
    """

    at: str
    at_ns: int
    free: int | None = None
    cached_idle: int | None = None
    running: int | None = None
    waiting: int | None = None
    finished: int | None = None
    reserved: int | None = None
    unaccounted: int | None = None
    requests_running: int | None = None
    requests_waiting: int | None = None
    preemptions: int | None = None
    output_tokens: int | None = None
    computed_tokens: int | None = None
    waiting_by_reason: dict[str, int] = {}
    allocation_failures: int = 0
    steps: int | None = None
    limits: dict[str, int] = {}
    unused_tokens: int | None = None
    usable: int | None = None
    usage: float | None = None
    epoch: int | None = None
    restarted: bool = False
    output_tokens_per_s: float | None = None
    computed_tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    first_token: LatencyView | None = None
    queue_time: LatencyView | None = None
