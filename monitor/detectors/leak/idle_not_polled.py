"""leak.idle-not-polled: an engine with nothing to run does not ask its KV connector, so that no completion arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.connector_holds import NOT_ASKED_S, connector_holds, connector_text
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
from kvscope.monitor.detectors.outside_pace import MORE_TIME
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.outside_waits import ANOTHER_KIND
from kvscope.monitor.state.records import Deferral
from kvscope.monitor.text import counted, duration, percent

TRANSFER_END: Final = "the connector's own record of the transfers: one that still sends looks the same"
MOST_CHANCE: Final = 1 / (1 + ANOTHER_KIND)
"""The chance that one which counts had ended after the sleep, at the most."""
SEND_A_REQUEST: Final = (
    "Send the engine any one-token request: while it runs, the engine polls its connector and frees the blocks.",
)
KEEP_IT_AWAKE: Final = (
    "Keep the engine from going idle: send a request with max_tokens 1 every few seconds (a vLLM prefill instance"
    " sleeps without requests, #41180).",
)


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

    min_late = Threshold(
        3,
        "requests",
        "one transfer may have ended just after the engine was woken. Fewer count if they were reported so soon after a"
        " long sleep that this is as unlikely",
    )
    remember_s = Threshold(
        600, "s", "an engine falls asleep again after each request, which come minutes apart at night"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the connector keeps while the engine is idle and does not ask, or else kept as it woke."""
        if not ledger.has_stream:
            return
        now, holds = list[Judgement](), connector_holds(ledger)
        if holds.idle:
            held = {deferral.request for deferral in self._held_before(ledger, settings, holds.sending)}
            sending = [deferral for deferral in holds.sending if deferral.request not in held]
            now = [*self._judge_idle(ledger, settings, sending)]
        fires = any(not judgement.pending for judgement in now)
        yield from now if fires else [*self._judge_woken(ledger, settings)] or now

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
        missing = MORE_TIME if first else "the lost events" if state.damaged else "" if over else TRANSFER_END
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
            do_now=SEND_A_REQUEST,
            change=KEEP_IT_AWAKE,
            wont_help=(
                "Waiting: nothing changes until a request arrives.",
                "Inspecting the consumer: the engine does not read its confirmations.",
                "A lease: the engine checks it only when it wakes.",
                "Resetting the prefix cache: it fails while these blocks are referenced.",
            ),
            missing=missing,
        )

    def _judge_woken(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Judge sleeps that are over: the connector reported as soon as it was asked again."""
        remember, many = settings(self.remember_s), settings(self.min_late)
        late = [
            one
            for one in ledger.beats.late_sends.recent
            if one.slept_s >= NOT_ASKED_S and ledger.age_s(one.sent.ended_ns) < remember
        ]
        requests = tuple(dict.fromkeys(one.sent.id for one in late))
        sleeps = len({one.slept_since_ns for one in late})
        if sleeps < 2 or prod(one.chance for one in late) > MOST_CHANCE**many:
            return  # one sleep that is over may be the last
        at, first = ledger.at, late[0]
        longest = max(late, key=lambda one: one.slept_s)
        usable = ledger.state.total - ledger.state.reserved
        kept_then: Counter[int] = Counter()
        for one in late:
            kept_then[one.at] += one.sent.blocks
        most_at, most = max(kept_then.items(), key=lambda item: item[1])
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            since_ns=ledger.wall(first.slept_since_ns),
            position=at(first.at),
            requests=requests,
            blocks=(),
            evidence=(
                Evidence("requests_reported_late", len(requests), "requests", position=at(late[-1].at)),
                Evidence("sleeps", sleeps, "sleeps", position=at(late[-1].at)),
                Evidence("longest_sleep_s", round(longest.slept_s, 1), "s", position=at(longest.at)),
                Evidence("most_blocks_held", most, "blocks", position=at(most_at)),
                Evidence("most_share_of_pool", round(most / usable, 4), "of the pool", position=at(most_at)),
            ),
            explanation=(
                f"The idle engine slept with kept blocks {sleeps} times, for up to"
                f" {duration(longest.slept_s)}, and did not poll {connector_text(ledger)}. When a request woke it, the"
                f" connector reported {counted(len(requests), 'transfer')} at once. These kept up to"
                f" {counted(most, 'block')} ({percent(most / usable)} of the pool) through a sleep."
            ),
            do_now=SEND_A_REQUEST,
            change=KEEP_IT_AWAKE,
            wont_help=(
                "Inspecting the consumer: the engine does not read its confirmations.",
                "A lease: the engine checks it only when it wakes.",
            ),
            missing=TRANSFER_END if not ledger.state.damaged else "the lost events",
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
