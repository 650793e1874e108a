"""stuck.lost-wakeup: the connector has reported that the fetch ended, and the engine sleeps on."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.fetch_waits import blocks_of_requests, fetch_waits
from kvscope.monitor.detectors.stuck.head_of_line import HeadOfLine
from kvscope.monitor.detectors.stuck.waiting_requests import overdue_judgement, overdue_requests
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import holds_what_it_needs
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import duration, listed


class LostWakeup(Detector[Judgement]):
    """Requests whose fetched KV is there while the engine sleeps."""

    code = "stuck.lost-wakeup"
    severity = "error"
    title = "A fetch completed, but the engine sleeps"
    requires = ("stream",)
    position = 240

    grace_s = Threshold(5, "s", "an engine that is woken makes a pass within milliseconds")

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return Causes[Judgement]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fetches that ended and woke no engine."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings, fetch_waits(ledger).not_noticed)

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, unprocessed: list[RequestState]
    ) -> Iterator[Judgement]:
        state, at, beat, awake_ns = ledger.state, ledger.at, ledger.state.heartbeat, ledger.looked_ns
        if beat is None:
            return
        late = overdue_requests(
            ledger, unprocessed, lambda r: max(r.fetch_ended_ns, awake_ns), beat.at_ns, settings(self.grace_s)
        )
        if late is None:
            return
        count, blocks = len(late.records), blocks_of_requests(late.records)
        yield overdue_judgement(
            ledger,
            late,
            code=self.code,
            began_at=late.records[0].fetch_ended_at,
            blocks=tuple(blocks),
            evidence=(
                Evidence(
                    "requests_waiting",
                    count,
                    "requests",
                    position=at(*(record.fetch_ended_at for record in late.records)),
                ),
                Evidence("engine_asleep_s", round(late.age_s, 1), "s", position=at(late.records[0].fetch_ended_at)),
                Evidence("scheduler_passes", beat.scheduler_passes, "passes", position=at(state.places.heartbeat)),
                Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
                Evidence(
                    "blocks_held", len(blocks), "blocks", position=at(*(record.since_at for record in late.records))
                ),
            ),
            explanation=(
                f"The KV connector reported that the fetch of {listed(late.ids)} ended, but the engine has made no"
                f" scheduler pass and no step for {duration(late.age_s)} while"
                f" {'it waits' if count == 1 else 'they wait'}. The process is alive, so the wake-up was lost."
            ),
            do_now=(
                "Send the engine another request whose prompt is fetched, such as the same one again: the end of"
                " that fetch wakes the engine, which then finds the earlier one.",
            ),
            change=(
                "This is a bug between the connector and the engine's loop: report it with the request's history"
                " (monitor explain request ID), and upgrade the connector (LMCache #4759).",
                "Until then, keep the engine awake: send a short request whose prompt is fetched every few seconds.",
            ),
            wont_help=(
                "Waiting: nothing wakes the engine until another request arrives.",
                "Inspecting the other end of the fetch: it has delivered.",
            ),
        )
