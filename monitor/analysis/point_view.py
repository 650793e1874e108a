"""A point of a chart, as the API has it."""

from __future__ import annotations

import msgspec

from kvscope.monitor.analysis.request_latency import LatencyView


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
