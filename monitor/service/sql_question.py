"""Answers SQL that a hub asks, over the history that this agent keeps: what `monitor sql --data DIR` answers."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from kvscope.monitor.doctor.time_window import Window
from kvscope.monitor.errors import BadQuestion, NotKnown, Unreachable
from kvscope.monitor.history.sql_segments import BadQuery, TimeRange
from kvscope.monitor.history.sql_tables import SqlInput, answer

MAX_SQL_ROWS: Final = 100_000
MAX_SQL_CHARS: Final = 100_000


class SqlQuestion:
    """Runs one query at a time: each may take the memory that `monitor sql` may. directory: None if nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def answer(self, arguments: dict[str, Any], timeout_s: float) -> bytes:
        """Return the rows as JSON objects. Raises BadQuestion, NotKnown and Unreachable."""
        text = {name: str(arguments.get(name, "")) for name in ("query", "since", "until")}
        if self._directory is None or not self._directory.is_dir():
            raise NotKnown("this agent keeps no history: start it with --data DIR")
        if not 0 < len(text["query"]) <= MAX_SQL_CHARS:
            raise BadQuestion(f"a query has 1 to {MAX_SQL_CHARS:,} characters")
        if not self._lock.acquire(timeout=max(0.0, timeout_s / 2)):
            raise Unreachable("another query runs on this agent: ask again later")
        try:
            window = TimeRange()
            if text["since"] or text["until"]:
                window = TimeRange(*Window(text["since"], text["until"]).span(time.time_ns()))
            with answer(text["query"], SqlInput(self._directory, window=window), timeout_s) as found:
                rows = [dict(zip(found.columns, row, strict=True)) for row in islice(found.rows, MAX_SQL_ROWS + 1)]
            if len(rows) > MAX_SQL_ROWS:
                raise BadQuestion(f"the answer has more than {MAX_SQL_ROWS:,} rows: aggregate, or add a LIMIT")
            return msgspec.json.encode(rows, enc_hook=str)
        except (BadQuery, ValueError) as error:
            raise BadQuestion(str(error)) from error
        finally:
            self._lock.release()
