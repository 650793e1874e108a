"""blind.not-exposed: metrics that this engine's page does not have. An absent metric is not 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ...ledger.engine_ledger import EngineLedger
from ..advice import metrics_dialect
from ..detector import Detector, Settings
from ..judgement import Evidence, Judgement


def has_metrics_page(ledger: EngineLedger) -> bool:
    """Return whether a metrics page, or Prometheus, is all that there is."""
    return not ledger.has_stream and bool(ledger.samples) and ledger.samples[-1].source != "log"


class NeededMetric(NamedTuple):
    """A metric of a metrics page: its name there, and which codes are impossible or less certain without it."""

    metric: str
    needed_for: str


NEEDED_METRICS: Final[dict[str, NeededMetric]] = {
    "running": NeededMetric("vllm:num_requests_running", "every judgement"),
    "waiting": NeededMetric(
        "vllm:num_requests_waiting", "collapse.lockstep, stuck.never-fits, stuck.head-of-line and sizing.overload"
    ),
    "usage": NeededMetric(
        "vllm:kv_cache_usage_perc",
        "leak.finished-held, collapse.lockstep, stuck.never-fits, stuck.head-of-line and sizing.overload",
    ),
    "steps": NeededMetric("vllm:iteration_tokens_total_count", "stuck.engine-stalled (with it: likely)"),
    "deferred": NeededMetric("vllm:num_requests_waiting_by_reason", "stuck.head-of-line (with it: likely)"),
    "finished": NeededMetric(
        "vllm:request_success_total", "how requests of collapse.lockstep ended, stuck.head-of-line and sizing.overload"
    ),
    "preemptions": NeededMetric("vllm:num_preemptions_total", "whether collapse.lockstep was preemption"),
}
HEADINGS: Final = {"vllm": "vLLM", "sglang": "SGLang", "kvscope": "kvscope's engine"}
"""The case of the runbook for each dialect."""


class NotExposed(Detector[Judgement]):
    """Metrics that detectors need and the page does not have.

    Sees: a metrics page without some of the metrics that rules need.
    Confirmed when: always, since an absent metric is not 0.
    """

    code = "blind.not-exposed"
    severity = "info"
    title = "Values that this engine's metrics do not expose"
    outlasts_epoch = True
    requires = ("metrics",)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the metrics that are absent."""
        if not has_metrics_page(ledger):
            return
        last = ledger.samples[-1]
        absent = [figure for field, figure in NEEDED_METRICS.items() if getattr(last, field) is None]
        if not absent:
            return
        yield self.finding(
            ledger,
            position=last.position,
            evidence=tuple(Evidence(figure.metric, "not exposed", "", last.source, last.position) for figure in absent),
            explanation=(
                "Not exposed (which does not mean 0): "
                + "; ".join(f"{figure.metric}, needed for {figure.needed_for}" for figure in absent)
                + "."
            ),
            case=HEADINGS[metrics_dialect(ledger)],
        )
