"""Findings: those that are open, in full."""

from __future__ import annotations

from dash import html

from dashboards.web.cards import cards
from dashboards.web.view import Here, View
from monitor.query import Query


def view(query: Query, here: Here) -> View:
    """All that fire on this engine; at /finding, the one with that `id`."""
    found = [finding for finding in query.find("firing") if finding.engine == here.name]
    if here.place.view == "finding":
        found = [finding for finding in query.find() if finding.id == here.place.id]
    head = html.H1("Findings")
    return View({"findings": html.Section([head, *cards(here.place, found, here.engine.at)], id="findings")})
