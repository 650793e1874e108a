"""held.not-memory: the pool has room, or it is the host's memory that grows, so something else limits."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import percent
from ..detector import Threshold
from ..judgement import Evidence, TextJudgement
from ..written.written_view import TextDetector, WrittenView, quotes


class NotMemory(TextDetector):
    """A slow or stuck engine with free KV memory.

    Sees: a complaint about a slow or stuck engine, and lines with half of the pool free.
    Likely when: all lines show tokens computed, or nine tenths of the pool free.
    Not when: any request waits.
    """

    code = "held.not-memory"
    severity = "info"
    title = "The pool has room: the limit is not KV memory"

    max_usage = Threshold(0.5, "of the pool", "half of the pool is free and no request waits: memory is not the limit")
    max_standing_usage = Threshold(
        0.1, "of the pool", "nine tenths are free, so memory is not what is missing, even where no token is computed"
    )

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield a complaint about a slow or stuck engine while nine tenths of the pool are free."""
        phrases = view.phrases("slow", "stuck", "usage_low")
        if not phrases:
            return
        samples = [
            sample
            for sample in view.samples
            if sample.usage is not None
            and sample.running
            and (
                sample.generation_tokens_per_s
                or sample.prompt_tokens_per_s
                or sample.usage < view.settings(self.max_standing_usage)
            )
        ]
        if not samples or len(samples) < len(view.samples):
            return
        highest = max(sample.usage or 0 for sample in samples)
        if highest >= view.settings(self.max_usage) or any(sample.waiting for sample in samples):
            return
        last = samples[-1]
        yield view.finding(
            self.code,
            since_ns=samples[0].at_ns or 0,
            position=last.position,
            evidence=(
                Evidence("highest_usage", round(100 * highest, 1), "%", "log", last.position),
                Evidence("running", last.running or 0, "requests", "log", last.position),
                *quotes(phrases[:1]),
            ),
            explanation=(
                f"At most {percent(highest)} of the pool is in use in these lines and no request waits for it: KV"
                " memory does not limit this engine. Kernels, the device, sampling or the client does."
            ),
            missing="the log or the metrics page while it happens",
        )
