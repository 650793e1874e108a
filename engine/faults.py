"""Faults that can be switched on by name, to see an incident of the catalogue happen for real.

`--fault CODE[:key=value]…` breaks one mechanism of the engine at one named place; nothing false is ever said to the
event stream. While a fault is on, the engine's description, its log and every page of the monitor say so.

    code                  place broken                                               what a strike is
    --------------------  ---------------------------------------------------------  -------------------------
    leak.finished-held    Scheduler.take_completions: a completion is not delivered  one request's completion
    leak.unaccounted      KVCacheManager.free: the free of an abort is skipped       one aborted request's free

    key    meaning                                                             default
    -----  ------------------------------------------------------------------  -----------------
    every  strike at each N-th chance                                          1
    after  let so many chances pass first                                      0
    limit  strike at most so often                                             no limit
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

PLACES: Final = {
    "leak.finished-held": "Scheduler.take_completions: a connector's completion is not delivered",
    "leak.unaccounted": "KVCacheManager.free: the free of an aborted request is skipped",
}


@dataclass
class Fault:
    """One fault that is on: its parameters, the chances it had, and whom it struck."""

    code: str
    every: int = 1
    after: int = 0
    limit: int = 0
    chances: int = 0
    struck: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        keys = {"every": self.every != 1, "after": self.after, "limit": self.limit}
        return self.code + "".join(f":{key}={getattr(self, key)}" for key, given in keys.items() if given)


class Faults:
    """The faults that are on. Empty, which is the default, it never strikes."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.on = {fault.code: fault for fault in faults}

    def strikes(self, code: str, request: str) -> bool:
        """Whether the fault `code` breaks its place now, for this request."""
        fault = self.on.get(code)
        if fault is None:
            return False
        fault.chances += 1
        due = fault.chances > fault.after and (fault.chances - fault.after - 1) % fault.every == 0
        if not due or (fault.limit and len(fault.struck) >= fault.limit):
            return False
        fault.struck.append(request)
        return True

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Faults:
        """From the command line's `CODE[:key=value]…`. Raises ValueError, naming what is wrong and what there is."""
        return cls(parse_fault(text) for text in texts)


def parse_fault(text: str) -> Fault:
    """One fault as the command line gives it."""
    code, *pairs = text.split(":")
    if code not in PLACES:
        raise ValueError(f"--fault {text}: there is no fault {code!r}; there are {', '.join(sorted(PLACES))}")
    fault = Fault(code)
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in ("every", "after", "limit") or not value.isdecimal():
            raise ValueError(f"--fault {text}: {pair!r} is not every=N, after=N or limit=N with a whole number N")
        setattr(fault, key, int(value))
    if fault.every < 1:
        raise ValueError(f"--fault {text}: every must be at least 1")
    return fault
