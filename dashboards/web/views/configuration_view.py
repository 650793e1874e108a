"""The configuration of an engine, and what each of its last starts changed.

/configuration?engine=ENGINE
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.dashboards.web.configuration_changes import configuration_changes, value_text
from kvscope.dashboards.web.display_text import clock_text
from kvscope.dashboards.web.links import PagePlace, rfc3339, wall_ns
from kvscope.dashboards.web.markup import aria, headings
from kvscope.dashboards.web.view import Here, PageView, engine_then
from kvscope.monitor.errors import NotKnown
from kvscope.monitor.query import Query
from kvscope.monitor.schema import EpochView

MOST_STARTS: Final = 8
MOST_AROUND_START_NS: Final = 3_600_000_000_000
"""The longest window that two epochs are compared over."""


class EngineStart(NamedTuple):
    """A start of an engine after another epoch of it, and what it changed in the configuration."""

    before: EpochView
    after: EpochView
    changes: list[tuple[str, str, str]]


def view(query: Query, here: Here) -> PageView:
    """Return the fields at the time of the page, and the last starts."""
    engine = engine_then(query, here)
    rows = [
        html.Tr([html.Th(name, scope="row"), html.Td(value_text(value))])
        for name, value in engine.configuration.items()
    ]
    fields = html.Table(html.Tbody(rows), className="facts-table") if rows else html.P("The engine did not report any.")
    return PageView(
        {
            "head": html.H1("Configuration"),
            "fields": html.Section([html.P(here.name, className="about"), fields], className="card"),
            "starts": html.Section(_starts(here.place, last_starts(query, here)), className="card", id="starts"),
        }
    )


def last_starts(query: Query, here: Here) -> list[EngineStart]:
    """Return the last starts whose epoch before is known, the latest first."""
    epochs = query.history(here.name).epochs[-MOST_STARTS - 1 :]
    starts = []
    for before, after in pairwise(epochs):
        old, new = (_configuration(query, here.name, epoch) for epoch in (before, after))
        if old is not None and new is not None:
            starts.append(EngineStart(before, after, configuration_changes(old, new)))
    return starts[::-1]


def _configuration(query: Query, name: str, epoch: EpochView) -> dict[str, Any] | None:
    """Return the configuration of an epoch, or None if it is not kept."""
    try:
        engines = query.engines(epoch.until or "")
    except NotKnown:
        return None
    return next((one.configuration for one in engines if one.engine == name and one.epoch == epoch.epoch), None)


def before_and_after(place: PagePlace, start: EngineStart, now: str) -> str:
    """Return the address that compares the time after a start with as long a time before it."""
    first_ns, last_ns = (wall_ns(at or now, 0) for at in (start.after.since, start.after.until))
    began_ns, ended_ns = (wall_ns(at or now, 0) for at in (start.before.since, start.before.until))
    span_ns = max(min(last_ns - first_ns, ended_ns - began_ns, MOST_AROUND_START_NS), 1_000_000_000)
    return place.to(
        "compare",
        since=rfc3339(first_ns),
        until=rfc3339(first_ns + span_ns),
        at="",
        with_from=rfc3339(ended_ns - span_ns),
        with_to=rfc3339(ended_ns),
    )


def _starts(place: PagePlace, starts: Sequence[EngineStart]) -> list[Any]:
    heading = html.H2("Starts, the latest first")
    if not starts:
        return [heading, html.P("No earlier epoch of this engine is known.", className="note")]
    rows = []
    for start in starts:
        changes = [html.Div(f"{name}: {old} → {new}") for name, old, new in start.changes]
        link = html.A("compare before and after", href=before_and_after(place, start, start.after.until or ""))
        rows.append(
            html.Tr(
                [
                    html.Th(f"{(start.after.since or '')[:10]} {clock_text(start.after.since)} UTC", scope="row"),
                    html.Td(changes or "nothing changed"),
                    html.Td(link),
                ],
                key=str(start.after.epoch),
            )
        )
    table = html.Table([headings("Start", "Configuration", ""), html.Tbody(rows)])
    return [heading, html.Div(table, className="scroll", **aria(label="Starts"))]
