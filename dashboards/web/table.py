"""Every view there is, in the order of the navigation.

A new one is a module of dashboards/web/views with a function `view(query, here) -> View`, and a line here.
"""

from __future__ import annotations

from typing import Final

from dashboards.web.view import Entry
from dashboards.web.views import (
    blocks,
    compare,
    engine,
    finding,
    findings,
    held,
    memory,
    overview,
    prefixes,
    request,
    requests,
)  # fmt: skip

TABLE: Final = (
    Entry("", "Overview", overview.view),
    Entry("engine", "Over time", engine.view),
    Entry("blocks", "Blocks", blocks.view),
    Entry("block", "", blocks.view, tab="blocks"),
    Entry("held", "Never freed", held.view),
    Entry("requests", "Requests", requests.view),
    Entry("request", "", request.view, tab="requests"),
    Entry("prefixes", "Prefix cache", prefixes.view),
    Entry("memory", "Memory", memory.view),
    Entry("findings", "Findings", findings.view),
    Entry("finding", "", finding.view, tab="findings"),
    Entry("compare", "Compare", compare.view),
)
PATHS: Final = {entry.path: entry for entry in TABLE}


def tab_of(path: str) -> Entry | None:
    """The view in the navigation that an address belongs to; None of one that is no view's."""
    entry = PATHS.get(path)
    return PATHS[entry.tab] if entry and entry.tab else entry
