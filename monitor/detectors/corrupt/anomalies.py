"""Impossible transitions: what the three codes of corrupt ledgers have in common.

The fold finds them by events that contradict each other, by the engine's own counts at each step, and by its audits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.analysis.event_history import HistoryLine, block_history, request_names
from kvscope.monitor.detectors.advice import named
from kvscope.monitor.detectors.blind.stream_gap import UNREADABLE
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger, FoundAnomaly
from kvscope.monitor.state.engine_state import FEWER_FREE
from kvscope.monitor.text import clock_time

BROKEN_FENCE: Final = "handed out before its fence"
DOUBLE_FREE: Final = "corrupt.double-free"
USE_AFTER_FREE: Final = "corrupt.use-after-free"
COUNTER_DRIFT: Final = "corrupt.counter-drift"
CODE_OF: Final[dict[str, str]] = {
    "released while free": DOUBLE_FREE,
    "released by another than its owner": DOUBLE_FREE,
    "reclaimed though never detached": DOUBLE_FREE,
    "allocated while held": USE_AFTER_FREE,
    BROKEN_FENCE: USE_AFTER_FREE,
}
"""Finding codes by the fold's name of an anomaly. Every other anomaly is counter drift."""


HISTORY_LINES: Final = 6
MIXES_REQUESTS: Final = (
    "From here on the engine may give one request the KV of another, so its answers are not trustworthy."
)
ONLY_FENCES: Final = (
    "The engine frees blocks that it had promised to keep until that step completes. A step that only reads a block"
    " does no harm. One that writes to it gives another request its KV, so the answers cannot be trusted."
)
RETAINS_BLOCKS: Final = (
    "The engine has fewer blocks to hand out than its events leave free: a counter is wrong, or something took a"
    " reference without an event. This does not show that two requests share a block."
)


def anomalies_of(ledger: EngineLedger, code: str) -> list[FoundAnomaly]:
    """Return the anomalies of one code, in the order in which they were found."""
    anomalies: list[FoundAnomaly] = []
    freed_twice: dict[int, int] = {}
    for found in ledger.anomalies:
        if found.anomaly.what == UNREADABLE:
            continue  # blind.stream-gap has it
        block, request = found.anomaly.block, found.anomaly.request
        its_code = CODE_OF.get(found.anomaly.what, COUNTER_DRIFT)
        if its_code == DOUBLE_FREE and freed_twice.setdefault(block, request) != request:
            continue  # it is in the free queue twice since, and whichever request gets it has no part in that
        if its_code == code:
            anomalies.append(found)
    return anomalies


class CorruptDetector(Detector[Judgement]):
    """The base of the three: one judgement for all anomalies of the code."""

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the impossible transitions of the engine."""
        anomalies = anomalies_of(ledger, self.code)
        if anomalies:
            yield _judge_anomalies(ledger, self.code, self.title, anomalies)


def _judge_anomalies(ledger: EngineLedger, code: str, title: str, anomalies: list[FoundAnomaly]) -> Judgement:
    first = anomalies[0]
    names = request_names(ledger)
    blocks = sorted({found.anomaly.block for found in anomalies if found.anomaly.block >= 0})
    requests = dict.fromkeys(
        names.get(found.anomaly.request, f"#{found.anomaly.request}")
        for found in anomalies
        if found.anomaly.request >= 0
    )
    history: list[HistoryLine] = []
    if blocks:
        history = block_history(ledger.recent, first.anomaly.block if first.anomaly.block >= 0 else blocks[0], names)
        history = [line for line in history if line.position <= first.position]
    whats = {found.anomaly.what for found in anomalies}
    retains = whats == {FEWER_FREE}
    where = f"block {first.anomaly.block}, " if first.anomaly.block >= 0 else ""
    return Judgement(
        code=code,
        engine=ledger.engine,
        verdict="likely" if ledger.losses else "confirmed",
        severity="error" if retains else None,
        since_ns=first.at_ns,
        position=str(first.position),
        requests=tuple(requests),
        blocks=tuple(blocks),
        evidence=(
            Evidence("anomalies", len(anomalies), "times", position=str(anomalies[-1].position)),
            *(Evidence("anomaly", _anomaly_text(found), "", "stream", str(found.position)) for found in anomalies[:3]),
            *(
                Evidence("block_history", f"{clock_time(line.at_ns)} {line.text}", "", "stream", str(line.position))
                for line in history[-HISTORY_LINES:]
            ),
        ),
        explanation=(
            f"{title}: {where}{first.anomaly.what} ({first.anomaly.detail}), is the first of"
            f" {len(anomalies):,} found since {clock_time(first.at_ns)}. "
            + (RETAINS_BLOCKS if retains else ONLY_FENCES if whats == {BROKEN_FENCE} else MIXES_REQUESTS)
        ),
        do_now=(
            "Plan a restart of this engine for a quiet hour: only a restart frees these blocks."
            if retains
            else "Stop sending requests to this engine and restart it: outputs since then may mix requests.",
            "Keep a recording (monitor record) or the journal: it holds the events that contradict each other.",
        ),
        change=(
            f"This is an engine bug{f' ({named(ledger)})' if named(ledger) else ''}: report it with a bundle"
            " (monitor bundle TARGET FILE) and the block's history (monitor explain block"
            f" {first.anomaly.block if first.anomaly.block >= 0 else 'ID'}).",
        ),
        wont_help=("Lowering the load, or enlarging the pool.",),
        missing="the lost events: the contradiction may be in them" if ledger.losses else "",
    )


def _anomaly_text(found: FoundAnomaly) -> str:
    block = f"block {found.anomaly.block} " if found.anomaly.block >= 0 else ""
    return f"{block}{found.anomaly.what}: {found.anomaly.detail}"
