"""Requests, or the whole engine, that do not move.

engine.py       steps stop: stuck.engine-stalled
queue.py        the head of the queue lacks blocks: stuck.never-fits, stuck.parked-loads, stuck.head-of-line
outside.py      what is waited for comes from outside: stuck.remote-load, stuck.lost-wakeup, stuck.promotion-starved,
                stuck.grammar
running.py      let in, and getting nowhere: stuck.zero-token, stuck.encoder-budget, stuck.self-preempt
front_end.py    never reaches the scheduler: stuck.front-end
ranks.py        as engine.py, beside ranks of the same server that go on: stuck.rank-diverged
by_figures.py   where there is no stream: stuck.never-fits and stuck.engine-stalled, likely

How long a request stands still is counted until the scheduler is last known to have gone over its queue: one that
cannot look is stalled, and its requests are not stuck by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.detectors.stuck import (
    engine_stalled,
    external_waits,
    front_end,
    queue_head,
    running,
    stalls_from_metrics,
)
from kvscope.monitor.detectors.stuck.waiting_requests import living
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is stuck in one engine."""
    if ledger.has_stream:
        alive = living(ledger)
        for module in (queue_head, external_waits, running, front_end, engine_stalled):
            yield from module.judge(ledger, settings, alive)
    elif ledger.samples:
        yield from stalls_from_metrics.judge(ledger, settings)
