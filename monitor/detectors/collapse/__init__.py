"""What falls from full to nothing: usage, or what the prefix cache gives.

lockstep.py        alike requests end together, and the next wave queues: collapse.lockstep
preempt_all.py     all that run are preempted at once: collapse.preempt-all
prefix_hits.py     what is cached is computed again: collapse.prefix-hits
cache_flushed.py   what is needed is pushed out of the cache: collapse.cache-flushed
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.collapse import cache_flushed, lockstep, preempt_all, prefix_hits
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """The collapses of one engine."""
    for module in (lockstep, preempt_all, prefix_hits, cache_flushed):
        yield from module.judge(ledger, settings)
