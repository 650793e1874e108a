"""corrupt.double-free, corrupt.use-after-free and corrupt.counter-drift: impossible transitions of the engine.

The fold finds them by events that contradict each other, by the engine's own counts at each step, and by its audits.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import ClassVar, Final

from ...base.text import clock_time, listed
from ...ledger.engine_ledger import EngineLedger, FoundAnomaly
from ...ledger.event_history import HistoryLine, block_history, request_names
from ...ledger.records import AnomalyKind
from ..advice import named
from ..detector import Causes, Settings, StreamDetector
from ..judgement import Alternative, Judgement, began_later, hits_its_blocks, seen
from ..leak.unaccounted import Unaccounted
from .conservation import Conservation

FREED_TWICE: Final = frozenset(
    (AnomalyKind.RELEASED_WHILE_FREE, AnomalyKind.RELEASED_BY_ANOTHER, AnomalyKind.NEVER_DETACHED)
)
HANDED_OUT: Final = frozenset((AnomalyKind.ALLOCATED_WHILE_HELD, AnomalyKind.BROKEN_FENCE))
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


def anomalies_of(ledger: EngineLedger, kinds: Set[AnomalyKind]) -> list[FoundAnomaly]:
    """Return the anomalies of these kinds, in the order in which they were found."""
    anomalies: list[FoundAnomaly] = []
    freed_twice: dict[int, int] = {}
    for found in ledger.anomalies:
        anomaly, request = found.anomaly, found.anomaly.request
        if anomaly.kind in FREED_TWICE:
            # A block is in the free queue twice since, and whichever request gets it then has no part in that.
            first = [block for block in anomaly.blocks if freed_twice.setdefault(block, request) == request]
            if not first:
                continue
            found = found._replace(anomaly=anomaly._replace(blocks=first))
        if anomaly.kind in kinds:
            anomalies.append(found)
    return anomalies


class CorruptDetector(StreamDetector[Judgement]):
    """The base of the three: one judgement for all anomalies of the code."""

    severity = "critical"
    kinds: ClassVar[Set[AnomalyKind]]
    causes = Causes[Judgement]().of(Conservation, hits_its_blocks)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the impossible transitions of the engine."""
        anomalies = anomalies_of(ledger, self.kinds)
        if anomalies:
            yield self._judge(ledger, anomalies)

    def _judge(self, ledger: EngineLedger, anomalies: list[FoundAnomaly]) -> Judgement:
        first = anomalies[0]
        names = request_names(ledger)
        blocks = sorted({block for found in anomalies for block in found.anomaly.blocks})
        requests = dict.fromkeys(
            names.get(found.anomaly.request, f"#{found.anomaly.request}")
            for found in anomalies
            if found.anomaly.request >= 0
        )
        history: list[HistoryLine] = []
        if blocks:
            history = block_history(ledger.recent, (*first.anomaly.blocks, *blocks)[0], names)
            history = [line for line in history if line.position <= first.position]
        kinds = {found.anomaly.kind for found in anomalies}
        retains = kinds == {AnomalyKind.FEWER_FREE}
        others = len(anomalies) - 1
        return self.finding(
            ledger,
            severity="error" if retains else None,
            since_ns=first.at_ns,
            position=str(first.position),
            requests=tuple(requests),
            blocks=tuple(blocks),
            evidence=(
                seen("anomalies", len(anomalies), "times", str(anomalies[-1].position)),
                *(seen("anomaly", _anomaly_text(found), "", str(found.position)) for found in anomalies[:3]),
                *(
                    seen("block_history", f"{clock_time(line.at_ns)} {line.text}", "", str(line.position))
                    for line in history[-HISTORY_LINES:]
                ),
            ),
            explanation=(
                f"{self.title}: {_anomaly_text(first)}, at {clock_time(first.at_ns)}"
                + (f", and {others:,} more since. " if others else ". ")
                + (
                    RETAINS_BLOCKS
                    if retains
                    else ONLY_FENCES
                    if kinds == {AnomalyKind.BROKEN_FENCE}
                    else MIXES_REQUESTS
                )
            ),
            case="If it only keeps blocks in use" if retains else "",
            numbers={
                "an engine bug": f"an engine bug ({named(ledger)})" if named(ledger) else "an engine bug",
                "block ID": f"block {first.anomaly.blocks[0] if first.anomaly.blocks else 'ID'}",
            },
            missing="the lost events: the contradiction may be in them" if ledger.losses else "",
        )


def _anomaly_text(found: FoundAnomaly) -> str:
    """Say what was found, once for all blocks of the event: `blocks 3 and 4, KV group 1, released while free (…)`."""
    kind, blocks, _, _, detail = found.anomaly
    named = [f"block{'s' if len(blocks) > 1 else ''} {listed(blocks)}"] if blocks else []
    named += [f"KV group {found.group}"] if found.group else []
    return ", ".join([*named, kind.value]) + (f" ({detail})" if detail else "")


class CounterDrift(CorruptDetector):
    """The engine's own accounts disagree, or its events contradict each other otherwise.

    Sees: counts, audits or events that contradict the ledger.
    Confirmed when: no event was lost.
    Likely when: events were lost: the contradiction may be in them.
    Not when: events were lost; a block was freed twice or handed out while held (corrupt.double-free,
    corrupt.use-after-free).
    """

    code = "corrupt.counter-drift"
    kinds = frozenset(AnomalyKind) - FREED_TWICE - HANDED_OUT - {AnomalyKind.UNREADABLE}  # that is blind.stream-gap
    title = "The engine's own block counts disagree"
    alternatives = (Alternative("a count at another time", "the counters come with the events"),)


class UseAfterFree(CorruptDetector):
    """A block was handed out while it was held.

    Sees: an allocation of a block that a request holds, or a free that did not wait for the step it was fenced behind.
    Confirmed when: no event was lost.
    Likely when: events were lost: a free may be among them.
    Not when: events were lost; the engine's counts alone disagree (corrupt.counter-drift).
    """

    code = "corrupt.use-after-free"
    kinds = HANDED_OUT
    title = "A block was handed out while a request held it"
    alternatives = (Alternative("a step that had ended", "the step in flight that may write to it"),)


class DoubleFree(CorruptDetector):
    """A block was freed by a caller that did not hold it.

    Sees: a release of a block that is free, that another request released, or that its request never gave back before.
    Confirmed when: no event was lost.
    Likely when: events were lost: an allocation may be among them.
    Not when: events were lost; a later request has no part in it: it got a block that is in the free queue twice.
    """

    code = "corrupt.double-free"
    kinds = FREED_TWICE
    title = "A block was freed by a caller that did not hold it"
    alternatives = (Alternative("a shared block", "its known references before the free"),)
    causes = (
        Causes[Judgement]()
        .of(UseAfterFree, hits_its_blocks)
        .of(Unaccounted, hits_its_blocks)
        .of(CounterDrift, began_later)
        .of(Conservation, hits_its_blocks)
    )
