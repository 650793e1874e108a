"""State in, judgements out: one module or package a family of the incident catalogue, and told.py for what is
only told. No I/O, no clock, no memory of their own.

Each family's `judge` looks at one engine's ledger and yields a Judgement for each trouble that it sees now; what a
trouble's life is, over time, is monitor.findings' business. No detector knows which faults an engine has on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from monitor.detectors import blind, collapse, corrupt, held, leak, sizing, stuck, thrash, told
from monitor.detectors.judgement import Judgement
from monitor.detectors.stuck.ranks import told_apart
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger

FAMILIES = (leak, stuck, thrash, collapse, corrupt, sizing, held, blind, told)


def judge(ledger: EngineLedger, settings: Settings, siblings: Sequence[EngineLedger] = ()) -> Iterator[Judgement]:
    """All that every detector has to say about the engine now. siblings: the other ranks of its server."""
    for family in FAMILIES:
        for judged in family.judge(ledger, settings):
            yield told_apart(judged, siblings, settings)
