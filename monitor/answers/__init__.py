"""How answers are made: views out of a ledger, be it of now or of a moment that is past. Nothing here changes one.

engines.py      an engine at a glance
requests.py     requests, and one request's life
blocks.py       what every block is, and why one is held
points.py       the pool and the queues over time
happenings.py   what happened, event by event
explain.py      what happened, in sentences
memory.py       the device's memory, and what a load asks of the pool
moments.py      a time or a position, as it is asked for
recent.py       the recent past, from memory
past.py         the past, from memory or from history
stretch.py      what a stretch of the past was like, in figures
compare.py      two of them compared
"""

from __future__ import annotations


class NotKnown(LookupError):
    """There is no such engine, request, block or moment; the message says what there is."""


class BadQuestion(ValueError):
    """What was asked makes no sense; the message says why."""


class BadTime(BadQuestion):
    """What was given as a time is none; the message says how one looks."""
