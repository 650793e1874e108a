"""Answers SQL that a hub asks, over the history that this agent keeps: what `monitor sql --data DIR` answers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

from ..base import limits
from ..base.errors import BadQuestion, NotKnown, Unreachable
from ..history.sql_query import BadQuery, SqlBounds, SqlRequest, SqlSource, TimeRange, ask_process
from ..questions.observe import Window

TRAVEL_S: Final = 1.0
"""Of the time that a hub waits: the answer has to reach it."""
OTHER_QUERIES: Final = "other queries run on this agent: ask again later"


class SqlQuestion:
    """Runs limits.SQL_AT_ONCE queries at once, each in its process. directory: None if nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._known = threading.BoundedSemaphore(limits.SQL_AT_ONCE + 1)  # one waits
        self._running = threading.BoundedSemaphore(limits.SQL_AT_ONCE)
        self._children: set[Popen[bytes]] = set()
        self._is_closed = False

    def close(self) -> None:
        """End what runs, and run no more."""
        self._is_closed = True
        for child in list(self._children):
            child.kill()

    def answer(self, arguments: dict[str, Any], timeout_s: float) -> bytearray:
        """Return SqlRows as JSON, the rows as objects. Raises BadQuestion, NotKnown and Unreachable."""
        until_s = time.monotonic() + timeout_s - TRAVEL_S
        text = {name: str(arguments.get(name, "")) for name in ("query", "since", "until")}
        if self._directory is None or not self._directory.is_dir():
            raise NotKnown("this agent keeps no history: start it with --data DIR")
        if not 0 < len(text["query"]) <= limits.SQL_CHARS:
            raise BadQuestion(f"a query has 1 to {limits.SQL_CHARS:,} characters")
        if not self._known.acquire(blocking=False):
            raise Unreachable(OTHER_QUERIES)
        try:
            if not self._running.acquire(timeout=max(0.0, timeout_s / 2)):
                raise Unreachable(OTHER_QUERIES)
            try:
                return self._run(text, until_s)
            finally:
                self._running.release()
        finally:
            self._known.release()

    def _run(self, text: dict[str, str], until_s: float) -> bytearray:
        try:
            window = TimeRange()
            if text["since"] or text["until"]:
                window = TimeRange(*Window(text["since"], text["until"]).span(time.time_ns()))
            bounds = SqlBounds(max(0.1, until_s - time.monotonic()), limits.SQL_MEMORY_BYTES)
            request = SqlRequest(text["query"], "objects", SqlSource(self._directory, window=window), bounds)
            return ask_process(request, self._begun)
        except (BadQuery, ValueError) as error:
            raise BadQuestion(str(error)) from error
        finally:
            self._children = {child for child in self._children if child.returncode is None}

    def _begun(self, child: Popen[bytes]) -> None:
        self._children.add(child)
        if self._is_closed:
            child.kill()
