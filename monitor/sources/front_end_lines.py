"""Lines of a front end beside statistics: probes that it answers, and requests that it receives.

vLLM since 0.10.2 logs no statistics while no token is computed, so these lines are what goes on when an engine stands
still. Access lines have no time of their own. Probes come at a steady pace, which the statistics before show.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

PROBED: Final = re.compile(r'"GET /(?:health|metrics|ping)[^"\s]{0,40} HTTP/\d\.\d" 200', re.ASCII)
RECEIVED: Final = re.compile(
    r'"POST /(?:v1/(?:chat/completions|completions|responses|messages)|generate)[^"\s]{0,40} HTTP/\d\.\d" 200'
    r"|\bReceived request [\w-]{1,120}: ",
    re.ASCII,
)
"""A response that is streamed is logged when it begins, before its first token."""
HALTED: Final = re.compile(
    r'"POST /(?:(?P<halt>pause|sleep|pause_generation|release_memory_occupation)'
    r"|resume|wake_up|continue_generation|resume_memory_occupation)[^\"\s]{0,80} HTTP/\d\.\d\" 200",
    re.ASCII,
)
"""vLLM's and SGLang's calls by which an operator halts an engine, and lets it go on."""
RUN_ENDS: Final = ("start_up", "shut_down", "engine_died", "worker_died")
"""Classes of lines after which an engine's last statistics are those of an earlier run."""
GAPS_KEPT: Final = 32
"""Between lines of statistics, by which the pace of the probes is known."""


class FrontEndFact(NamedTuple):
    """A fact of the lines after the last statistics."""

    name: str
    value: int | float
    position: str
    at_ns: int | None


class FrontEndLines:
    """Feed it a log's lines in their order."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, int]] = deque(maxlen=GAPS_KEPT)
        self._statistics_ns: int | None = None
        self._run_is_over = False
        self._probes = self._probes_since_request = self._requests = 0
        self._last_probe = ""
        self._first_request: tuple[str, int | None] = ("", None)
        self._halted_at = ""
        self._reported: dict[str, FrontEndFact] = {}

    def statistics(self, at_ns: int | None) -> None:
        """Take a line of statistics."""
        if at_ns is not None and self._statistics_ns is not None:
            if at_ns == self._statistics_ns and not self._run_is_over:
                return  # another rank's
            if at_ns > self._statistics_ns and not self._run_is_over:
                self._gaps.append(((at_ns - self._statistics_ns) / 1e9, self._probes))
        self._statistics_ns = at_ns
        self._run_is_over = False
        self._probes = self._probes_since_request = self._requests = 0

    def line(self, text: str, position: str, at_ns: int | None) -> None:
        """Take another line."""
        if "POST /" in text and (halted := HALTED.search(text)) is not None:
            self._halted_at = position if halted["halt"] else ""
        if self._run_is_over or not ("HTTP/" in text or "Received request" in text):
            return
        if PROBED.search(text) is not None:
            self._probes += 1
            self._probes_since_request += bool(self._requests)
            self._last_probe = position
        elif RECEIVED.search(text) is not None:
            self._first_request = self._first_request if self._requests else (position, at_ns)
            self._requests += 1

    def end_run(self) -> None:
        """Count nothing until the next statistics: the engine ended, or restarted."""
        self._run_is_over = True
        self._halted_at = ""

    def facts(self) -> Iterator[FrontEndFact]:
        """Yield what has changed of what came after the last statistics."""
        for fact in self._facts_now():
            if self._reported.get(fact.name) != fact:
                self._reported[fact.name] = fact
                yield fact

    def _facts_now(self) -> Iterator[FrontEndFact]:
        """Yield the lines after the last statistics, and their times only where probes show a pace."""
        seconds, probes = sum(gap for gap, _ in self._gaps), sum(count for _, count in self._gaps)
        if probes:
            pace_s = seconds / probes
            yield FrontEndFact("probed_for_s", round(pace_s * self._probes, 1), self._last_probe, None)
            yield FrontEndFact(
                "probed_since_request_s", round(pace_s * self._probes_since_request, 1), self._last_probe, None
            )
        yield FrontEndFact("requests_since_statistics", self._requests, *self._first_request)
        yield FrontEndFact("halted", int(bool(self._halted_at)), self._halted_at, None)
