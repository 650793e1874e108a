"""sizing.kv-too-large: graphs took more than was kept for them, and hardly anything is free."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.analysis.memory_breakdown import HEADROOM
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sizing.memory_figures import MEBIBYTE, MemoryFigures, memory_figures, size_text
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class KvTooLarge(Detector[Judgement]):
    """A pool that leaves hardly any memory free."""

    code = "sizing.kv-too-large"
    severity = "warning"
    title = "The pool leaves hardly any memory free besides the graphs"
    requires = ("stream", "log", "report")
    position = 630

    min_free_mib = Threshold(150, "MiB", "engines keep so much free in what they advise, for what grows with requests")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the memory that graphs took from what must stay free."""
        figures = memory_figures(ledger)
        if figures is not None:
            yield from self._judge_figures(ledger, settings, figures)

    def _judge_figures(self, ledger: EngineLedger, settings: Settings, breakdown: MemoryFigures) -> Iterator[Judgement]:
        over = breakdown.graphs - breakdown.kept
        if over <= breakdown.slack or breakdown.device_free >= settings(self.min_free_mib) * MEBIBYTE:
            return
        smaller = max(breakdown.kv_pool - over - HEADROOM, 0)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed" if breakdown.source == "stream" else "likely",
            position=breakdown.position,
            evidence=(
                Evidence("graphs_actual", breakdown.graphs, "bytes", breakdown.source, breakdown.position),
                Evidence("graphs_reserved", breakdown.kept, "bytes", breakdown.source, breakdown.position),
                Evidence("device_free", breakdown.device_free, "bytes", breakdown.source, breakdown.position),
                Evidence("device_total", breakdown.device_total, "bytes", breakdown.source, breakdown.position),
                Evidence("kv_pool", breakdown.kv_pool, "bytes", breakdown.source, breakdown.position),
            ),
            explanation=(
                f"The pool was sized with {size_text(breakdown.kept)} kept for graphs, which then took"
                f" {size_text(breakdown.graphs)}: {size_text(breakdown.device_free)} of"
                f" {size_text(breakdown.device_total)} are free, and the next larger step may run out of memory."
            ),
            do_now=("Leave it running, but do not raise the load or start anything else on this device.",),
            change=(
                f"Start with --kv-cache-memory-bytes {smaller}, which leaves room for the graphs and 150 MiB, or lower"
                " --gpu-memory-utilization.",
                "Let the engine estimate its graphs before it sizes the pool (vLLM: on by default since 0.21;"
                " VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 since 0.18), or disable graphs (--enforce-eager).",
            ),
            wont_help=("Lowering --max-num-seqs alone: the pool then takes the memory that this saves.",),
            missing="" if breakdown.source == "stream" else "the device's free memory now: the log covers only startup",
        )
