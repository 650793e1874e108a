"""sizing.bad-suggestion: the engine's advice is not what its own figures add up to."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sizing.memory_figures import MemoryFigures, memory_figures, size_text
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class BadSuggestion(Detector[Judgement]):
    """Advice on the pool's size that is wrong."""

    code = "sizing.bad-suggestion"
    severity = "warning"
    title = "The engine's suggested pool size is wrong"
    requires = ("stream", "log", "report")
    position = 650

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the advice that does not add up."""
        figures = memory_figures(ledger)
        if figures is not None:
            yield from self._judge_figures(ledger, figures)

    def _judge_figures(self, ledger: EngineLedger, bill: MemoryFigures) -> Iterator[Judgement]:
        if bill.advised is None or bill.right is None or abs(bill.right - bill.advised) <= bill.slack:
            return
        off = bill.right - bill.advised
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed" if bill.source == "log" else "likely",
            position=bill.position,
            evidence=(
                Evidence("suggested_kv_cache", bill.advised, "bytes", bill.source, bill.position),
                Evidence("computed_kv_cache", bill.right, "bytes", bill.source, bill.position),
                Evidence("suggestion_error", off, "bytes", bill.source, bill.position),
                Evidence("graphs_actual", bill.graphs, "bytes", bill.source, bill.position),
                Evidence("kv_pool", bill.kv_pool, "bytes", bill.source, bill.position),
            ),
            explanation=(
                f"The engine suggests a pool of {size_text(bill.advised)}, but its own figures add up to"
                f" {size_text(bill.right)}. The difference of {size_text(off)} matches graphs of"
                f" {size_text(bill.graphs)} that it subtracts twice."
            ),
            do_now=("Ignore the suggestion.",),
            change=(f"To set a size, use --kv-cache-memory-bytes {bill.right}.",),
            wont_help=("Restarting: the engine computes the suggestion the same way (vLLM 0.27 to 0.33, #57936).",),
            missing="" if bill.source == "log" else "the requested share: the log's memory breakdown has it",
        )
