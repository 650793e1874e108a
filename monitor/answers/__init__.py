"""How answers are made: views out of a ledger, be it of now or of a moment that is past. Nothing here changes one.

engines.py    an engine at a glance
requests.py   requests, and one request's life
blocks.py     what every block is, and why one is held
points.py     the pool and the queues over time
"""

from __future__ import annotations


class NotKnown(LookupError):
    """There is no such engine, request, block or moment; the message says what there is."""


class BadTime(ValueError):
    """What was given as a time is none; the message says how one looks."""
