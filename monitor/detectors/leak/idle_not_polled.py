"""leak.idle-not-polled: an engine with nothing to run does not ask its KV connector, so that no completion arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Final

from ...base.text import counted, duration, percent
from ...ledger.durations import ANOTHER_KIND
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Deferral
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import MORE_TIME
from ..judgement import LIVE_REQUEST, Alternative, Evidence, Judgement, seen
from .deferred_blocks import (
    NOT_ASKED_S,
    Kept,
    connector_holds,
    connector_text,
    kept,
    may_be_first_transfers,
    oldest_deferral_text,
    overdue_deferrals,
    overdue_when_polled,
    received_for_s,
    send_limit,
)

TRANSFER_END: Final = "the connector's own record of the transfers: one that still sends looks the same"
MOST_CHANCE: Final = 1 / (1 + ANOTHER_KIND)
"""The chance that one which counts had ended after the sleep, at the most."""


class IdleNotPolled(StreamDetector[Judgement]):
    """Blocks that stay because an idle engine does not poll its connector.

    Sees: blocks kept for a connector that an engine without requests no longer polls, or several transfers whose end
    the connector reported as soon as the engine woke.
    Confirmed when: the leases of all these blocks have expired, so that no transfer still needs them.
    Likely when: nothing shows that the transfers ended, the sleep is over, or events were lost.
    Cannot tell: first transfers of an engine may simply be slow.
    Not when: they were overdue while the engine still polled (leak.finished-held).
    """

    code = "leak.idle-not-polled"
    severity = "warning"
    title = "An idle engine does not poll its KV connector"
    moves_kv = "send"

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
    alternatives = (
        LIVE_REQUEST,
        Alternative(
            "a transfer that is still running",
            "the engine has not polled its connector since, or was told of the end as soon as it did",
        ),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the connector keeps while the engine is idle and does not ask, or else kept as it woke."""
        now, holds = list[Judgement](), connector_holds(ledger)
        if holds.idle:
            # What it kept for too long while it was polled is leak.finished-held.
            held = {deferral.request for deferral in overdue_when_polled(ledger, settings, holds.sending)}
            sending = [deferral for deferral in holds.sending if deferral.request not in held]
            now = [*self._judge_idle(ledger, settings, sending)]
        fires = any(not judgement.pending for judgement in now)
        yield from now if fires else [*self._judge_woken(ledger, settings)] or now

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
        yield self.finding(
            ledger,
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
        yield self.finding(
            ledger,
            since_ns=ledger.wall(first.slept_since_ns),
            position=at(first.at),
            requests=requests,
            blocks=(),
            evidence=(
                seen("requests_reported_late", len(requests), "requests", at(late[-1].at)),
                seen("sleeps", sleeps, "sleeps", at(late[-1].at)),
                seen("longest_sleep_s", round(longest.slept_s, 1), "s", at(longest.at)),
                seen("most_blocks_held", most, "blocks", at(most_at)),
                seen("most_share_of_pool", round(most / usable, 4), "of the pool", at(most_at)),
            ),
            explanation=(
                f"The idle engine slept with kept blocks {sleeps} times, for up to {duration(longest.slept_s)}, and did"
                f" not poll {connector_text(ledger)}. When a request woke it, the connector reported"
                f" {counted(len(requests), 'transfer')} at once. These kept up to {counted(most, 'block')}"
                f" ({percent(most / usable)} of the pool) through a sleep."
            ),
            case="When it has work again",
            missing=TRANSFER_END if not ledger.state.damaged else "the lost events",
        )


def _unpolled_evidence(ledger: EngineLedger, held: Kept, unpolled: float) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    assert state.heartbeat is not None
    return (
        seen("requests_held", len(held.deferrals), "requests", at(*held.kept_at)),
        seen("blocks_held", len(held.blocks), "blocks", at(*held.blocks_at)),
        seen("share_of_pool", round(held.share, 4), "of the pool", at(*held.blocks_at)),
        seen("since_last_poll_s", round(unpolled, 1), "s", at(ledger.beats.polled_at)),
        seen("connector_polls", state.heartbeat.connector_polls, "polls", at(state.places.heartbeat)),
        seen("running", 0, "requests", at(state.places.moved)),
        seen("waiting", 0, "requests", at(state.places.moved)),
    )
