"""Every view there is, in the order of the navigation.

A new one is a module of dashboards/web/views with a function `view(query, here) -> View`, and a line here.
"""

from __future__ import annotations

from typing import Final

from kvscope.dashboards.web.view import FLEET_PATH, ViewEntry
from kvscope.dashboards.web.views import (
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
