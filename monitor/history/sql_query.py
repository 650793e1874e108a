"""Asks a query of a process of its own, which can read the history and do nothing else (sql_process.py).

This side loads neither DuckDB nor the rows as objects: it takes the answer as bytes, up to a bound, until a deadline.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple

import msgspec

from ..base import limits
from ..base.errors import KvscopeError

QUERY_TIMEOUT_S: Final = 60.0
"""How long a query may take, unless a timeout is given."""
WITHOUT_ANSWER: Final = 2
"""The exit code of the process if its output is the reason why there is no answer."""
MODULE: Final = "kvscope.monitor.history.sql_process"
REQUEST_FILE: Final = "request.json"
FEW_THREADS: Final = {
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKIO_WORKER_THREADS": "2",
}
"""Each arena of malloc and each idle thread takes address space, of which there is a bound."""

RowForm = Literal["objects", "texts"]
"""How rows travel: as JSON objects by column, or as lists of texts and nulls."""


class BadQuery(KvscopeError, ValueError):
    """The query cannot be run. The message gives the reason."""


class TimeRange(NamedTuple):
    """The rows that a query sees (wall ns, both included)."""

    since_ns: int = 0
    until_ns: int = (1 << 63) - 1


class SqlSource(NamedTuple):
    """What is asked: a history or a recording in `directory`, segments that only the archive at a URL has, or both.

    `judged` has what a recording does not keep: folders with the points of its engines, and the log of its findings.
    """

    directory: Path | None
    archive: str = ""
    window: TimeRange = TimeRange()
    judged: Path | None = None


class SqlBounds(NamedTuple):
    """What a query may take, from its start to the last byte of its answer."""

    timeout_s: float = QUERY_TIMEOUT_S
    memory_bytes: int = limits.SQL_COMMAND_MEMORY_BYTES
    answer_bytes: int = limits.SQL_ANSWER_BYTES


class SqlRequest(msgspec.Struct):
    """What the process is told."""

    query: str
    form: RowForm
    source: SqlSource
    bounds: SqlBounds


class SqlRows(msgspec.Struct):
    """An answer: names of columns, what of the history is not in it (a line each), and the rows in their RowForm."""

    columns: list[str]
    left_out: list[str]
    rows: msgspec.Raw


def ask_process(request: SqlRequest, begun: Callable[[Popen[bytes]], object] = lambda _child: None) -> bytearray:
    """Run a query in a process and return SqlRows as JSON. `begun` gets the process, to end it from elsewhere.

    The process ends with this call, and with this process. Raises BadQuery.
    """
    until_s = time.monotonic() + request.bounds.timeout_s
    with TemporaryDirectory(prefix="kvscope-sql-") as scratch:
        (Path(scratch) / REQUEST_FILE).write_bytes(msgspec.json.encode(request, enc_hook=os.fspath))
        with Popen(
            [sys.executable, "-P", "-m", MODULE, scratch],
            stdin=PIPE,  # held open: its end tells the process that this one is gone
            stdout=PIPE,
            stderr=DEVNULL,
            env=_environment(),
            start_new_session=True,
        ) as child:
            try:
                begun(child)
                answer = _received(child, request.bounds, until_s)
                code = child.wait(max(0.0, until_s - time.monotonic()))
            except TimeoutExpired as error:
                raise BadQuery(_too_late(request.bounds)) from error
            finally:
                child.kill()
    if code == 0:
        return answer
    if code == WITHOUT_ANSWER:
        raise BadQuery(answer.decode(errors="replace"))
    if code < 0:
        raise BadQuery(f"{too_large(request.bounds)} (its process ended by {signal.Signals(-code).name})")
    raise BadQuery(f"the process of the query does not start (exit code {code}): {sys.executable} -P -m {MODULE}")


def _received(child: Popen[bytes], bounds: SqlBounds, until_s: float) -> bytearray:
    assert child.stdout is not None
    answer = bytearray()
    pipe = child.stdout.fileno()
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not ready.poll(left_s * 1000):
            raise BadQuery(_too_late(bounds))
        piece = os.read(pipe, 1 << 18)
        if not piece:
            return answer
        answer += piece
        if len(answer) > bounds.answer_bytes:
            raise BadQuery(too_long(bounds))


def too_long(bounds: SqlBounds) -> str:
    """Return the reason for a refusal of a longer answer."""
    return f"the answer has more than {bounds.answer_bytes:,} bytes: aggregate, or add a LIMIT"


def too_large(bounds: SqlBounds) -> str:
    """Return the reason for ending a query that needs more."""
    return (
        f"the query needs more than {bounds.memory_bytes / 1e6:,.0f} MB of memory and"
        f" {limits.SQL_SPILL_BYTES / 1e6:,.0f} MB of disk: ask for less"
    )


def cpu_seconds(bounds: SqlBounds) -> int:
    """Return the CPU time beyond which a process has outlived its deadline, whoever was to end it."""
    return math.ceil(bounds.timeout_s) * limits.SQL_THREADS + 1


def _too_late(bounds: SqlBounds) -> str:
    return f"the query was stopped after {bounds.timeout_s:g} s: ask for less (`monitor sql --timeout` gives more time)"


def _environment() -> dict[str, str]:
    """Return this process's variables without kvscope's own, which may be secrets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSCOPE_")}
    return kept | FEW_THREADS
