"""Memory that is never freed: a module for each way in which blocks stay.

connector.py     what a KV connector asked to be kept: leak.finished-held, leak.remote-load-lost, leak.idle-not-polled
unaccounted.py   what nobody owns: leak.unaccounted
by_figures.py    what usage alone tells, where there is no stream: leak.finished-held, likely

A block is in one of these findings at most: its holder decides in which.
"""

from __future__ import annotations

from collections.abc import Iterator

from monitor.detectors.judgement import Judgement
from monitor.detectors.leak import by_figures, connector, unaccounted
from monitor.detectors.thresholds import Settings
from monitor.ledger.ledger import EngineLedger


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """The leaks of one engine."""
    if ledger.has_stream:
        yield from connector.judge(ledger, settings)
        yield from unaccounted.judge(ledger, settings)
    elif ledger.samples:
        yield from by_figures.judge(ledger, settings)
