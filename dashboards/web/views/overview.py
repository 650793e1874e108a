"""Every engine at a glance, the worst off first, and what is wrong with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web import pool
from dashboards.web.cards import cards
from dashboards.web.links import Place
from dashboards.web.markup import aria
from dashboards.web.view import Here, View, open_findings
from dashboards.web.words import number
from monitor.findings import FindingReport
from monitor.query import Query, counted
from monitor.views import EngineView


def view(query: Query, here: Here) -> View:
    """The table of engines, and the open findings of all of them."""
    found = query.find("firing")
    grave = [finding for finding in found if finding.severity != "info"]
    return View(
        {
            "head": html.H1(_in_a_sentence(here.engines, grave)),
            "engines": html.Section(_table(here), id="engines", className="card", **aria(label="Engines")),
            "findings": html.Section(cards(here.place, grave, here.engine.at), id="findings", **aria(label="Findings")),
        }
    )


def _in_a_sentence(engines: Sequence[EngineView], grave: Sequence[FindingReport]) -> str:
    if not grave:
        return f"Nothing is wrong that can be seen of {counted(len(engines), 'engine')}"
    troubled = {finding.engine for finding in grave}
    what = counted(len(grave), "open finding")
    if len(engines) == 1:
        return what
    return f"{what} on {len(troubled):,} of {counted(len(engines), 'engine')}"


def _table(here: Here) -> html.Table:
    header = ("Engine", "State", "Pool", "Running", "Waiting", "Output tok/s", "Open findings")
    return html.Table(
        [
            html.Thead(html.Tr([html.Th(name, scope="col") for name in header])),
            html.Tbody([_row(here.place, engine) for engine in here.engines]),
        ],
        className="engines",
    )


def _row(place: Place, engine: EngineView) -> html.Tr:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(engine.waiting_by_reason.items()))
    cells: list[Any] = [
        html.Th(html.A(engine.engine, href=place.to("engine", engine=engine.engine)), scope="row"),
        html.Td([html.Span(className=f"status {engine.status}", **aria(hidden="true")), engine.status]),
        html.Td(pool.bar(engine)),
        html.Td(number(engine.running)),
        html.Td([number(engine.waiting), html.Span(reasons, className="note")]),
        html.Td(number(engine.output_tokens_per_s)),
        html.Td(f"{open_findings(engine):,}" if open_findings(engine) else "none"),
    ]
    return html.Tr(cells, key=engine.engine)
