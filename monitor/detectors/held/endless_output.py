"""held.endless-output: an answer that does not end fills the pool."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ..judgement import Evidence, TextJudgement
from ..written.pool_pressure import LINES_IN_A_ROW
from ..written.written_view import TextDetector, WrittenView, quotes


class EndlessOutput(TextDetector):
    """A model that goes on generating.

    Sees: a person's words about an answer that does not end.
    Likely when: lines show that tokens are computed.
    Cannot tell: no line does.
    """

    code = "held.endless-output"
    severity = "info"
    title = "An endless answer fills the pool"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield an answer without an end from a healthy engine."""
        phrases = view.phrases("endless_output")
        if not phrases:
            return
        alive = [sample for sample in view.samples if sample.running and sample.generation_tokens_per_s]
        yield view.finding(
            self.code,
            verdict="likely" if len(alive) >= LINES_IN_A_ROW else "cannot-tell",
            since_ns=(alive[0].at_ns or 0) if alive else 0,
            position=phrases[0].position,
            evidence=(Evidence("lines_with_tokens", len(alive), "lines", "log"), *quotes(phrases)),
            explanation=(
                "The model generates until it reaches its limit"
                + (
                    f": tokens are computed in {counted(len(alive), 'line')}, so the engine is healthy."
                    if alive
                    else "."
                )
                + " Its KV grows with each token and becomes free when the request ends."
            ),
            missing="" if len(alive) >= LINES_IN_A_ROW else "the log while it generates, or the answer's length",
        )
