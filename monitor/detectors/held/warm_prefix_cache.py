"""held.prefix-cache: cached blocks that no request uses. Memory that is held by design, and no leak."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, percent
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import Judgement, seen


class WarmPrefixCache(StreamDetector[Judgement]):
    """Cached blocks that no request uses.

    Sees: a tenth of the pool that holds prefixes and that no request uses.
    Confirmed when: always, since the engine counts these blocks as free.
    """

    code = "held.prefix-cache"
    severity = "info"
    title = "Cached blocks that no request uses"
    settles_s = 300.0  # a warm cache is one finding while its share hovers

    min_share = Threshold(0.1, "of the pool", "less is not worth a line")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield how much of the pool is a warm cache."""
        state = ledger.state
        share = state.cached_idle / max(state.usable, 1)
        if share < settings(self.min_share):
            return
        totals = state.totals
        hit_rate = totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else 0.0
        yield self.finding(
            ledger,
            position=ledger.at(state.places.pool),
            evidence=(
                seen("cached_idle_blocks", state.cached_idle, "blocks", ledger.at(state.places.pool)),
                seen("share_of_pool", round(share, 4), "of the pool", ledger.at(state.places.pool)),
                seen("prefix_hit_rate", round(hit_rate, 4), "of the tokens", ledger.at(state.places.looked_up)),
            ),
            explanation=(
                f"{counted(state.cached_idle, 'block')} ({percent(share)} of the pool) hold prefixes that no request"
                " uses now. The engine can evict them at once and counts them as free: this is a warm cache, not a"
                f" leak. It served {percent(hit_rate)} of the prompt tokens looked up."
            ),
        )
