"""Every view there is, in the order of the navigation, and the links from each to its answers as JSON and CSV.

A new one is a module of dashboards/web/views with a function `view(query, here) -> PageView`, and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlencode

from dash import html

from kvscope.monitor.questions.query import QUESTIONS

from . import ui
from .view import FLEET_PATH, Here, ViewEntry
from .views import (
    alerts_view,
    block_map_view,
    compare_view,
    configuration_view,
    finding_view,
    findings_view,
    fleet_view,
    memory_view,
    missing_stream_view,
    overview_view,
    planner_view,
    prefix_cache_view,
    request_view,
    requests_view,
    retained_blocks_view,
    search_view,
    timeline_view,
)

BY_STREAM: Final = ("stream",)
TABLE: Final = (
    ViewEntry("", "Overview", overview_view.view),
    ViewEntry(FLEET_PATH, "", fleet_view.view, tab=FLEET_PATH),
    ViewEntry("engine", "Timeline", timeline_view.view),
    ViewEntry("configuration", "", configuration_view.view, tab="engine"),
    ViewEntry("blocks", "Blocks", block_map_view.view, signals=BY_STREAM),
    ViewEntry("block", "", block_map_view.view, tab="blocks"),
    ViewEntry("held", "Retained blocks", retained_blocks_view.view, signals=BY_STREAM),
    ViewEntry("requests", "Requests", requests_view.view, signals=BY_STREAM),
    ViewEntry("request", "", request_view.view, tab="requests"),
    ViewEntry("prefixes", "Prefix cache", prefix_cache_view.view, signals=BY_STREAM),
    ViewEntry("memory", "Memory", memory_view.view),
    ViewEntry("plan", "Planner", planner_view.view),
    ViewEntry("findings", "Findings", findings_view.view),
    ViewEntry("finding", "", finding_view.view, tab="findings"),
    ViewEntry("compare", "Compare", compare_view.view),
    ViewEntry("alerts", "Alerts", alerts_view.view),
    ViewEntry("search", "", search_view.view, tab="search"),
    ViewEntry("stream", "With the stream", missing_stream_view.view, signals=("metrics",)),
)
PATHS: Final = {entry.path: entry for entry in TABLE}


def views_of(signal: str) -> list[ViewEntry]:
    """Return the views in the navigation of an engine that is attached by `signal`."""
    return [entry for entry in TABLE if entry.label and signal in entry.signals]


def tab_of(path: str) -> ViewEntry | None:
    """Return the view in the navigation that an address belongs to, or None for an address without a view."""
    entry = PATHS.get(path)
    return PATHS[entry.tab] if entry and entry.tab else entry


MOMENT: Final = "moment"
WINDOW: Final = "window"
ENGINE: Final = "engine"
ANSWERS_OF: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "": (("engines", MOMENT), ("findings", WINDOW)),
    "fleet": (("fleet_overview", ""), ("findings", WINDOW)),
    "engine": (("points", WINDOW), ("explain", WINDOW)),
    "configuration": (("engines", MOMENT), ("history", ENGINE)),
    "blocks": (("block_map", MOMENT), ("events", WINDOW)),
    "block": (("block", MOMENT),),
    "held": (("retained_blocks", WINDOW),),
    "requests": (("requests", MOMENT),),
    "request": (("request", MOMENT),),
    "prefixes": (("prefix_cache", MOMENT),),
    "memory": (("memory", ENGINE),),
    "plan": (("plan", ENGINE),),
    "findings": (("findings", WINDOW),),
    "finding": (("finding", ""),),
    "compare": (("compare", WINDOW),),
    "alerts": (("alert_state", ""),),
    "search": (("find_request", ""),),
    "stream": (("engines", MOMENT),),
}
"""By view, the questions whose answers it shows, and what of the place each is asked for."""
OF_ALL_ENGINES: Final = ("engines", "fleet_overview", "alert_state", "finding", "find_request")
WITHOUT_TABLE: Final = ("block_map", "fleet_overview")
"""Which no table shows: JSON only."""


def answer_links(here: Here) -> html.P:
    """Return the links of the view. A position or time in the address, and its filters, go with them."""
    parts: list[Any] = ["This view as data:"]
    for name, scope in ANSWERS_OF[here.place.view]:
        if name == "find_request" and not here.place.get("q"):
            continue
        query = urlencode(dict(_asked_for(here, name, scope)))
        for form in ("JSON",) if name in WITHOUT_TABLE else ("JSON", "CSV"):
            asked = "&".join(filter(None, (query, "format=csv" if form == "CSV" else "")))
            link = html.A(f"{name} {form}", href=f"/api/{name}" + (f"?{asked}" if asked else ""))
            parts += [" ", link]
    if len(parts) == 1:
        return html.P()
    return html.P(parts, className="exports", **ui.aria(label="Data"))


def _asked_for(here: Here, name: str, scope: str) -> Iterator[tuple[str, str]]:
    place = here.place
    if name not in OF_ALL_ENGINES and not (name == "findings" and (not place.view or place.get("of"))):
        yield "engine", here.name
    if scope == MOMENT and here.moment:
        yield "at", here.moment
    if scope == WINDOW:
        since = here.replayed_since if name in ("retained_blocks", "events") else here.window.since
        yield from [("since", since)] if since else []
        if not here.window.live:
            yield "until", here.window.until
    if place.id and place.view in ("block", "request", "finding"):
        yield "id", place.id
    if name == "find_request":
        yield "id", place.get("q")
        yield from [("engine", place.get("of"))] if place.get("of") else []
    if name == "plan":
        known = QUESTIONS[name].parameters.__struct_fields__
        yield from ((given, value) for given, value in place.more if given in known)
    if name == "compare":
        others = (("other", "with"), ("other_since", "with_from"), ("other_until", "with_to"))
        yield from ((asked, place.get(given)) for asked, given in others if place.get(given))
