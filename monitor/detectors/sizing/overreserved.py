"""sizing.overreserved: far more was kept for graphs than they took."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import percent
from ...ledger.engine_ledger import EngineLedger
from ..advice import NAMED_SIZE
from ..detector import FromLog, Settings, StreamDetector, Threshold
from ..judgement import Judgement
from .memory_figures import memory_figures, size_text


class Overreserved(StreamDetector[Judgement]):
    """Memory that is kept for graphs and not used.

    Sees: an estimate for graphs that is several times what they took, and a hundredth of the device unused.
    Confirmed when: the engine's event has both.
    Not when: the graphs took half of it.
    """

    code = "sizing.overreserved"
    severity = "warning"
    title = "Far more memory is reserved for graphs than they take"
    lab_only = True

    min_times = Threshold(2, "times", "an estimate is an estimate")
    min_share = Threshold(0.01, "of the device", "less is hardly a block for each request")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the memory that is kept and not used."""
        breakdown = memory_figures(ledger)
        if breakdown is None:
            return
        unused = breakdown.kept - breakdown.graphs
        if (
            breakdown.kept <= settings(self.min_times) * breakdown.graphs + breakdown.slack
            or unused < settings(self.min_share) * breakdown.device_total
        ):
            return
        yield self.finding(
            ledger,
            position=breakdown.position,
            evidence=breakdown.evidence(
                graphs_reserved=breakdown.kept,
                graphs_actual=breakdown.graphs,
                graphs_reserved_unused=unused,
                kv_pool=breakdown.kv_pool,
            ),
            explanation=(
                f"{size_text(breakdown.kept)} were reserved for graphs, which took {size_text(breakdown.graphs)}:"
                f" {size_text(unused)} of the device stay unused,"
                f" {percent(unused / breakdown.kv_pool) if breakdown.kv_pool else 'all'} of the pool's size."
            ),
            numbers={NAMED_SIZE: f"--kv-cache-memory-bytes {breakdown.kv_pool + unused}"},
        )


class OverreservedFromLog(FromLog, Overreserved):
    """Memory that a log shows as kept for graphs and not used.

    Sees: the same in the memory breakdown of a log.
    Confirmed when: by more than the rounding of its figures.
    Not when: the figures round to it.
    """
