"""What the observer itself cannot see. Information, never above."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import clock_time, counted

STREAM_GAP = "blind.stream-gap"
UNREADABLE: Final = "what the engine sent cannot be read"
"""The ledger's name for events not laid out as the contract says: lost to us, and nothing known of the engine's own
memory."""


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What was lost of one engine's stream."""
    remember_ns = settings(STREAM_GAP, "remember_s") * 1e9
    losses = [loss for loss in ledger.losses if ledger.uncertain_since_ns or ledger.now_ns - loss.at_ns < remember_ns]
    if not losses:
        return
    batches = sum(loss.batches for loss in losses)
    unreadable = [found for found in ledger.anomalies if found.anomaly.what == UNREADABLE]
    if ledger.uncertain_since_ns:
        since = clock_time(ledger.uncertain_since_ns)
        state = f"Figures since {since} may be wrong until the engine's next complete audit."
    else:
        state = "The state is exact again; what happened in between is not known."
    yield Judgement(
        code=STREAM_GAP,
        engine=ledger.engine,
        verdict="confirmed",
        since_ns=losses[0].at_ns,
        position=losses[0].position,
        evidence=(
            Evidence("batches_lost", batches, "batches"),
            Evidence("events_dropped_in_engine", ledger.dropped_events, "events"),
            *(Evidence("lost_at_stage", loss.stage.name.lower(), "", "stream", loss.position) for loss in losses[:3]),
            *(Evidence("unreadable", f.anomaly.detail, "", "stream", str(f.position)) for f in unreadable[:3]),
        ),
        explanation=(
            f"{counted(batches, 'batch', 'batches')} of events {'was' if batches == 1 else 'were'} lost for good."
            f" {state}"
        ),
        do_now=("Nothing, if it stays at this.",),
        change=("If it goes on: give the engine a journal (--journal DIR), from which gaps are filled.",),
    )
