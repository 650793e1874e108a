"""Answers of the API as CSV, for `format=csv`."""

from __future__ import annotations

import csv
import io
import json
from typing import Any, Final

import msgspec

FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet computes a text that begins so. Ids come from clients."""


def csv_of(answer: Any) -> str:
    """Return the rows of an answer: of a list its entries, else those of its longest list, else the answer as one row.

    A column has its keys joined with dots. A list in a cell is JSON.
    """
    rows = [_cells(row) for row in _table_of(msgspec.to_builtins(answer))]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table_of(answer: Any) -> list[dict[str, Any]]:
    if isinstance(answer, list):
        return [row if isinstance(row, dict) else {"value": row} for row in answer]
    tables = [value for value in answer.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return max(tables, key=len, default=[answer])


def _cells(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            cells |= _cells(value, f"{prefix}{name}.")
        else:
            cells[f"{prefix}{name}"] = _cell(value)
    return cells


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
