"""Requests that wait for a fetch of KV from elsewhere, sorted by what is known of its end.

A request is in one of the two at most. That a fetch has ended, which separates stuck.lost-wakeup from
stuck.remote-load, only some engines report (COMPLETION_DELIVERED of a living request).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.detectors.outside_pace import taken_up_until_ns
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import Living
from kvscope.monitor.state.records import RequestState

TRANSFER_PROGRESS: Final = "whether the transfer still moves: a large one over a slow link takes as long"
PLANNED_BEFORE_NS: Final = 1_000_000_000
"""A step that was launched so shortly after the end of a fetch may have been planned before it."""


def could_report_until_ns(ledger: EngineLedger) -> int:
    """Return the last time, on the engine's clock, at which it could have reported the end of a wait: the launch of a
    step in flight, or else when the engine was last seen and not paused.
    """
    return ledger.looked_ns if ledger.state.in_flight else taken_up_until_ns(ledger)


def _engine_sleeps(ledger: EngineLedger, living: Living) -> bool:
    """Return whether the engine's own thread does nothing: its heart beats, and no step runs and no pass is made."""
    beat = ledger.state.heartbeat
    idle = beat is not None and beat.step_in_flight < 0 and not living.running
    return idle and ledger.beats.count > 0 and not ledger.beats.passes_advanced


def _not_noticed(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether the fetch has ended and the engine has since launched no step and unpinned nothing."""
    ended_ns = record.fetch_ended_ns
    looked = any(tier.unpinned_ns >= ended_ns for tier in ledger.state.tiers.values())
    return bool(ended_ns) and not looked and ended_ns + PLANNED_BEFORE_NS > ledger.state.launched_ns


def blocks_of_requests(records: list[RequestState]) -> list[int]:
    """Return the blocks of the requests, sorted."""
    return sorted({block for record in records for block in record.blocks})


class FetchWaits(NamedTuple):
    """Waiting requests by the state of their fetch: still under way, or ended while the engine sleeps."""

    under_way: list[RequestState]
    not_noticed: list[RequestState]


def fetch_waits(ledger: EngineLedger) -> FetchWaits:
    """Sort the requests that wait for KV that is fetched."""
    living = ledger.living()
    waits = FetchWaits([], [])
    fetching = [r for r in living.waiting if r.status == Status.WAITING_FOR_REMOTE_KVS and r.fetching_ns]
    if fetching:
        asleep = _engine_sleeps(ledger, living)
        for record in fetching:
            (waits.not_noticed if asleep and _not_noticed(ledger, record) else waits.under_way).append(record)
    return waits
