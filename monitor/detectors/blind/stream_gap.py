"""blind.stream-gap: events were lost."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import AnomalyKind
from ..detector import Detector, Settings, Threshold
from ..judgement import Evidence, Judgement


class StreamGap(Detector[Judgement]):
    """Events that were permanently lost.

    Sees: batches that were lost for good in the last minutes, or since the last complete audit.
    Confirmed when: always, since batches are numbered.
    """

    code = "blind.stream-gap"
    severity = "info"
    title = "Events were lost"
    requires = ("stream",)  # be it that all of it was lost
    outlasts_epoch = True

    remember_s = Threshold(600, "s", "figures of the last minutes may depend on lost events")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the losses that numbers may still rest on."""
        remember_ns = settings(self.remember_s) * 1e9
        losses = [
            loss for loss in ledger.losses if ledger.uncertain_since_ns or ledger.now_ns - loss.at_ns < remember_ns
        ]
        if not losses:
            return
        batches = sum(loss.batches for loss in losses)
        unreadable = [found for found in ledger.anomalies if found.anomaly.kind is AnomalyKind.UNREADABLE]
        if ledger.uncertain_since_ns:
            since = clock_time(ledger.uncertain_since_ns)
            state = f"Figures since {since} may be wrong until the engine's next complete audit."
        else:
            state = "The state is exact again. The events in between are unknown."
        yield self.finding(
            ledger,
            since_ns=losses[0].at_ns,
            position=losses[0].position,
            evidence=(
                Evidence("batches_lost", batches, "batches", position=losses[-1].position),
                Evidence("events_dropped_in_engine", ledger.dropped_events, "events", position=losses[-1].position),
                *(
                    Evidence("lost_at_stage", loss.stage.name.lower(), "", "stream", loss.position)
                    for loss in losses[:3]
                ),
                *(
                    Evidence("unreadable_batch", f.anomaly.detail, "", "stream", str(f.position))
                    for f in unreadable[:3]
                ),
            ),
            explanation=(
                f"{counted(batches, 'batch', 'batches')} of events {'was' if batches == 1 else 'were'} lost for good."
                f" {state}"
            ),
        )
