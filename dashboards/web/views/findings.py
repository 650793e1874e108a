"""Findings: those that are open, in full."""

from __future__ import annotations

from dash import html

from dashboards.web.cards import cards
from dashboards.web.view import Here, View
from monitor.query import Query


def view(query: Query, here: Here) -> View:
    """All that fire on this engine; at /finding, the one with that `id`."""
    one = here.place.view == "finding"
    found = [query.finding(here.place.id).finding] if one else query.find("firing", here.name)
    head = html.H1("Findings")
    return View({"findings": html.Section([head, *cards(here, found)], id="findings")})
