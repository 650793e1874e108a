"""A prefix cache that does not serve: the collapses that KV events show.

collapse.prefix-hits needs contents that are stored while they are kept, collapse.cache-flushed evictions and what is
stored again after them. Both are likely at best: KV events name neither hits nor requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.prefixes import Chain
from monitor.ledger.words import clock_time, counted, percent

PREFIX_HITS = "collapse.prefix-hits"
CACHE_FLUSHED = "collapse.cache-flushed"
SOURCE = "kv-events"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is wrong with one engine's prefix cache."""
    if not ledger.has_stream and ledger.prefixes.stored:
        yield from _prefix_hits(ledger, settings)
        yield from _cache_flushed(ledger, settings)


def _prefix_hits(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    since_ns = ledger.now_ns - settings(PREFIX_HITS, "window_s") * 1e9
    recent = list(takewhile(lambda step: step.at_ns >= since_ns, reversed(ledger.prefixes.steps)))
    stored, again = sum(step.stored for step in recent), sum(step.again for step in recent)
    if again < settings(PREFIX_HITS, "min_blocks") or again < settings(PREFIX_HITS, "min_share") * stored:
        return
    first = next(step for step in reversed(recent) if step.again)
    yield Judgement(
        code=PREFIX_HITS,
        engine=ledger.engine,
        verdict="likely",
        since_ns=first.at_ns,
        position=first.position,
        evidence=(
            Evidence("blocks_stored", stored, "blocks", SOURCE),
            Evidence("stored_though_kept", again, "blocks", SOURCE, first.position),
            Evidence("share_stored_though_kept", round(100 * again / stored, 1), "%", SOURCE),
            Evidence("blocks_kept", ledger.prefixes.kept_blocks, "blocks", SOURCE),
        ),
        explanation=(
            f"Since {clock_time(first.at_ns)} {counted(again, 'block')} were computed and stored whose very content the"
            f" cache held, {percent(again / stored)} of all that was stored: prompts are computed again though their"
            " prefixes are there. A prefix that is hit is not stored again, but for the last block of a prompt."
        ),
        do_now=("Compare vllm:prefix_cache_hits_total with vllm:prefix_cache_queries_total: the first stands still.",),
        change=(
            "On a model with several KV groups (sliding window, Mamba) every group must hit, and one that always misses"
            " vetoes all: look for vLLM's fixes of it in a newer version, or try --disable-hybrid-kv-cache-manager.",
            "Check that clients send no cache_salt of their own, and no prompt_logprobs: such requests do not hit.",
        ),
        wont_help=("More KV memory: what is asked for is in the cache.",),
        missing=(
            "tokens looked up and hit, by group: the event stream says them; vllm:prefix_cache_queries_total and"
            " _hits_total of the /metrics page say the sum"
        ),
    )


def _cache_flushed(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    flushes = [chain for chain in ledger.prefixes.culprits if _is_flush(chain, ledger, settings)]
    if not flushes:
        return
    first, worst = min(flushes, key=lambda chain: chain.began_ns), max(flushes, key=lambda chain: chain.missed)
    yield Judgement(
        code=CACHE_FLUSHED,
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
        do_now=("Nothing is lost: the prefixes come back as they are asked for, at the price of computing them.",),
        change=(
            "Send such prompts to an engine of their own, or lower --max-model-len so that they are refused here.",
            "Give the pool room for both (a higher --gpu-memory-utilization, --kv-cache-memory-bytes), or an outer tier"
            " to fetch prefixes back from (--kv-transfer-config, or --kv-offloading-size where the version has it).",
        ),
        wont_help=("Restarting, or resetting the prefix cache: both flush all of it.",),
        missing=(
            "which request it was, and whom the misses hit: the event stream names the request of every eviction; KV"
            " events name contents only"
        ),
    )


def _is_flush(chain: Chain, ledger: EngineLedger, settings: Settings) -> bool:
    return (
        ledger.now_ns - chain.began_ns <= settings(CACHE_FLUSHED, "remember_s") * 1e9
        and chain.evicted >= settings(CACHE_FLUSHED, "min_share") * max(chain.kept_before, 1)
        and chain.missed >= settings(CACHE_FLUSHED, "min_blocks")
        and chain.missed >= settings(CACHE_FLUSHED, "min_missed") * chain.evicted
    )
