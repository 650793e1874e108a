"""Memory that is divided up wrongly, and advice that would do so.

pool.py    what requests ask of the pool: sizing.kv-too-small, sizing.block-inflated
bill.py    what the device's memory went to: sizing.kv-too-large, sizing.overreserved, sizing.bad-suggestion,
           sizing.elsewhere
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.sizing import memory_sizing, pool_sizing
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is wrong with one engine's sizes."""
    if ledger.has_stream:
        yield from pool_sizing.judge(ledger, settings)
    yield from memory_sizing.judge(ledger, settings)
