"""What the detectors of kept blocks have in common: which requests, how much, and whether it is too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral
from kvscope.monitor.text import clock_time, duration


class Kept(NamedTuple):
    """Deferrals, the oldest first, their blocks, and these as a share of the pool."""

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
    """Add up deferrals."""
    in_order = sorted(deferrals, key=lambda deferral: (deferral.since_ns, deferral.request))
    blocks = sorted(set().union(*(deferral.blocks for deferral in in_order)))
    return Kept(in_order, blocks, len(blocks) / (ledger.state.total - ledger.state.reserved))


def overdue_deferrals(
    deferrals: Iterable[Deferral], waited: Callable[[Deferral], tuple[float, float]]
) -> tuple[list[Deferral], bool]:
    """Return those that have waited for longer than they may, by `waited` (both in seconds), and False; if there are
    none, those beyond half of it, and True: they are pending.
    """
    times = [(*waited(deferral), deferral) for deferral in deferrals]
    over = [deferral for waits, may_wait, deferral in times if waits > may_wait]
    return (over, False) if over else ([deferral for waits, may_wait, deferral in times if waits > may_wait / 2], True)


def heard_s(ledger: EngineLedger, mono_ns: int) -> float:
    """Return the seconds from then until the engine was last seen: one that is silent may have done its part since."""
    return max(0.0, (ledger.heard_ns - ledger.wall(mono_ns)) / 1e9)


def oldest_deferral_text(ledger: EngineLedger, kept: Kept) -> str:
    """Describe since when the longest is kept."""
    first = kept.deferrals[0]
    since = clock_time(ledger.wall(first.since_ns))
    return f"The oldest, {first.id}, ended at {since}, {duration(ledger.age_s(first.since_ns))} ago."


def overdue_when_polled(ledger: EngineLedger, deferrals: Iterable[Deferral], grace_s: float) -> list[Deferral]:
    """Those that had been kept for longer than that when the engine last asked its connector."""
    beat = ledger.state.heartbeat
    polled_ns = (beat.at_ns if beat is not None else 0) - ledger.unpolled_s() * 1e9
    return [deferral for deferral in deferrals if (polled_ns - deferral.since_ns) / 1e9 > grace_s]
