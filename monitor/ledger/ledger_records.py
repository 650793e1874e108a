"""The small records that a ledger keeps: positions in the stream, points of the recent past, losses, anomalies."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvscope.monitor.events.kinds import Stage
from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.state.records import Anomaly


class Position(NamedTuple):
    """A position in an engine's stream: the `event`-th of batch `sequence` of an epoch."""

    epoch: int
    sequence: int
    event: int = 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.sequence}/{self.event}"


class FoundAnomaly(NamedTuple):
    """An impossible transition, where and when it was found."""

    position: Position
    at_ns: int
    anomaly: Anomaly


class Loss(msgspec.Struct, frozen=True):
    """Batches that no source could supply: how many, at which stage, noticed when, and the last one before them."""

    batches: int
    stage: Stage
    at_ns: int
    position: str

    @property
    def after(self) -> int:
        """Return the sequence of the last batch before them."""
        return int(self.position.split("/")[1])


class Point(NamedTuple):
    """The pool and the queues at one moment of the recent past, and the totals until then."""

    at_ns: int
    balance: Balance
    running: int
    waiting: int
    finished_requests: int
    preemptions: int
    computed_tokens: int
    output_tokens: int
    allocation_failures: int
    steps: int
    waiting_by: tuple[tuple[int, int], ...] = ()
    """By cause, how many wait for it."""
    limits: tuple[tuple[int, int], ...] = ()
    """Steps by what kept each from being larger."""
    unused_tokens: int = -1
    """Free room in the blocks of live requests, in tokens, or -1 where that is unknown."""
    position: Position | None = None
    """The last event until then."""
