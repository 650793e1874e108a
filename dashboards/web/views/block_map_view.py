"""The block map: every block at any time, the events around it, and the owners of the chosen one.

/blocks?colour=owner&at=MOMENT        coloured by state, owner, age, references or prefix
/blocks?id=REQUEST                    with that request's blocks marked
/block?id=BLOCK                       with the event history of that block beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, get_args

from dash import html

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.base.text import percent
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import BlockColours, BlockMap, Colouring, EventView

from .. import history_panel, ui
from ..display_text import clock_text
from ..links import PagePlace, rfc3339, wall_ns
from ..palette import colour_of, css
from ..pictures import coloured_map, grid, picture, spotlight
from ..pool import balance_legend
from ..view import Here, PageView, engine_then

COLOURING_CHOICES: Final = ("state", *get_args(Colouring))
MAX_MAP_EVENTS: Final = 60
STEPS: Final = 600
"""Steps of the slider."""


def view(query: Query, here: Here) -> PageView:
    """Return the map under its slider, and the events beside it."""
    place, moment = here.place, here.moment
    engine = engine_then(query, here)
    blocks = query.block_map(here.name, moment)
    by = place.get("colour", COLOURING_CHOICES[0])
    colouring = next((one for one in get_args(Colouring) if one == by), None)
    colours = query.block_colours(here.name, colouring, moment) if colouring else None
    marked, aside = _marked(query, place, moment)
    legend = balance_legend(engine) if colours is None else _colour_legend(place, colours)
    events, chosen = _events_around(query, here)
    return PageView(
        {
            "head": html.Header([html.H1("Blocks"), _colourings(place, by)], className="of-blocks"),
            "scrub": ui.card(_scrub(_since_received(query, here), blocks.at, events, chosen), "card scrub"),
            "map": html.Div(
                [
                    html.Section(
                        [html.Ul(legend, className="legend"), _map(blocks, colours, marked), *_several(blocks, by)],
                        className="card",
                        key="map",
                    ),
                    html.Section(
                        _events(place, events, chosen),
                        className="card happened",
                        key="events",
                        **ui.aria(label="Events until then"),
                    ),
                ],
                className="map-and-events",
            ),
            "pointed": ui.card(
                html.Div(id="pointed-block", **ui.aria(live="polite"), **ui.data(hint=history_panel.POINT_HINT))
            ),
        },
        aside,
    )


def _marked(query: Query, place: PagePlace, moment: str) -> tuple[list[int], list[Any]]:
    """Blocks to be marked, and the event history beside the map."""
    if not place.id:
        return [], []
    try:
        if place.view == "blocks":
            return query.request(place.engine, place.id, moment).blocks, []
        if not place.id.isdecimal():
            raise NotKnown(f"{place.id} is not the number of a block")
        return [int(place.id)], history_panel.of_block(place, query.block(place.engine, int(place.id), moment))
    except NotKnown as error:
        return [], history_panel.unknown(place, str(error))


# -------------------------------------------------------------------- the map


def _map(blocks: BlockMap, colours: BlockColours | None, marked: Sequence[int]) -> html.Div:
    laid = grid(blocks.total)
    source = picture(blocks) if colours is None else coloured_map(colours)
    layers: list[Any] = [html.Img(id="map", alt="", src=source, draggable="false")]
    if marked and blocks.total:
        layers.append(html.Img(id="spotlight", alt="", src=spotlight(blocks.total, marked), draggable="false"))
    return html.Div(
        [*layers, html.Div(className="lines"), html.Div(className="cursor")],
        id="map-frame",
        tabIndex="0",
        role="application",
        style={"--columns": str(laid.columns), "--rows": str(laid.rows)},
        **ui.data(total=laid.total, per_cell=laid.per_cell, columns=laid.columns),
        **ui.aria(label="Block map: arrow keys go from block to block, Enter opens a block’s event history"),
    )


def _several(blocks: BlockMap, by: str) -> list[html.P]:
    """Return the meaning of a cell, where it is not one block."""
    per_cell = grid(blocks.total).per_cell
    which = "the one that asks for attention most" if by == COLOURING_CHOICES[0] else "one of them"
    words = f"Each cell is {per_cell:,} blocks, in the colour of {which}."
    return [html.P(words, className="note hint")] if per_cell > 1 else []


def _colourings(place: PagePlace, chosen: str) -> html.Nav:
    links = [
        html.A(
            by,
            href=place.but(colour="" if by == COLOURING_CHOICES[0] else by),
            className="button",
            **ui.aria(current="true" if by == chosen else "false"),
        )
        for by in COLOURING_CHOICES
    ]
    return html.Nav([ui.small_note("Coloured by"), *links], **ui.aria(label="Coloured by"))


def _colour_legend(place: PagePlace, colours: BlockColours) -> list[html.Li]:
    return [
        ui.legend_item(
            css(colour_of(colours.by, one.value), 1 if one.value else 0.2),
            ui.request_link(place, colours.engine, one.request) if one.request else one.label,
            (f"{one.blocks:,}", "count"),
            (percent(one.share or 0.0), "share"),
            key=str(one.value),
        )
        for one in colours.keys
    ]


# -------------------------------------------------------------------- through time


def _events_around(query: Query, here: Here) -> tuple[list[EventView], int]:
    """Return the events around the time, and the index of the last that had happened then (-1: none)."""
    name, moment = here.name, here.moment
    if not moment:
        events = query.events(name, here.replayed_since, limit=MAX_MAP_EVENTS)
        return events, len(events) - 1
    events = query.events(name, around=moment, limit=MAX_MAP_EVENTS)
    if "/" in moment:
        return events, next((number for number, one in enumerate(events) if one.position == moment), -1)
    at_ns = wall_ns(moment, 0)
    happened = sum(not one.at or wall_ns(one.at, 0) <= at_ns for one in events)
    if happened:
        return events, happened - 1
    # It had been silent for some time.
    before = query.events(name, rfc3339(min(here.window.since_ns, at_ns - 1_000_000)), moment, limit=1)
    return [*before, *events], len(before) - 1


def _since_received(query: Query, here: Here) -> Here:
    """Return the place without the time before the first event, with which a young engine's slider would begin."""
    first = query.history(here.name).first
    # It is cut to the millisecond, at whose beginning there is no state yet.
    first_ns = wall_ns(first, 0) + 1_000_000 if first else 0
    since_ns = min(max(here.window.since_ns, first_ns), here.window.until_ns - 1_000_000_000)
    return here._replace(window=here.window._replace(since_ns=since_ns))


