"""Whether a text shows enough of an engine to conclude that nothing is wrong, or else what to bring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.errors import CannotTell
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.log_file import NO_STATISTICS

LEAST_STATISTICS: Final = 3
"""The fewest statistics: two are one interval, in which an engine may as well have been about to stop."""


def refuse_too_little(
    target: str, notes: Sequence[str], findings: Sequence[FindingReport], ledgers: Iterable[EngineLedger]
) -> None:
    """Raise CannotTell where silence would be taken for health."""
    views = [WrittenView(ledger) for ledger in ledgers]
    complains = any(view.is_report() for view in views)
    if any(finding.severity != "info" for finding in findings):
        return
    explains = [finding for finding in findings if not finding.code.startswith(("blind.", "held.pool", "held.prefix"))]
    contradicts = any(finding.code == "blind.metric-wrong" for finding in findings)
    if explains or contradicts:
        return
    samples = sum(len(view.samples) for view in views)
    if complains and samples:
        raise CannotTell(
            f"{target} describes a problem, but the lines that it quotes do not show one. Give at least a minute of"
            " the log or the metrics page while it happens",
            notes,
        )
    if not samples:
        if any(finding.code == "held.pool-reserved" and not complains for finding in findings) and _asks(views):
            return
        raise CannotTell(
            f"{target}: {NO_STATISTICS}. Nor is it a report that describes a problem with the load's command, its"
            " lengths and the pool's size",
            notes,
        )
    if samples < LEAST_STATISTICS and not any(finding.code == "blind.log-silence" for finding in findings):
        raise CannotTell(
            f"{target}: {samples} line{'s' if samples > 1 else ''} of statistics are too few: at least three in a"
            " row show whether the engine progresses",
            notes,
        )


def _asks(views: Iterable[WrittenView]) -> bool:
    return any(view.states("question", "memory_taken") for view in views)
