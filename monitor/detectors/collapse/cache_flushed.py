"""collapse.cache-flushed: prefixes that were needed are pushed out of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from statistics import median

from ...base.text import clock_time, counted, percent
from ...ledger.cached_prefixes import Chain
from ...ledger.engine_ledger import EngineLedger
from ...ledger.prefix_reuse import Evictor
from ..detector import FromKvEvents, Known, Settings, StreamDetector, Threshold
from ..judgement import Alternative, Evidence, Judgement, seen
from ..preemptions import point_at
from .prefix_hits import KV_EVENTS

EVICTION_ORDER = "the order in which this cache evicts: where the least recently used goes first, its size is the cause"


class CacheFlushed(StreamDetector[Judgement]):
    """Evictions of prefixes that were needed again.

    Sees: one prompt that evicted half of what the prefix cache kept, or prompts that evicted prefixes while blocks
    without content were free, and evicted blocks that had to be computed again.
    Confirmed when: the event stream names who evicted them, and that they were computed again.
    Likely when: less was evicted, but would still be cached had the prompt been no larger than those that missed it:
    that holds where the least recently used goes first. Or events were lost.
    Not when: no request asks for the prefixes again; live requests need the pool.
    """

    code = "collapse.cache-flushed"
    severity = "warning"
    title = "Cached prefixes are evicted while they are still needed"
    recurs = True

    min_share = Threshold(0.5, "of the kept", "a prompt that evicts less leaves most prefixes in place")
    min_missed = Threshold(
        0.1, "of the evicted", "prefixes that no request asks for again are no loss: this is what an LRU is for"
    )
    min_blocks = Threshold(
        64, "blocks", "1,024 tokens in vLLM's blocks of 16 are computed again in about a tenth of a second"
    )
    min_tokens = Threshold(
        1024, "tokens", "in larger blocks, fewer of them take as long, while enough that hold nothing were there"
    )
    min_recomputed = Threshold(
        0.01, "of the computed since", "of less work that is done again, a client notices nothing in its latency"
    )
    min_pool_share = Threshold(
        0.1, "of the pool", "no prompt evicts half of a large pool: so much computed again is minutes of prefill there"
    )
    min_needed = Threshold(0.9, "of the evicted", "a smaller part of the pool counts if nearly all of it was needed")
    min_times_larger = Threshold(
        4, "times", "prompts of a load that are all as large push out one another: that is a cache too small for them"
    )
    min_cache = Threshold(
        0.5, "of the pool", "where less was cached and idle, live requests need the pool, and prefixes give way"
    )
    min_unused = Threshold(0.1, "of the pool", "a few blocks without content lie somewhere in every free queue")
    remember_s = Threshold(600, "s", "large prompts that arrive minutes apart belong to the same incident")
    alternatives = (
        Alternative("prefixes that no request asks for", "evicted blocks were recomputed"),
        Alternative("live requests that need the pool", "the share of the pool that was cached and idle"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield which prompts evicted what was needed."""
        evictors = self._recent_evictors(ledger, settings)
        yield from self._by_one_prompt(ledger, settings, evictors)
        yield from self._needlessly(ledger, settings, evictors)

    def _is_loss(self, evicted: int, kept_before: int, missed: int, settings: Settings) -> bool:
        """Whether one prompt evicted much of what was kept, and enough of that was needed again."""
        return (
            evicted >= settings(self.min_share) * max(kept_before, 1)
            and missed >= settings(self.min_blocks)
            and missed >= settings(self.min_missed) * evicted
        )

    def _is_for_its_size(self, ledger: EngineLedger, one: Evictor, usable: int, settings: Settings) -> bool:
        """Whether enough that prompts missed would be cached had it evicted no more than such a prompt takes."""
        enough = min(settings(self.min_blocks), settings(self.min_pool_share) * usable)
        return one.for_its_size >= enough and self._is_felt(ledger, ledger.wall(one.at_ns), one.for_its_size, settings)

    def _is_felt(self, ledger: EngineLedger, began_ns: int, missed: int, settings: Settings) -> bool:
        """Whether so many blocks are a part of all that was computed since then (wall)."""
        computed = ledger.state.totals.computed_tokens - point_at(ledger, began_ns).computed_tokens
        return missed * ledger.state.block_size >= max(settings(self.min_recomputed) * computed, 1)

    def _is_large_loss(self, ledger: EngineLedger, one: Evictor, usable: int, settings: Settings) -> bool:
        """Whether one prompt, much larger than those of the load, evicted a part of a large pool that was needed."""
        needed = max(settings(self.min_pool_share) * usable, settings(self.min_needed) * one.evicted)
        if one.missed < max(needed, settings(self.min_blocks)):
            return False
        prompts = [record.prompt_tokens for record in (*ledger.ended, *ledger.state.requests.values())]
        typical = median(prompts) / max(ledger.state.block_size, 1) if prompts else 0.0
        return one.evicted >= settings(self.min_times_larger) * typical

    def _recent_evictors(self, ledger: EngineLedger, settings: Settings) -> list[Evictor]:
        since = ledger.now_ns - settings(self.remember_s) * 1e9
        evictions = ledger.state.evictions
        culprits = reversed(evictions.culprits if evictions else ())
        return list(takewhile(lambda one: ledger.wall(one.at_ns) >= since, culprits))[::-1]

    def _by_one_prompt(self, ledger: EngineLedger, settings: Settings, evictors: list[Evictor]) -> Iterator[Judgement]:
        usable = max(1, ledger.state.total - ledger.state.reserved)
        most_evicted = [
            one
            for one in evictors
            if one.cached_before >= settings(self.min_cache) * usable
            and (
                self._is_loss(one.evicted, one.cached_before, one.missed, settings)
                or self._is_large_loss(ledger, one, usable, settings)
            )
            and self._is_felt(ledger, ledger.wall(one.at_ns), one.missed, settings)
        ]
        by_size = [one for one in evictors if self._is_for_its_size(ledger, one, usable, settings)]
        flushes = most_evicted or by_size
        if not flushes:
            return
        missing = "the lost events" if ledger.state.damaged else "" if most_evicted else EVICTION_ORDER
        worst = max(flushes, key=lambda one: one.missed)
        yield self.finding(
            ledger,
            since_ns=ledger.wall(min(one.at_ns for one in flushes)),
            position=ledger.at(min(flushes, key=lambda one: one.at_ns).at),
            requests=tuple(one.id for one in flushes),
            evidence=(
                seen("blocks_cached_idle_before", worst.cached_before, "blocks", ledger.at(worst.at)),
                seen("blocks_evicted_by_prompt", worst.evicted, "blocks", ledger.at(worst.evicted_at)),
                seen("evicted_blocks_recomputed", worst.missed, "blocks", ledger.at(worst.missed_at)),
                seen("flushes_seen", len(flushes), "times", ledger.at(*(one.missed_at for one in flushes))),
                *_size_evidence(ledger, worst),
            ),
            explanation=(
                f"From {clock_time(ledger.wall(worst.at_ns))} on request {worst.id} evicted {worst.evicted:,} of"
                f" {counted(worst.cached_before, 'block')} that the prefix cache kept. Since then,"
                f" {counted(worst.missed, 'block')} of these had to be recomputed."
                + (
                    f" {worst.for_its_size:,} would still be cached had it been no larger than the prompts that missed"
                    " them."
                    if worst.for_its_size
                    else ""
                )
                + f" Seen {counted(len(flushes), 'time')}."
            ),
            missing=missing,
        )

    def _needlessly(self, ledger: EngineLedger, settings: Settings, evictors: list[Evictor]) -> Iterator[Judgement]:
        usable = max(1, ledger.state.total - ledger.state.reserved)
        needless = [one for one in evictors if one.unused >= settings(self.min_unused) * usable]
        missed = sum(one.missed for one in needless)
        enough = min(settings(self.min_blocks), settings(self.min_tokens) / max(ledger.state.block_size, 1))
        if not missed or missed < enough:
            return
        if not self._is_felt(ledger, ledger.wall(needless[0].at_ns), missed, settings):
            return
        least = min(needless, key=lambda one: one.unused)
        unused, evicted_at = least.unused, ledger.at(*(one.evicted_at for one in needless))
        yield self.finding(
            ledger,
            key="needless",
            since_ns=ledger.wall(needless[0].at_ns),
            position=ledger.at(needless[0].at),
            requests=tuple(one.id for one in needless),
            evidence=(
                seen("requests_evicting", len(needless), "requests", evicted_at),
                seen("blocks_evicted_by_requests", sum(one.evicted for one in needless), "blocks", evicted_at),
                seen("evicted_blocks_recomputed", missed, "blocks", ledger.at(*(one.missed_at for one in needless))),
                seen("min_empty_blocks", unused, "blocks", ledger.at(least.unused_at)),
                seen("min_empty_share", round(unused / usable, 4), "of the pool", ledger.at(least.unused_at)),
            ),
            explanation=(
                f"Since {clock_time(ledger.wall(needless[0].at_ns))} {counted(len(needless), 'request')} evicted cached"
                f" prefixes while at least {percent(unused / usable)} of the pool was free and empty:"
                f" {counted(missed, 'block')} had to be recomputed. The engine hands out blocks that hold prefixes"
                " before empty ones."
            ),
            case="If empty blocks were free",
            missing="the lost events" if ledger.state.damaged else "",
        )


