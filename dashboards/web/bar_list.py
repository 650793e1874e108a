"""Horizontal bars, one figure a line: of a distribution, a series, a bill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dash import html


class Bar(NamedTuple):
    """One line: `family` is a class of the style sheet, `text` what is written for the figure (the figure itself).
    `before`: where it begins, as in a waterfall.
    """

    label: str
    value: float
    family: str = ""
    text: str = ""
    note: str = ""
    before: float = 0


def bars(rows: Sequence[Bar]) -> html.Table:
    """Return the bars, all to one scale, as a table for screen readers."""
    most = max((row.before + row.value for row in rows), default=0) or 1
    return html.Table(
        html.Tbody(
            [
                html.Tr(
                    [
                        html.Th(row.label, scope="row"),
                        html.Td(row.text or f"{row.value:,.0f}", className="n"),
                        html.Td(html.Span(style=_extent(row, most), className=f"length {row.family}"), className="rod"),
                        html.Td(row.note, className="note"),
                    ],
                    key=row.label,
                )
                for row in rows
            ]
        ),
        className="bars",
    )


def _extent(row: Bar, most: float) -> dict[str, str]:
    return {"width": f"{100 * max(row.value, 0) / most:.2f}%", "marginLeft": f"{100 * max(row.before, 0) / most:.2f}%"}
