"""held.long-request: one request needs much of the pool, and uses it. Memory that is held by design, and no leak."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration, percent
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import without_token_s
from ..judgement import Judgement, seen


class LongRequest(StreamDetector[Judgement]):
    """A request that needs much of the pool.

    Sees: a running request that holds a quarter of the pool.
    Confirmed when: it progresses.
    Not when: it stands still.
    """

    code = "held.long-request"
    severity = "info"
    title = "One long request uses much of the pool"

    min_share = Threshold(0.25, "of the pool", "less does not crowd others out")
    min_age_s = Threshold(5, "s", "shorter requests end before a person reads the finding")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that hold much and go on."""
        state = ledger.state
        least = settings(self.min_share) * state.usable
        large = [record for record in ledger.living().running if len(record.blocks) >= least]
        for record in large:
            share = len(record.blocks) / state.usable
            is_new = ledger.age_s(record.admitted_ns) < settings(self.min_age_s)
            if is_new or ledger.age_s(record.progressed_ns) > without_token_s(ledger, settings):
                continue
            yield self.finding(
                ledger,
                key=record.id,
                since_ns=ledger.wall(record.admitted_ns),
                position=ledger.at(record.since_at),
                requests=(record.id,),
                evidence=(
                    seen("blocks_held", len(record.blocks), "blocks", ledger.at(state.places.pool)),
                    seen("share_of_pool", round(share, 4), "of the pool", ledger.at(state.places.pool)),
                    seen("computed_tokens", record.computed_tokens, "tokens", ledger.at(state.places.progressed)),
                    seen("output_tokens", record.output_tokens, "tokens", ledger.at(state.places.progressed)),
                ),
                explanation=(
                    f"Request {record.id} holds {counted(len(record.blocks), 'block')} ({percent(share)} of the pool)"
                    f" and needs them: it has run for {duration(ledger.age_s(record.admitted_ns))}, has"
                    f" {counted(record.computed_tokens, 'token')} computed and still progresses. The blocks become free"
                    " when it ends."
                ),
            )