def _size_evidence(ledger: EngineLedger, one: Evictor) -> tuple[Evidence, ...]:
    if not one.for_its_size:
        return ()
    place = ledger.at(one.for_its_size_at)
    return (seen("recomputed_for_its_size", one.for_its_size, "blocks", place),)


class CacheFlushedFromKvEvents(FromKvEvents, CacheFlushed):
    """One large prompt that evicted what was stored again afterwards.

    Sees: KV events by which one prompt evicted half of what the cache kept, and much of that was stored again.
    Likely when: always, since KV events name contents and no requests.
    Not when: hardly any of it is stored again.
    """

    def applies(self, known: Known) -> bool:
        """Whether there are KV events, and no event stream, which shows more."""
        return super().applies(known) and not known.stream

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the prompts after which much was stored again."""
        flushes = [chain for chain in ledger.prefixes.culprits if self._is_flush(chain, ledger, settings)]
        if not flushes:
            return
        first, worst = min(flushes, key=lambda chain: chain.began_ns), max(flushes, key=lambda chain: chain.missed)
        yield self.finding(
            ledger,
            since_ns=first.began_ns,
            position=first.position,
            evidence=(
                Evidence("cached_blocks_before", worst.kept_before, "blocks", KV_EVENTS, worst.position),
                Evidence("prompt_blocks", worst.stored, "blocks", KV_EVENTS, worst.position),
                Evidence("blocks_evicted_by_prompt", worst.evicted, "blocks", KV_EVENTS, worst.position),
                Evidence("evicted_blocks_recomputed", worst.missed, "blocks", KV_EVENTS),
                Evidence("flushes_seen", len(flushes), "times", KV_EVENTS),
            ),
            explanation=(
                f"At {clock_time(worst.began_ns)} one prompt of {counted(worst.stored, 'block')} evicted"
                f" {worst.evicted:,} of {worst.kept_before:,} blocks that the prefix cache kept. Since then,"
                f" {counted(worst.missed, 'block')} of these had to be recomputed. Seen"
                f" {counted(len(flushes), 'time')}."
            ),
            missing=(
                "the request that evicted them and the requests that missed: the event stream names both, KV events"
                " name contents only"
            ),
        )

    def _is_flush(self, chain: Chain, ledger: EngineLedger, settings: Settings) -> bool:
        is_recent = ledger.now_ns - chain.began_ns <= settings(self.remember_s) * 1e9
        if not is_recent or not self._is_loss(chain.evicted, chain.kept_before, chain.missed, settings):
            return False
        stored = sum(step.stored for step in ledger.prefixes.steps if step.at_ns >= chain.began_ns)
        return chain.missed >= settings(self.min_recomputed) * stored
