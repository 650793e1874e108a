"""sizing.kv-too-large: graphs took more than was kept for them, and hardly anything is free."""

from __future__ import annotations

from collections.abc import Iterator

from ...ledger.engine_ledger import EngineLedger
from ...ledger.memory_breakdown import HEADROOM
from ..advice import NAMED_SIZE
from ..detector import FromLog, Settings, StreamDetector, Threshold
from ..judgement import Judgement
from .memory_figures import MEBIBYTE, memory_figures, size_text


class KvTooLarge(StreamDetector[Judgement]):
    """A pool that leaves hardly any memory free.

    Sees: graphs that took more than was kept for them, and hardly any memory free on the device.
    Confirmed when: the engine's event has what is free now.
    Not when: what is free suffices for what grows with requests.
    """

    code = "sizing.kv-too-large"
    severity = "warning"
    title = "The pool leaves hardly any memory free besides the graphs"
    lab_only = True
    unseen = ""

    min_free_mib = Threshold(150, "MiB", "engines keep so much free in what they advise, for what grows with requests")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the memory that graphs took from what must stay free."""
        breakdown = memory_figures(ledger)
        if breakdown is None:
            return
        over = breakdown.graphs - breakdown.kept
        if over <= breakdown.slack or breakdown.device_free >= settings(self.min_free_mib) * MEBIBYTE:
            return
        smaller = max(breakdown.kv_pool - over - HEADROOM, 0)
        yield self.finding(
            ledger,
            position=breakdown.position,
            evidence=breakdown.evidence(
                graphs_actual=breakdown.graphs,
                graphs_reserved=breakdown.kept,
                device_free=breakdown.device_free,
                device_total=breakdown.device_total,
                kv_pool=breakdown.kv_pool,
            ),
            explanation=(
                f"The pool was sized with {size_text(breakdown.kept)} kept for graphs, which then took"
                f" {size_text(breakdown.graphs)}: {size_text(breakdown.device_free)} of"
                f" {size_text(breakdown.device_total)} are free, and the next larger step may run out of memory."
            ),
            numbers={NAMED_SIZE: f"--kv-cache-memory-bytes {smaller}"},
            missing=self.unseen,
        )


class KvTooLargeFromLog(FromLog, KvTooLarge):
    """A pool that left hardly any memory free at startup.

    Sees: the same in the memory breakdown of a log.
    Likely when: always, since the log covers only startup.
    """

    unseen = "the device's free memory now: the log covers only startup"
