"""collapse.cache-flushed: prefixes that were needed are pushed out of the cache.

By one large prompt, or, while blocks lie free that hold nothing, by anybody. Confirmed by the event stream, which names
the request of every eviction; likely by KV events, for a large prompt alone, since these name contents and no requests.
What is evicted and never asked for again is no loss: this is what an LRU is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.cached_prefixes import Chain
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.evictions import Evictor
from kvscope.monitor.text import clock_time, counted, percent

CODE = "collapse.cache-flushed"
SOURCE = "kv-events"

_DO_NOW = ("Nothing is lost: the prefixes come back as they are asked for, at the price of computing them.",)
_CHANGE = (
    "Send such prompts to an engine of their own, or lower --max-model-len so that they are refused here.",
    "Give the pool room for both (a higher --gpu-memory-utilization, --kv-cache-memory-bytes), or an outer tier"
    " to fetch prefixes back from (--kv-transfer-config, or --kv-offloading-size where the version has it).",
)
_WONT_HELP = ("Restarting, or resetting the prefix cache: both flush all of it.",)


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """Who pushed out what."""
    if ledger.has_stream:
        evictors = _of_late(ledger, settings)
        yield from _by_one_prompt(ledger, settings, evictors)
        yield from _needlessly(ledger, settings, evictors)
    elif ledger.prefixes.stored:
        yield from _by_kv_events(ledger, settings)


def _is_loss(evicted: int, kept_before: int, missed: int, settings: Settings) -> bool:
    """Whether one prompt evicted much of what was kept, and enough of that was needed again."""
    return (
        evicted >= settings(CODE, "min_share") * max(kept_before, 1)
        and missed >= settings(CODE, "min_blocks")
        and missed >= settings(CODE, "min_missed") * evicted
    )


# -------------------------------------------------------------------- from the stream


def _of_late(ledger: EngineLedger, settings: Settings) -> list[Evictor]:
    since = ledger.now_ns - settings(CODE, "remember_s") * 1e9
    evictions = ledger.state.evictions
    culprits = reversed(evictions.culprits if evictions else ())
    return list(takewhile(lambda one: ledger.wall(one.at_ns) >= since, culprits))[::-1]


def _by_one_prompt(ledger: EngineLedger, settings: Settings, evictors: list[Evictor]) -> Iterator[Judgement]:
    usable = max(1, ledger.state.total - ledger.state.reserved)
    flushes = [
        one
        for one in evictors
        if _is_loss(one.evicted, one.cached_before, one.missed, settings)
        and one.cached_before >= settings(CODE, "min_cache") * usable
    ]
    if not flushes:
        return
    worst = max(flushes, key=lambda one: one.missed)
    yield Judgement(
        code=CODE,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        since_ns=ledger.wall(min(one.at_ns for one in flushes)),
        position=ledger.at(min(flushes, key=lambda one: one.at_ns).at),
        requests=tuple(one.id for one in flushes),
        evidence=(
            Evidence("blocks_cached_idle_before", worst.cached_before, "blocks", position=ledger.at(worst.at)),
            Evidence("blocks_it_evicted", worst.evicted, "blocks", position=ledger.at(worst.evicted_at)),
            Evidence("of_these_computed_again", worst.missed, "blocks", position=ledger.at(worst.missed_at)),
            Evidence("flushes_seen", len(flushes), "times", position=ledger.at(*(one.missed_at for one in flushes))),
        ),
        explanation=(
            f"From {clock_time(ledger.wall(worst.at_ns))} on request {worst.id} pushed out {worst.evicted:,} of the"
            f" {counted(worst.cached_before, 'block')} that were kept for their prefixes, and"
            f" {counted(worst.missed, 'block')} of these had to be computed again since. Seen"
            f" {counted(len(flushes), 'time')}."
        ),
        do_now=_DO_NOW,
        change=_CHANGE,
        wont_help=_WONT_HELP,
        missing="the events that were lost" if ledger.state.damaged else "",
    )


def _needlessly(ledger: EngineLedger, settings: Settings, evictors: list[Evictor]) -> Iterator[Judgement]:
    usable = max(1, ledger.state.total - ledger.state.reserved)
    needless = [one for one in evictors if one.unused >= settings(CODE, "min_unused") * usable]
    missed = sum(one.missed for one in needless)
    if missed < settings(CODE, "min_blocks"):
        return
    least = min(needless, key=lambda one: one.unused)
    unused, evicted_at = least.unused, ledger.at(*(one.evicted_at for one in needless))
    yield Judgement(
        code=CODE,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        key="needless",
        since_ns=ledger.wall(needless[0].at_ns),
        position=ledger.at(needless[0].at),
        requests=tuple(one.id for one in needless),
        evidence=(
            Evidence("requests_that_evicted", len(needless), "requests", position=evicted_at),
            Evidence("blocks_they_evicted", sum(one.evicted for one in needless), "blocks", position=evicted_at),
            Evidence(
                "of_these_computed_again", missed, "blocks", position=ledger.at(*(one.missed_at for one in needless))
            ),
            Evidence("least_free_and_empty_then", unused, "blocks", position=ledger.at(least.unused_at)),
            Evidence(
                "share_free_and_empty_then",
                round(unused / usable, 4),
                "of the pool",
                position=ledger.at(least.unused_at),
            ),
        ),
        explanation=(
            f"Since {clock_time(ledger.wall(needless[0].at_ns))} {counted(len(needless), 'request')} pushed prefixes"
            f" out of the cache while {percent(unused / usable)} of the pool, or more, lay free with nothing in it:"
            f" {counted(missed, 'block')} of them had to be computed again. Blocks that hold prefixes are handed out"
            " before those that hold nothing."
        ),
        do_now=_DO_NOW,
        change=(
            "vLLM before 0.24: upgrade; since then blocks without content are handed out first (pull request 42656).",
        ),
        wont_help=(*_WONT_HELP, "More KV memory: there is room, and it is not used first."),
        missing="the events that were lost" if ledger.state.damaged else "",
    )


# -------------------------------------------------------------------- from KV events


def _by_kv_events(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    flushes = [chain for chain in ledger.prefixes.culprits if _is_flush(chain, ledger, settings)]
    if not flushes:
        return
    first, worst = min(flushes, key=lambda chain: chain.began_ns), max(flushes, key=lambda chain: chain.missed)
    yield Judgement(
        code=CODE,
        engine=ledger.engine,
        verdict="likely",
        since_ns=first.began_ns,
        position=first.position,
        evidence=(
            Evidence("blocks_kept_before", worst.kept_before, "blocks", SOURCE, worst.position),
            Evidence("blocks_of_the_prompt", worst.stored, "blocks", SOURCE, worst.position),
            Evidence("blocks_it_evicted", worst.evicted, "blocks", SOURCE, worst.position),
            Evidence("of_these_computed_again", worst.missed, "blocks", SOURCE),
            Evidence("flushes_seen", len(flushes), "times", SOURCE),
        ),
        explanation=(
            f"At {clock_time(worst.began_ns)} one prompt of {counted(worst.stored, 'block')} pushed out"
            f" {worst.evicted:,} of the {worst.kept_before:,} blocks that were kept for their prefixes, and"
            f" {counted(worst.missed, 'block')} of these had to be computed again since. Seen"
            f" {counted(len(flushes), 'time')}."
        ),
        do_now=_DO_NOW,
        change=_CHANGE,
        wont_help=_WONT_HELP,
        missing=(
            "which request it was, and whom the misses hit: the event stream names the request of every eviction; KV"
            " events name contents only"
        ),
    )


def _is_flush(chain: Chain, ledger: EngineLedger, settings: Settings) -> bool:
    is_recent = ledger.now_ns - chain.began_ns <= settings(CODE, "remember_s") * 1e9
    return is_recent and _is_loss(chain.evicted, chain.kept_before, chain.missed, settings)
