"""Which hub sends alerts, as one hub knows it: a lease in the tenant's bucket. No I/O and no clock.

Times are seconds of this hub's monotonic clock, and the rules are those of engines (lease_table.py): a lease is over
when none of its renewals was received for AGENT_LEASE_S, its holder stops relying on it after HOLD_S, and every write
is conditional on the record's revision.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..outputs.alerting.message import Silence
from .lease_table import AGENT_LEASE_S, HOLD_S, RENEW_LEASE_S

ALERTS_KEY: Final = "alerts"


class SentUpTo(msgspec.Struct, frozen=True):
    """The transitions that a receiver was sent: all up to a sequence of the stream, and some `beyond` it."""

    sequence: int = 0
    beyond: list[int] = []

    def has(self, sequence: int) -> bool:
        """Return whether the receiver was sent that transition."""
        return sequence <= self.sequence or sequence in self.beyond


class HubRecord(msgspec.Struct, frozen=True):
    """The lease: its holder, empty once it was handed over, what it sent by receiver, and the silences in force."""

    hub: str
    instance: str
    sent: dict[str, SentUpTo] = {}
    silences: list[Silence] = []
    major: int = 1


class HubLease:
    """The lease as this run of `hub` knows it. Thread-safe for `holds`."""

    def __init__(self, hub: str, instance: str) -> None:
        self._hub = hub
        self._instance = instance
        self._revision = 0
        self._record = HubRecord("", "")
        self._received_s = 0.0
        self._held_s = -HOLD_S

    @property
    def record(self) -> HubRecord:
        """The lease as it was written last, by this hub or another."""
        return self._record

    def receive(self, record: HubRecord, revision: int, now_s: float) -> None:
        """Take the record from the bucket."""
        if revision <= self._revision:
            return
        self._record, self._revision, self._received_s = record, revision, now_s
        if (record.hub, record.instance) != (self._hub, self._instance):
            self._held_s = -HOLD_S

    def should_write(self, now_s: float, *, changed: bool) -> bool:
        """Return whether to renew the lease, or to try to get it."""
        if self.is_mine:
            return changed or now_s - self._held_s >= RENEW_LEASE_S
        return not self._record.hub or now_s - self._received_s >= AGENT_LEASE_S

    @property
    def is_mine(self) -> bool:
        """Whether this hub wrote it last, relied on or not."""
        return (self._record.hub, self._record.instance) == (self._hub, self._instance)

    @property
    def revision(self) -> int:
        """The revision that a write depends on."""
        return self._revision

    def to_write(self, sent: dict[str, SentUpTo], silences: list[Silence], *, leaving: bool = False) -> HubRecord:
        """Return the record that this hub writes."""
        holder = ("", "") if leaving else (self._hub, self._instance)
        return HubRecord(*holder, sent, silences)

    def written(self, record: HubRecord, revision: int, began_s: float) -> None:
        """Take what was written. `began_s`: when the write began."""
        self._record, self._revision, self._received_s = record, revision, began_s
        self._held_s = began_s if self.is_mine else -HOLD_S

    def holds(self, now_s: float) -> bool:
        """Return whether this hub may send alerts: no other can have the lease yet."""
        return now_s < self._held_s + HOLD_S
