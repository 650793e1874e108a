"""Queries in this process, for tests of what the tables hold, and in one of their own, as they are asked."""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope.monitor.history.sql_query import SqlBounds, SqlRequest, SqlRows, SqlSource, ask_process
from kvscope.monitor.history.sql_tables import with_answer


def rows_of(query: str, of: SqlSource) -> list[dict[str, Any]]:
    """The rows by column."""
    return with_answer(query, of, lambda found: [dict(zip(found.columns, row, strict=True)) for row in found.rows])


def tuples_of(query: str, of: SqlSource) -> list[tuple[Any, ...]]:
    """The rows."""
    return with_answer(query, of, lambda found: list(found.rows))


def asked(query: str, source: SqlSource, bounds: SqlBounds | None = None) -> SqlRows:
    """The answer of a process."""
    request = SqlRequest(query, "objects", source, bounds or SqlBounds())
    return msgspec.json.decode(ask_process(request), type=SqlRows)
