"""collapse.outer-hits: an outer tier stores KV and never hits."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, percent
from ...ledger.demand import capacity_tokens
from ...ledger.engine_ledger import EngineLedger
from ..detector import FromSamples, Settings
from ..judgement import Evidence, Judgement, TextJudgement
from ..written.lost_blocks import HELD_LINES
from ..written.written_view import TextDetector, WrittenView, number_of, quotes
from .prefix_hits import PrefixHits


class OuterHits(TextDetector):
    """A tier that only stores.

    Sees: look-ups in an outer tier that stores KV, and no hit.
    Likely when: a person reports prompts that share a prefix, or misses.
    Not when: nothing shows that prompts share anything: those miss too.
    """

    code = "collapse.outer-hits"
    severity = "warning"
    title = "An outer tier stores KV and never hits"
    recurs = True

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Look-ups in an outer tier that stored before, none with a hit."""
        lookups, stored = view.lines("tier_lookup"), view.lines("tier_stored")
        hits = sum(number_of(line, "hits") or 0 for line in lookups)
        if len(lookups) < HELD_LINES or not stored or hits:
            return
        if not view.states("shared_prompts", "tier_misses", "prefix_misses"):
            return  # prompts that share nothing miss too
        yield view.finding(
            self.code,
            lookups[0],
            evidence=(
                Evidence("lookups", view.reported.count("tier_lookup"), "lines", "log"),
                Evidence("hit_tokens", 0, "tokens", "log"),
                *quotes([*lookups[:2], *stored[:2]]),
            ),
            explanation=(
                f"{counted(len(lookups), 'look-up')} in the outer tier missed although it stores KV, and the report"
                " says that prompts share a prefix: keys do not match, or chunks are larger than the shared prefix."
            ),
            missing="the keys of what is stored and looked up: the tier's debug log",
        )


class OuterHitsFromCounter(FromSamples, OuterHits):
    """A tier that only stores, by the engine's own counters.

    Sees: bytes stored in an outer tier, no hit there, and misses of more tokens than the pool holds, while the pool's
    own cache hits.
    Cannot tell: the prompts that share a prefix may all find it in the pool.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield a tier without a hit. Once so many tokens missed, the pool has evicted what it cached first."""
        last, capacity = ledger.samples[-1], capacity_tokens(ledger.facts)
        missed = last.external_queries or 0
        local_rate = (last.prefix_hits or 0) / max(last.prefix_queries or 0, 1)
        if last.external_hits != 0 or last.tier_loaded_bytes or not last.tier_stored_bytes:
            return
        if not capacity or missed <= capacity:
            return
        if local_rate < settings(PrefixHits.min_hit_level):
            return  # prompts that share nothing miss too
        yield self.finding(
            ledger,
            verdict="cannot-tell",
            severity="info",
            position=last.position,
            evidence=(
                Evidence("tokens_looked_up", missed, "tokens", last.source, last.position),
                Evidence("hit_tokens", 0, "tokens", last.source, last.position),
                Evidence("stored_bytes", last.tier_stored_bytes, "B", last.source, last.position),
                Evidence("local_hit_rate", round(100 * local_rate, 1), "%", last.source, last.position),
            ),
            explanation=(
                f"Of {missed:,} tokens that the pool's cache lacked, the outer tier had none, though"
                f" {last.tier_stored_bytes:,} bytes were stored there and {percent(local_rate)} of all prompt tokens"
                " are hits in the pool. Keys that do not match look like this, and so do prefixes that the pool never"
                " evicts."
            ),
            missing="one prompt that comes back after the pool has evicted it",
        )
