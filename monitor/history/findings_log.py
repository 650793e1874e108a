"""The log of findings: a line of JSON for each that began to fire or was resolved.

It restores the resolved findings of a service after a restart, with the open ones, so that a finding that still holds
keeps its id.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..detectors.findings import Finding, Interval, Place, Transition
from ..detectors.judgement import Judgement
from ..detectors.registry import catalogue

FINDINGS_LOG_FILE: Final = "findings.jsonl"
MAX_UNWRITTEN: Final = 1_000


class LoggedTransition(msgspec.Struct, frozen=True):
    """A transition, with all that is known of its finding then. Times are wall ns, 0 if it has not come to that."""

    to: Literal["firing", "resolved"]
    at_ns: int
    id: str
    severity: str
    first_seen_ns: int
    fired_ns: int
    resolved_ns: int
    judgement: Judgement
    earlier: tuple[Interval, ...] = ()

    def finding(self) -> Finding:
        """Return the finding as the transition left it."""
        finding = Finding(self.judgement, self.resolved_ns or self.at_ns, self.first_seen_ns)
        finding.state, finding.fired_ns, finding.earlier = self.to, self.fired_ns, self.earlier
        if self.to == "resolved":
            finding.resolved_ns = self.resolved_ns or self.at_ns
        return finding


_LOG_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(LoggedTransition)


class FindingsLog:
    """The log in `directory`. Lines that cannot be written wait (the last MAX_UNWRITTEN) until a later write."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FINDINGS_LOG_FILE
        self._unwritten: deque[bytes] = deque(maxlen=MAX_UNWRITTEN)

    def drop(self, days: float) -> None:
        """Forget what is older."""
        oldest_ns = time.time_ns() - round(days * 86_400e9)
        logged = self.read()
        if any(each.at_ns < oldest_ns for each in logged):
            kept = [_LOG_ENCODER.encode(each) + b"\n" for each in logged if each.at_ns >= oldest_ns]
            new = self.path.with_suffix(".new")
            new.write_bytes(b"".join(kept))
            new.replace(self.path)

    def append(self, transitions: Iterable[Transition]) -> None:
        """Keep them, after what could not be written before. Raises OSError if they cannot be written either."""
        self._unwritten.extend(_LOG_ENCODER.encode(logged_transition(transition)) + b"\n" for transition in transitions)
        if not self._unwritten:
            return
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            torn = size and _last_byte(self.path) != b"\n"  # a crash has cut the last line short
            left = memoryview((b"\n" if torn else b"") + b"".join(self._unwritten))
            try:
                while left:
                    left = left[file.write(left) or 0 :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
        self._unwritten.clear()

    def read(self) -> list[LoggedTransition]:
        """Return all transitions, in order, without unreadable lines and codes that no longer exist."""
        logged = []
        for line in self.path.read_bytes().splitlines() if self.path.is_file() else ():
            try:
                each = _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if each.judgement.code in catalogue():
                logged.append(each)
        return logged

    def resolved(self) -> list[Finding]:
        """Return the findings that are over, as they ended. One that is open again is among them, as it was then: what
        is judged in its place continues it.
        """
        ended = {each.id: each for each in self.read() if each.to == "resolved"}
        return [each.finding() for each in ended.values()]

    def open(self) -> dict[Place, int]:
        """Where a finding was still open, and when it was first seen (wall ns)."""
        last = {each.id: each for each in self.read()}
        return {
            (each.judgement.engine, each.judgement.code, each.judgement.key): each.first_seen_ns
            for each in last.values()
            if each.to == "firing"
        }


def logged_transition(transition: Transition) -> LoggedTransition:
    """Return the transition for the log."""
    finding = transition.finding
    return LoggedTransition(
        transition.to,
        transition.at_ns,
        finding.id,
        finding.severity,
        finding.first_seen_ns,
        finding.fired_ns,
        finding.resolved_ns,
        finding.judgement,
        finding.earlier,
    )


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
