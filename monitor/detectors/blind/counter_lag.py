"""blind.counter-lag: vLLM counts preemptions late, and disconnected clients never."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.blind.metrics_dialect import has_metrics_page, metrics_dialect
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class CounterLag(Detector[Judgement]):
    """Counters of vLLM that lag."""

    code = "blind.counter-lag"
    severity = "info"
    title = "vLLM counts preemptions late, and disconnected clients never"
    requires = ("metrics",)
    position = 830

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the counter of preemptions does not show."""
        if has_metrics_page(ledger):
            yield from self._judge_page(ledger)

    def _judge_page(self, ledger: EngineLedger) -> Iterator[Judgement]:
        last = ledger.samples[-1]
        if last.preemptions is None or metrics_dialect(ledger) != "vllm":
            return
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed",
            position=last.position,
            evidence=(Evidence("preemptions_counted", last.preemptions, "preemptions", last.source, last.position),),
            explanation=(
                f"vllm:num_preemptions_total ({last.preemptions:,} now) moves only with a preempted request's next"
                " token: seconds late, and never if the request is aborted before. Clients that disconnect are"
                " counted nowhere, tokens computed again after a preemption in no token counter, and gauges are those"
                " of the last step that ended."
            ),
            change=(
                "If it matters, attach the event stream (monitor doctor tcp://HOST:5757). It contains each"
                " preemption and each abort as it happens.",
            ),
        )
