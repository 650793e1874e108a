"""State in, judgements out: one module or package a family of the incident catalogue, and told.py for what is
only told. No I/O, no clock, no memory of their own.

Each family's `judge` looks at one engine's ledger and yields a Judgement for each trouble that it sees now; what a
trouble's life is, over time, is kvscope.monitor.findings' business. No detector knows which faults an engine has on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvscope.monitor.detectors import blind, collapse, corrupt, held_by_design, leak, reported, sizing, stuck, thrash
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.stuck.rank_diverged import told_apart
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger

FAMILIES = (leak, stuck, thrash, collapse, corrupt, sizing, held_by_design, blind, reported)


def judge(ledger: EngineLedger, settings: Settings, siblings: Sequence[EngineLedger] = ()) -> Iterator[Judgement]:
    """All that every detector has to say about the engine now. siblings: the other ranks of its server."""
    for family in FAMILIES:
        for judged in family.judge(ledger, settings):
            yield told_apart(judged, siblings, settings)
