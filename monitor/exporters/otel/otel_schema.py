"""The schema of the exporters in /metrics."""

from __future__ import annotations

from typing import NamedTuple


class OtlpFigures(NamedTuple):
    """One signal: traces, logs or metrics. Items are requests, findings and snapshots. `waiting` is their weight."""

    signal: str
    sent: int
    waiting: int
    dropped: int
