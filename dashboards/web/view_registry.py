"""Every view there is, in the order of the navigation.

A new one is a module of dashboards/web/views with a function `view(query, here) -> View`, and a line here.
"""

from __future__ import annotations

from typing import Final

from kvscope.dashboards.web.view import Entry
from kvscope.dashboards.web.views import (
    block_map_view,
    compare_view,
    finding_view,
    findings_view,
    memory_view,
    overview_view,
    prefix_cache_view,
    request_view,
    requests_view,
    retained_blocks_view,
    timeline_view,
)

TABLE: Final = (
    Entry("", "Overview", overview_view.view),
    Entry("engine", "Over time", timeline_view.view),
    Entry("blocks", "Blocks", block_map_view.view),
    Entry("block", "", block_map_view.view, tab="blocks"),
    Entry("held", "Never freed", retained_blocks_view.view),
    Entry("requests", "Requests", requests_view.view),
    Entry("request", "", request_view.view, tab="requests"),
    Entry("prefixes", "Prefix cache", prefix_cache_view.view),
    Entry("memory", "Memory", memory_view.view),
    Entry("findings", "Findings", findings_view.view),
    Entry("finding", "", finding_view.view, tab="findings"),
    Entry("compare", "Compare", compare_view.view),
)
PATHS: Final = {entry.path: entry for entry in TABLE}


def tab_of(path: str) -> Entry | None:
    """The view in the navigation that an address belongs to; None of one that is no view's."""
    entry = PATHS.get(path)
    return PATHS[entry.tab] if entry and entry.tab else entry
