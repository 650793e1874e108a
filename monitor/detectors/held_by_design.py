"""What fills the pool and is no leak, said so that nobody goes looking for one. Information, never above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvscope.monitor.analysis.memory_breakdown import GIB, NoBill, bill_of, measured
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, duration, percent

PREFIX_CACHE = "held.prefix-cache"
POOL_RESERVED = "held.pool-reserved"
LONG_REQUEST = "held.long-request"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is held for good reason in one engine."""
    if ledger.has_stream and ledger.state.total > ledger.state.reserved:
        yield from _prefix_cache(ledger, settings)
        yield from _long_request(ledger, settings)
    yield from _pool_reserved(ledger, settings)


def _prefix_cache(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    usable = state.total - state.reserved
    share = state.cached_idle / usable
    if share < settings(PREFIX_CACHE, "min_share"):
        return
    totals = state.totals
    hit_rate = totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else 0.0
    yield Judgement(
        code=PREFIX_CACHE,
        engine=ledger.engine,
        verdict="confirmed",
        position=ledger.at(state.places.pool),
        evidence=(
            Evidence("cached_idle_blocks", state.cached_idle, "blocks", position=ledger.at(state.places.pool)),
            Evidence("share_of_pool", round(share, 4), "of the pool", position=ledger.at(state.places.pool)),
            Evidence(
                "prefix_hit_rate", round(hit_rate, 4), "of the tokens", position=ledger.at(state.places.looked_up)
            ),
        ),
        explanation=(
            f"{counted(state.cached_idle, 'block')} ({percent(share)} of the pool) hold prefixes that no request"
            " uses now. They are evictable at once and count as free: this is a warm cache, not a leak. It has served"
            f" {percent(hit_rate)} of the prompt tokens asked for."
        ),
    )


class _Reserved(NamedTuple):
    """What the bill says of the pool, in bytes, and where it was read."""

    kv_pool: int
    device_total: int
    source: str
    position: str


def _pool_reserved(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    bill = _of_stream(ledger) if ledger.has_stream else _of_log(ledger)
    if bill is None or bill.kv_pool < settings(POOL_RESERVED, "min_share") * bill.device_total:
        return
    share = bill.kv_pool / bill.device_total
    yield Judgement(
        code=POOL_RESERVED,
        engine=ledger.engine,
        verdict="confirmed",
        position=bill.position,
        evidence=(
            Evidence("kv_pool", bill.kv_pool, "bytes", bill.source, bill.position),
            Evidence("device_total", bill.device_total, "bytes", bill.source, bill.position),
            Evidence("share_of_device", round(share, 4), "of the device", bill.source, bill.position),
        ),
        explanation=(
            f"The KV pool is {bill.kv_pool / GIB:.2f} GiB, {percent(share)} of the device, and was taken at the start"
            " in one piece: the process has as much of the device while it is idle as under load, and gives none of it"
            " back. How much of the pool is in use is another figure, KV cache usage."
        ),
        change=("If others need room: a lower --gpu-memory-utilization, or --kv-cache-memory-bytes, at the start.",),
    )


def _of_stream(ledger: EngineLedger) -> _Reserved | None:
    known = measured(ledger.state.memory)
    if not known.get("device_total") or "kv_pool" not in known:
        return None
    return _Reserved(known["kv_pool"], known["device_total"], "stream", ledger.at(ledger.state.places.memory))


def _of_log(ledger: EngineLedger) -> _Reserved | None:
    try:
        bill, _ = bill_of(ledger.facts.values())
    except NoBill:
        return None
    if bill.kv_cache is None:
        return None
    return _Reserved(bill.kv_cache, bill.device_total, "log", ledger.facts["memory_total_gib"].position)


def _long_request(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    usable = state.total - state.reserved
    for record in state.requests.values():
        share = len(record.blocks) / usable
        if (
            not record.is_running
            or share < settings(LONG_REQUEST, "min_share")
            or ledger.age_s(record.admitted_ns) < settings(LONG_REQUEST, "min_age_s")
            or ledger.age_s(record.progressed_ns) > settings(LONG_REQUEST, "min_age_s")
        ):
            continue
        yield Judgement(
            code=LONG_REQUEST,
            engine=ledger.engine,
            key=record.id,
            verdict="confirmed",
            since_ns=ledger.wall(record.admitted_ns),
            position=ledger.at(record.since_at),
            requests=(record.id,),
            evidence=(
                Evidence("blocks_held", len(record.blocks), "blocks", position=ledger.at(state.places.pool)),
                Evidence("share_of_pool", round(share, 4), "of the pool", position=ledger.at(state.places.pool)),
                Evidence(
                    "computed_tokens", record.computed_tokens, "tokens", position=ledger.at(state.places.progressed)
                ),
                Evidence("output_tokens", record.output_tokens, "tokens", position=ledger.at(state.places.progressed)),
            ),
            explanation=(
                f"Request {record.id} holds {counted(len(record.blocks), 'block')} ({percent(share)} of the pool) and"
                f" needs them: it has run for {duration(ledger.age_s(record.admitted_ns))}, has"
                f" {counted(record.computed_tokens, 'token')} computed and goes on. They come back when it ends."
            ),
        )
