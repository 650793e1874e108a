"""sizing.bad-suggestion: the engine's advice is not what its own figures add up to."""

from __future__ import annotations

from collections.abc import Iterator

from ...ledger.engine_ledger import EngineLedger
from ..advice import NAMED_SIZE
from ..detector import FromLog, Settings, StreamDetector
from ..judgement import Judgement
from .memory_figures import memory_figures, size_text


class BadSuggestion(StreamDetector[Judgement]):
    """Advice on the pool's size that is wrong.

    Sees: a suggested size that differs from the engine's own figures by its graphs, subtracted twice.
    Likely when: always, since the event does not have the requested share, with which the sum could be done.
    """

    code = "sizing.bad-suggestion"
    severity = "warning"
    title = "The engine's suggested pool size is wrong"
    lab_only = True
    unseen = "the requested share: the log's memory breakdown has it"

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the advice that does not add up."""
        breakdown = memory_figures(ledger)
        if (
            breakdown is None
            or breakdown.advised is None
            or breakdown.right is None
            or abs(breakdown.right - breakdown.advised) <= breakdown.slack
        ):
            return
        off = breakdown.right - breakdown.advised
        yield self.finding(
            ledger,
            position=breakdown.position,
            evidence=breakdown.evidence(
                suggested_kv_cache=breakdown.advised,
                computed_kv_cache=breakdown.right,
                suggestion_error=off,
                graphs_actual=breakdown.graphs,
                kv_pool=breakdown.kv_pool,
            ),
            explanation=(
                f"The engine suggests a pool of {size_text(breakdown.advised)}, but its own figures add up to"
                f" {size_text(breakdown.right)}. The difference of {size_text(off)} matches graphs of"
                f" {size_text(breakdown.graphs)} that it subtracts twice."
            ),
            numbers={NAMED_SIZE: f"--kv-cache-memory-bytes {breakdown.right}"},
            missing=self.unseen,
        )


class BadSuggestionFromLog(FromLog, BadSuggestion):
    """Advice in a log that is not what the log's own figures add up to.

    Sees: a suggested size that differs from the sum of the log's memory breakdown.
    Confirmed when: by more than the rounding of its figures.
    Not when: the figures round to it.
    """

    unseen = ""
