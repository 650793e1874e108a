"""Accounts that cannot be right. Needs the stream: the books find these by events that contradict each other, by the
engine's own counts at each step, and by its audits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.analysis.event_history import StoryLine, names_in, story_of_block
from kvscope.monitor.detectors.advice import named
from kvscope.monitor.detectors.blind import UNREADABLE
from kvscope.monitor.detectors.judgement import CATALOGUE, Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger, FoundAnomaly
from kvscope.monitor.text import clock_time

DOUBLE_FREE: Final = "corrupt.double-free"
CODE_OF: Final[dict[str, str]] = {
    "released while free": DOUBLE_FREE,
    "released by another than its owner": DOUBLE_FREE,
    "reclaimed though never detached": DOUBLE_FREE,
    "allocated while held": "corrupt.use-after-free",
    "handed out before its fence": "corrupt.use-after-free",
}
OTHERWISE: Final = "corrupt.counter-drift"
STORY_LINES: Final = 6


def judge(ledger: EngineLedger, _settings: Settings) -> Iterator[Judgement]:
    """The impossible transitions of one engine, one judgement a code."""
    by_code: dict[str, list[FoundAnomaly]] = {}
    freed_twice: dict[int, int] = {}
    for found in ledger.anomalies:
        if found.anomaly.what == UNREADABLE:
            continue  # blind.stream-gap tells of it
        code = CODE_OF.get(found.anomaly.what, OTHERWISE)
        block, request = found.anomaly.block, found.anomaly.request
        if code == DOUBLE_FREE and freed_twice.setdefault(block, request) != request:
            continue  # it is in the free queue twice since, and whoever is given it has no part in that
        by_code.setdefault(code, []).append(found)
    for code, anomalies in by_code.items():
        yield _judged(ledger, code, anomalies)


def _judged(ledger: EngineLedger, code: str, anomalies: list[FoundAnomaly]) -> Judgement:
    first = anomalies[0]
    names = names_in(ledger)
    blocks = sorted({found.anomaly.block for found in anomalies if found.anomaly.block >= 0})
    requests = dict.fromkeys(
        names.get(found.anomaly.request, f"#{found.anomaly.request}")
        for found in anomalies
        if found.anomaly.request >= 0
    )
    story: list[StoryLine] = []
    if blocks:
        story = story_of_block(ledger.recent, first.anomaly.block if first.anomaly.block >= 0 else blocks[0], names)
        story = [line for line in story if line.position <= first.position]
    where = f"block {first.anomaly.block}, " if first.anomaly.block >= 0 else ""
    return Judgement(
        code=code,
        engine=ledger.engine,
        verdict="likely" if ledger.losses else "confirmed",
        since_ns=first.at_ns,
        position=str(first.position),
        requests=tuple(requests),
        blocks=tuple(blocks),
        evidence=(
            Evidence("times", len(anomalies), "times", position=str(anomalies[-1].position)),
            *(Evidence("anomaly", _in_words(found), "", "stream", str(found.position)) for found in anomalies[:3]),
            *(
                Evidence("story", f"{clock_time(line.at_ns)} {line.text}", "", "stream", str(line.position))
                for line in story[-STORY_LINES:]
            ),
        ),
        explanation=(
            f"{CATALOGUE[code].title}: {where}{first.anomaly.what} ({first.anomaly.detail}), is the first of"
            f" {len(anomalies):,} found since {clock_time(first.at_ns)}. From here on the engine may give one"
            " request another's KV, so its answers cannot be trusted."
        ),
        do_now=(
            "Stop sending requests to this engine and restart it: outputs since then may mix requests.",
            "Keep a recording (monitor record) or the journal: it holds the events that contradict each other.",
        ),
        change=(
            f"It is a defect of the engine{f' ({named(ledger)})' if named(ledger) else ''}: report it with a bundle"
            " (monitor bundle TARGET FILE) and the block's story"
            f" (monitor explain block {first.anomaly.block if first.anomaly.block >= 0 else 'ID'}).",
        ),
        wont_help=("Lowering the load, or a larger pool.",),
        missing="the events that were lost: the contradiction may be in them" if ledger.losses else "",
    )


def _in_words(found: FoundAnomaly) -> str:
    block = f"block {found.anomaly.block} " if found.anomaly.block >= 0 else ""
    return f"{block}{found.anomaly.what}: {found.anomaly.detail}"
