"""Memory that is never freed: a module for each way in which blocks stay.

connector.py     what a KV connector asked to be kept: leak.finished-held, leak.remote-load-lost, leak.idle-not-polled
leases.py        what came back only by the end of a lease: leak.lease-burst
fences.py        what waits for a step that is over: leak.deferred-free-stalled
sessions.py      what sessions keep between their turns: leak.session-pinned
pins.py          what cannot be evicted from an outer tier: leak.external-pins
encoder.py       what waiting requests have in the encoder's cache: leak.encoder-cache
unaccounted.py   what nobody owns: leak.unaccounted, leak.rising-floor
by_figures.py    what usage alone tells, where there is no stream: leak.finished-held, leak.rising-floor, likely

A block is in one of these findings at most: its holder decides in which.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.leak import (
    connector,
    encoder,
    fences,
    leaks_from_metrics,
    leases,
    pins,
    sessions,
    unaccounted,
)
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """The leaks of one engine."""
    if ledger.has_stream:
        for way in (connector, leases, fences, sessions, pins, encoder, unaccounted):
            yield from way.judge(ledger, settings)
    elif ledger.samples:
        yield from leaks_from_metrics.judge(ledger, settings)
