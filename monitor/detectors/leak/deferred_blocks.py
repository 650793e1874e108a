"""Blocks kept for finished requests: which, how many, by whom, and whether for too long. Shared by the leak codes.

What a KV connector keeps is sorted by the party whose report of completion is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ...base.text import clock_time, duration
from ...contract.kinds import Holder
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_account import share_of_pool, without_live_holder
from ...ledger.records import Deferral, RequestState
from ..detector import Settings, Threshold
from ..engine_pace import (
    FEWEST_SEEN,
    HELD_GRACE_S,
    UNPROVEN_SHARE,
    UNSEEN_TOGETHER_S,
    OutsideWaitLimit,
    at_pace_s,
    may_be_slow,
    outside_wait_limit,
    taken_up_until_ns,
)


class ConnectorHolds(NamedTuple):
    """Deferrals of ended requests by what the connector owes: that it has sent, or has fetched, their KV. `polled`:
    the engine asks the connector. `idle`: no request runs or waits.
    """

    sending: list[Deferral]
    fetching: list[Deferral]
    polled: bool
    idle: bool


def connector_holds(ledger: EngineLedger) -> ConnectorHolds:
    """Sort what is kept for the connector."""
    sending: list[Deferral] = []
    fetching: list[Deferral] = []
    requests = ledger.state.requests
    for deferral in ledger.state.deferrals.values():
        record = requests.get(deferral.request)
        # The ledger forgets a request once all of its blocks were detached: it has ended.
        if deferral.holder == Holder.CONNECTOR and (record is None or record.is_finished):
            (fetching if record is not None and record.fetching_ns else sending).append(deferral)
    if not (sending or fetching):
        return ConnectorHolds(sending, fetching, polled=False, idle=False)
    return ConnectorHolds(
        sending,
        fetching,
        polled=ledger.unpolled_s() < NOT_ASKED_S,
        idle=not any(record.is_running or record.is_waiting for record in requests.values()),
    )


NOT_ASKED_S: Final = 3.0
"""An engine asks in each pass, and heartbeats come once a second: after so long without, it does not ask."""


def connector_text(ledger: EngineLedger) -> str:
    """Name the connector in a sentence."""
    name = ledger.description.kv_connector
    return f"the KV connector ({name})" if name else "the KV connector"


def records_of(ledger: EngineLedger, deferrals: list[Deferral]) -> list[RequestState]:
    """Return the requests of the deferrals, as far as the ledger still has them."""
    requests = ledger.state.requests
    return [requests[deferral.request] for deferral in deferrals if deferral.request in requests]


HELD_LEASE_SLACK_S: Final = Threshold(
    5, "s", "an engine checks for expired leases between steps, and one step can take seconds"
)
"""A threshold of leak.finished-held."""


class Kept(NamedTuple):
    """Deferrals, the oldest first, their blocks without those that a live request holds too, and these blocks as a
    share of the pool.
    """

    deferrals: list[Deferral]
    blocks: list[int]
    share: float

    @property
    def ids(self) -> tuple[str, ...]:
        """The requests that they are of."""
        return tuple(deferral.id for deferral in self.deferrals)

    @property
    def kept_at(self) -> list[int]:
        """Where each was announced."""
        return [deferral.since_at for deferral in self.deferrals]

    @property
    def blocks_at(self) -> list[int]:
        """Where the blocks of each became these."""
        return [deferral.changed_at for deferral in self.deferrals]


def kept(ledger: EngineLedger, deferrals: Iterable[Deferral]) -> Kept:
    """Add up deferrals. A block that a live request holds too counts under that one, as everywhere."""
    in_order = sorted(deferrals, key=lambda deferral: (deferral.since_ns, deferral.request))
    state = ledger.state
    blocks = without_live_holder(state, set().union(*(deferral.blocks for deferral in in_order)))
    return Kept(in_order, blocks, share_of_pool(len(blocks), state.usable) or 0.0)


def overdue_deferrals(
    ledger: EngineLedger, deferrals: Iterable[Deferral], waited: Callable[[Deferral], tuple[float, float]]
) -> tuple[list[Deferral], bool]:
    """Return those that have waited for longer than they may, by `waited` (both in seconds), and False. If there are
    none, return those beyond half of it, and True: they are pending.

    After a loss, those announced before it are pending: their end may be among the lost events.
    """
    certain = ledger.state.is_certain_deferral
    times = [(*waited(deferral), deferral) for deferral in deferrals]
    over = [deferral for waits, may_wait, deferral in times if waits > may_wait and certain(deferral)]
    return (over, False) if over else ([deferral for waits, may_wait, deferral in times if waits > may_wait / 2], True)


def overdue_sends(ledger: EngineLedger, settings: Settings) -> tuple[list[Deferral], bool]:
    """Return what a connector that is asked keeps for too long for requests that ended, and whether it is pending.

    While an engine with work does not ask, its steps have stopped. Blocks that came due after an idle engine's last
    poll are leak.idle-not-polled.
    """
    holds = connector_holds(ledger)
    sending = holds.sending
    if holds.idle and not holds.polled:
        sending = overdue_when_polled(ledger, settings, sending)
    elif not holds.polled and ledger.state.in_flight:
        return [], False
    return overdue_deferrals(ledger, sending, lambda deferral: _beyond_lease_s(ledger, settings, deferral))


def _beyond_lease_s(ledger: EngineLedger, settings: Settings, deferral: Deferral) -> tuple[float, float]:
    """Return how long beyond its lease, or its request's end if it has none, and how long it may.

    A consumer renews a lease while the request waits in its own queue: beyond the lease only the pace of others counts.
    """
    slack = at_pace_s(ledger, settings, HELD_LEASE_SLACK_S)
    if deferral.lease_deadline_ns > 0:
        return received_for_s(ledger, deferral.lease_deadline_ns), slack
    limit = send_limit(ledger, settings, deferral, HELD_GRACE_S)
    renewed_s = ledger.description.kv_lease_s
    return received_for_s(ledger, limit.still_since_ns), max(limit.allowed_s, renewed_s + slack if renewed_s else 0.0)


def send_limit(ledger: EngineLedger, settings: Settings, deferral: Deferral, grace: Threshold) -> OutsideWaitLimit:
    """Return how long the connector may take to send the blocks of a deferral without a lease."""
    history = ledger.outside_waits.sends
    return outside_wait_limit(ledger, settings, history, grace, deferral.since_ns, max(len(deferral.blocks), 1))


def may_be_first_transfers(ledger: EngineLedger, settings: Settings, held: Kept) -> bool:
    """Return whether all that is kept may be slow transfers, none of which is beyond its lease. While few have ended,
    the lease is the only sign of how long one may take. A consumer that renews it may have a queue as long as its
    clients are patient.
    """
    leases = [d.lease_deadline_ns for d in held.deferrals if d.lease_deadline_ns > 0]
    if any(received_for_s(ledger, deadline_ns) > 0 for deadline_ns in leases):
        return False
    many = held.share >= settings(UNPROVEN_SHARE) and len(held.deferrals) >= settings(FEWEST_SEEN)
    lacking = any(record.is_waiting and record.blocks_needed for record in ledger.state.requests.values())
    waits = [
        (received_for_s(ledger, deferral.since_ns), send_limit(ledger, settings, deferral, HELD_GRACE_S))
        for deferral in held.deferrals
    ]
    few_ended = all(limit.information_s for _, limit in waits)
    if few_ended and ledger.description.kv_lease_s:
        return all(seconds < settings(UNSEEN_TOGETHER_S) for seconds, _ in waits)
    under_lease = len(leases) == len(held.deferrals)
    return (under_lease and few_ended) or may_be_slow(waits, many and lacking)


def received_for_s(ledger: EngineLedger, mono_ns: int) -> float:
    """Return the seconds from then until the engine was last seen: one that is silent may have done its part since, and
    one that is paused does its part later.
    """
    return max(0.0, (taken_up_until_ns(ledger) - mono_ns) / 1e9)


def oldest_deferral_text(ledger: EngineLedger, kept: Kept) -> str:
    """Describe since when the longest is kept."""
    first = kept.deferrals[0]
    since = clock_time(ledger.wall(first.since_ns))
    return f"The oldest, {first.id}, ended at {since}, {duration(ledger.age_s(first.since_ns))} ago."


def overdue_when_polled(ledger: EngineLedger, settings: Settings, deferrals: Iterable[Deferral]) -> list[Deferral]:
    """Return those that had been kept for too long when the engine last polled its connector."""
    beat = ledger.state.heartbeat
    polled_ns = (beat.at_ns if beat is not None else 0) - ledger.unpolled_s() * 1e9
    return [
        deferral
        for deferral in deferrals
        if (polled_ns - deferral.since_ns) / 1e9 > send_limit(ledger, settings, deferral, HELD_GRACE_S).allowed_s
    ]
