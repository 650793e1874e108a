"""The configuration of an engine, field by field, and what each of its last starts changed.

/configuration?engine=ENGINE
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EpochView

from .. import ui
from ..display_text import clock_text
from ..links import PagePlace, rfc3339, wall_ns
from ..view import Here, PageView, engine_then

OF_THE_PROCESS: Final = frozenset(("pid",))
"""Fields that differ at each start and mean nothing."""


def value_text(value: Any) -> str:
    """Return a value as the page writes it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return "; ".join(map(value_text, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def configuration_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, old and new value of each field that differs. `not set` stands for a field that is missing."""
    names = [*after, *(name for name in before if name not in after)]
    return [
        (name, _side_text(before, name), _side_text(after, name))
        for name in names
        if name not in OF_THE_PROCESS and before.get(name) != after.get(name)
    ]


def _side_text(side: Mapping[str, Any], name: str) -> str:
    return value_text(side[name]) if name in side else "not set"


def changes_text(changes: list[tuple[str, str, str]], most: int = 3) -> str:
    """Return the changes in a line, such as `num_gpu_blocks 512 → 200`."""
    shown = ", ".join(f"{name} {old} → {new}" for name, old, new in changes[:most])
    return f"{shown} and {len(changes) - most:,} more" if len(changes) > most else shown


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
    rows = [ui.tr(ui.row_head(name), html.Td(value_text(value))) for name, value in engine.configuration.items()]
    fields = html.Table(html.Tbody(rows), className="facts-table") if rows else html.P("The engine did not report any.")
    return PageView(
        {
            "head": html.H1("Configuration"),
            "fields": ui.card([html.P(here.name, className="about"), fields]),
            "starts": ui.card(_starts(here.place, last_starts(query, here)), id="starts"),
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
        return [heading, ui.note("No earlier epoch of this engine is known.")]
    rows = []
    for start in starts:
        changes = [html.Div(f"{name}: {old} → {new}") for name, old, new in start.changes]
        link = html.A("compare before and after", href=before_and_after(place, start, start.after.until or ""))
        rows.append(
            ui.tr(
                ui.row_head(f"{(start.after.since or '')[:10]} {clock_text(start.after.since)} UTC"),
                html.Td(changes or "nothing changed"),
                html.Td(link),
                key=str(start.after.epoch),
            )
        )
    table = ui.table(rows, "Start", "Configuration", "")
    return [heading, html.Div(table, className="scroll", **ui.aria(label="Starts"))]
