"""What fills the pool and is no leak, said so that nobody goes looking for one. Information, never above."""

from __future__ import annotations

from collections.abc import Iterator

from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import counted, duration, percent

PREFIX_CACHE = "held.prefix-cache"
LONG_REQUEST = "held.long-request"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is held for good reason in one engine."""
    if ledger.has_stream and ledger.state.total > ledger.state.reserved:
        yield from _prefix_cache(ledger, settings)
        yield from _long_request(ledger, settings)


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
        position=str(ledger.position()),
        evidence=(
            Evidence("cached_idle_blocks", state.cached_idle, "blocks"),
            Evidence("share_of_pool", round(share, 4), "of the pool"),
            Evidence("prefix_hit_rate", round(hit_rate, 4), "of the tokens"),
        ),
        explanation=(
            f"{counted(state.cached_idle, 'block')} ({percent(share)} of the pool) hold prefixes that no request"
            " uses now. They are evictable at once and count as free: this is a warm cache, not a leak. It has served"
            f" {percent(hit_rate)} of the prompt tokens asked for."
        ),
    )


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
            position=str(ledger.position()),
            requests=(record.id,),
            evidence=(
                Evidence("blocks_held", len(record.blocks), "blocks"),
                Evidence("share_of_pool", round(share, 4), "of the pool"),
                Evidence("computed_tokens", record.computed_tokens, "tokens"),
                Evidence("output_tokens", record.output_tokens, "tokens"),
            ),
            explanation=(
                f"Request {record.id} holds {counted(len(record.blocks), 'block')} ({percent(share)} of the pool) and"
                f" needs them: it has run for {duration(ledger.age_s(record.admitted_ns))}, has"
                f" {counted(record.computed_tokens, 'token')} computed and goes on. They come back when it ends."
            ),
        )
