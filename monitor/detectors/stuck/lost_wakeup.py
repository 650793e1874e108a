"""stuck.lost-wakeup: the connector has reported that the fetch ended, and the engine sleeps on."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import duration, listed
from ...ledger.engine_ledger import EngineLedger
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..judgement import ENGINE_PAUSED, Alternative, Judgement, holds_what_it_needs, seen
from .head_of_line import HeadOfLine
from .waiting_requests import blocks_of_requests, fetch_waits, overdue_judgement, overdue_requests


class LostWakeup(StreamDetector[Judgement]):
    """Requests whose fetched KV is there while the engine sleeps.

    Sees: the connector reported the end of a fetch, and the engine, which is alive, has made no pass and no step since.
    Confirmed when: no event is missing.
    Likely when: events were lost.
    Not when: the engine makes passes (stuck.remote-load).
    """

    code = "stuck.lost-wakeup"
    severity = "error"
    title = "A fetch completed, but the engine sleeps"
    lab_only = True

    grace_s = Threshold(5, "s", "an engine that is woken makes a pass within milliseconds")
    alternatives = (
        ENGINE_PAUSED,
        Alternative("the fetch has not ended", "the connector reported its end"),
        Alternative("a long step", "no step is in flight"),
    )
    causes = Causes[Judgement]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fetches that ended and woke no engine."""
        unprocessed = fetch_waits(ledger).not_noticed
        state, at, beat = ledger.state, ledger.at, ledger.state.heartbeat
        awake_ns = max(ledger.looked_ns, state.mode_since_ns)
        if beat is None:
            return
        late = overdue_requests(
            ledger, unprocessed, lambda r: max(r.fetch_ended_ns, awake_ns), beat.at_ns, settings(self.grace_s)
        )
        if late is None:
            return
        count, blocks = len(late.records), blocks_of_requests(late.records)
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=late.records[0].fetch_ended_at,
            blocks=tuple(blocks),
            evidence=(
                seen("requests_waiting", count, "requests", at(*(record.fetch_ended_at for record in late.records))),
                seen("engine_asleep_s", round(late.age_s, 1), "s", at(late.records[0].fetch_ended_at)),
                seen("scheduler_passes", beat.scheduler_passes, "passes", at(state.places.heartbeat)),
                seen("last_step", state.last_step, "step", at(state.places.completed)),
                seen("blocks_held", len(blocks), "blocks", at(*(record.since_at for record in late.records))),
            ),
            explanation=(
                f"The KV connector reported that the fetch of {listed(late.ids)} ended, but the engine has made no"
                f" scheduler pass and no step for {duration(late.age_s)} while"
                f" {'it waits' if count == 1 else 'they wait'}. The process is alive, so the wake-up was lost."
            ),
        )
