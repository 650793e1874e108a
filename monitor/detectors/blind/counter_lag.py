"""blind.counter-lag: vLLM counts preemptions late, and disconnected clients never."""

from __future__ import annotations

from collections.abc import Iterator

from ...ledger.engine_ledger import EngineLedger
from ..advice import metrics_dialect
from ..detector import Detector, Settings
from ..judgement import Evidence, Judgement
from .not_exposed import has_metrics_page


class CounterLag(Detector[Judgement]):
    """Counters of vLLM that lag.

    Sees: vLLM's counter of preemptions on a metrics page.
    Confirmed when: always, since this is how vLLM counts.
    Not when: there is an event stream, which shows each preemption.
    """

    code = "blind.counter-lag"
    severity = "info"
    title = "vLLM counts preemptions late, and disconnected clients never"
    outlasts_epoch = True
    requires = ("metrics",)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the counter of preemptions does not show."""
        if not has_metrics_page(ledger):
            return
        last = ledger.samples[-1]
        if last.preemptions is None or metrics_dialect(ledger) != "vllm":
            return
        yield self.finding(
            ledger,
            position=last.position,
            evidence=(Evidence("preemptions_counted", last.preemptions, "preemptions", last.source, last.position),),
            explanation=(
                f"vllm:num_preemptions_total ({last.preemptions:,} now) moves only with a preempted request's next"
                " token: seconds late, and never if the request is aborted before. Clients that disconnect are counted"
                " nowhere, tokens computed again after a preemption in no token counter, and gauges are those of the"
                " last step that ended."
            ),
        )
