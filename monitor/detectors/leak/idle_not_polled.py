"""leak.idle-not-polled: an engine with nothing to run does not ask its KV connector, so that no completion arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.connector_holds import connector_holds, connector_text
from kvscope.monitor.detectors.leak.deferred_blocks import (
    Kept,
    kept,
    may_be_first_transfers,
    oldest_deferral_text,
    overdue_deferrals,
    overdue_when_polled,
    received_for_s,
    send_limit,
)
from kvscope.monitor.detectors.outside_pace import UNKNOWN_PACE
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral
from kvscope.monitor.text import counted, duration, percent

TRANSFER_END: Final = "the connector's own record of the transfers: one that still sends looks the same"


class IdleNotPolled(Detector[Judgement]):
    """Blocks kept because an idle engine does not ask its connector."""

    code = "leak.idle-not-polled"
    severity = "warning"
    title = "An idle engine does not poll its KV connector"
    requires = ("stream",)
    position = 120

    grace_s = Threshold(
        10, "s", "an idle engine polls its connector many times a second, and heartbeats report it once a second"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what is kept while the engine is idle and does not ask."""
        if ledger.has_stream:
            holds = connector_holds(ledger)
            if holds.idle:
                held = {deferral.request for deferral in self._held_before(ledger, settings, holds.sending)}
                sending = [deferral for deferral in holds.sending if deferral.request not in held]
                yield from self._judge_idle(ledger, settings, sending)

    def _held_before(self, ledger: EngineLedger, settings: Settings, sending: list[Deferral]) -> list[Deferral]:
        """Return those that the connector kept for too long while it was polled: leak.finished-held."""
        return overdue_when_polled(ledger, settings, sending)

    def _judge_idle(self, ledger: EngineLedger, settings: Settings, sending: list[Deferral]) -> Iterator[Judgement]:
        state = ledger.state
        unpolled = ledger.unpolled_s()
        grace = settings(self.grace_s)

        def beyond_transfer_s(deferral: Deferral) -> tuple[float, float]:
            """How long the engine has not asked since the transfer should have ended, and how long it may not."""
            takes_s = send_limit(ledger, settings, deferral, self.grace_s).allowed_s - grace
            return min(unpolled, received_for_s(ledger, deferral.since_ns) - takes_s), grace

        late, pending = overdue_deferrals(ledger, sending, beyond_transfer_s)
        if not late:
            return
        held, at = kept(ledger, late), ledger.at
        count = len(held.deferrals)
        assert state.heartbeat is not None
        over = all(0 < deferral.lease_deadline_ns < state.heartbeat.at_ns for deferral in held.deferrals)
        first = may_be_first_transfers(ledger, settings, held)
        missing = UNKNOWN_PACE if first else "the lost events" if state.damaged else "" if over else TRANSFER_END
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="cannot-tell" if first else "likely" if missing else "confirmed",
            severity="info" if first else None,
            pending=pending,
            since_ns=ledger.wall(state.heartbeat.at_ns) - round(unpolled * 1e9),
            position=at(ledger.beats.polled_at),
            requests=held.ids,
            blocks=tuple(held.blocks),
            evidence=_unpolled_evidence(ledger, held, unpolled),
            explanation=(
                f"The engine is idle and has not polled {connector_text(ledger)} for {duration(unpolled)}:"
                f" {counted(count, 'finished request')} {'keeps' if count == 1 else 'keep'}"
                f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). The transfers may have"
                f" completed, but the engine does not ask. {oldest_deferral_text(ledger, held)}"
            ),
            do_now=(
                "Send the engine any one-token request: while it runs, the engine polls its connector and frees the"
                " blocks.",
            ),
            change=(
                "Keep the engine from going idle: send a request with max_tokens 1 every few seconds (a vLLM"
                " prefill instance sleeps without requests, #41180).",
            ),
            wont_help=(
                "Waiting: nothing changes until a request arrives.",
                "Inspecting the consumer: the engine does not read its confirmations.",
                "A lease: the engine checks it only when it wakes.",
                "Resetting the prefix cache: it fails while these blocks are referenced.",
            ),
            missing=missing,
        )


def _unpolled_evidence(ledger: EngineLedger, held: Kept, unpolled: float) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    assert state.heartbeat is not None
    return (
        Evidence("requests_held", len(held.deferrals), "requests", position=at(*held.kept_at)),
        Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
        Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
        Evidence("since_last_poll_s", round(unpolled, 1), "s", position=at(ledger.beats.polled_at)),
        Evidence("connector_polls", state.heartbeat.connector_polls, "polls", position=at(state.places.heartbeat)),
        Evidence("running", 0, "requests", position=at(state.places.moved)),
        Evidence("waiting", 0, "requests", position=at(state.places.moved)),
    )