def _scrub(here: Here, at: str | None, events: Sequence[EventView], chosen: int) -> list[Any]:
    """Return a slider over the window, and a step to the event before and after."""
    window, place = here.window, here.place
    first, last = window.since_ns // 1_000_000, window.until_ns // 1_000_000
    now = min(max(round(datetime.fromisoformat(at).timestamp() * 1000), first), last) if at else last
    kept = {"since": window.since, "until": window.until}
    steps: list[Any] = []
    for sign, words, name, number in (
        ("‹", "the event before", ",", chosen - 1),
        ("›", "the event after", ".", chosen + 1),
    ):
        there = 0 <= number < len(events)
        attributes = ui.key(name, words) | {"href": place.but(at=events[number].position, **kept)} if there else {}
        label = ui.aria(label=words, disabled="false" if there else "true")
        steps.append(html.A(sign, className="button", title=f"{words} ({name})", **attributes, **label))
    step = str(max(1, (last - first) // STEPS))
    slider = html.Label(
        [
            html.Span("Moment that is shown", className="unseen"),
            ui.field("range", "at", str(now), id="scrub", min=str(first), max=str(last), step=step),
        ],
        **ui.data(at=now, since=window.since, until=window.until),
    )
    since, until = (ui.small_note(clock_text(end)) for end in (window.since, window.until))
    shown = html.Strong(f"{at[11:23]} UTC" if at else "", className="moment")
    return [html.Span(steps, className="moves"), since, slider, until, shown]


def _events(place: PagePlace, events: Sequence[EventView], chosen: int) -> list[Any]:
    heading = html.H2("Events")
    if not events:
        return [heading, ui.note("None is kept of that time.")]
    rows = []
    for number, count in _last_of_alike(events, chosen):
        event = events[number]
        alike = [ui.small_note(f"{count} times")] if count > 1 else []
        link = html.A(
            [
                html.Time(event.at[11:23] if event.at else "", dateTime=event.at),
                html.Span([_summary(event), *alike]),
            ],
            href=place.but(at=event.position),
            **ui.aria(current="step" if number == chosen else "false"),
        )
        rows.append(html.Li(link, key=event.position, className="to-come" if number > chosen else ""))
    return [heading, html.Ol(rows, className="events", tabIndex="0", **ui.aria(label="Events, the latest last"))]


def _last_of_alike(events: Sequence[EventView], chosen: int) -> list[tuple[int, int]]:
    """Return the last of each run of events that read alike, and how many they are. A run ends at the chosen one."""
    runs: list[tuple[int, int]] = []
    for number, event in enumerate(events):
        alike = number > 0 and _summary(event) == _summary(events[number - 1]) and number - 1 != chosen
        runs.append((number, runs.pop()[1] + 1 if alike else 1))
    return runs


def _summary(event: EventView) -> str:
    return f"{event.request}: {event.text}" if event.request and event.request not in event.text else event.text
