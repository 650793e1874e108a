"""Prefill and decode engines of each service side by side, in a table of the fleet view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dash import html

from kvscope.dashboards.web.display_text import number_text
from kvscope.dashboards.web.markup import aria, headings
from kvscope.dashboards.web.view import Here
from kvscope.monitor.fleet_schema import FleetEngineView, FleetService
from kvscope.monitor.text import counted, percent

MOST_SERVICES: Final = 12
MOST_ENGINES: Final = 6
"""Of each side of a service: the worst off, then the others by name."""
SIDE_WORDS: Final = {
    "producers": "Prefill holds decode up",
    "consumers": "Decode holds prefill up",
    "transfer": "Transfers do not complete",
    "none": "Prefill keeps blocks",
}


def service_table(here: Here, services: Sequence[FleetService], engines: Sequence[FleetEngineView]) -> Any:
    """Return a row for each service: producers with their held blocks, consumers with their queues."""
    if not services:
        return []
    by_name = {engine.engine: engine for engine in engines}
    rows = [_service_row(here, service, by_name) for service in services[:MOST_SERVICES]]
    more = len(services) - len(rows)
    left = [_service_note(f"and {more:,} more services")] if more else []
    columns = headings("Service", "Prefill: blocks held for transfers", "Decode: requests that wait", "Findings")
    table = html.Div(html.Table([columns, html.Tbody(rows)]), className="scroll")
    head = html.H2("Prefill and decode")
    return html.Section([head, table, *left], id="services", className="card", **aria(label="Prefill and decode"))


def _service_row(here: Here, service: FleetService, by_name: Mapping[str, FleetEngineView]) -> html.Tr:
    how = "by name" if service.grouped_by == "service" else "by model and zone"
    sides = counted(len(service.producers), "producer"), counted(len(service.consumers), "consumer")
    cells = [
        html.Th([html.Strong(service.name), _service_note(f"{how}: {sides[0]}, {sides[1]}")], scope="row"),
        html.Td(_engines_of(here, service.producers, by_name)),
        html.Td(_engines_of(here, service.consumers, by_name)),
        html.Td(_statement_of(service), className="wrapped-text"),
    ]
    return html.Tr(cells, key=f"{service.grouped_by} {service.name}", className="bad" if service.statement else "")


def _engines_of(here: Here, names: Sequence[str], by_name: Mapping[str, FleetEngineView]) -> list[Any]:
    items = [_engine_item(here, by_name[name]) for name in names[:MOST_ENGINES]]
    more = len(names) - len(items)
    return [html.Ul(items, className="plain"), *([_service_note(f"and {more:,} more")] if more else [])]


def _engine_item(here: Here, engine: FleetEngineView) -> html.Li:
    link = html.A(engine.engine, href=here.place.to("engine", engine=engine.engine), className="name")
    status = html.Span(className=f"status {engine.status}", **aria(hidden="true"))
    text = _held_text(engine) if engine.kv_role == "producer" else _fetch_queue_text(engine)
    return html.Li([status, link, _service_note(f"{engine.status} · {text}")], key=engine.engine)


def _held_text(engine: FleetEngineView) -> str:
    held = "held blocks not exposed" if engine.held_blocks is None else f"{counted(engine.held_blocks, 'block')} held"
    used = "" if engine.usage is None else f", pool {percent(engine.usage)} in use"
    return f"{held}{used}, {number_text(engine.waiting)} waiting"


def _fetch_queue_text(engine: FleetEngineView) -> str:
    fetching = "remote KV not exposed" if engine.fetching is None else f"{engine.fetching:,} for remote KV"
    used = "" if engine.usage is None else f", pool {percent(engine.usage)} in use"
    return f"{number_text(engine.waiting)} waiting, {fetching}{used}"


def _statement_of(service: FleetService) -> list[Any]:
    if not service.statement:
        return [html.Span("no finding about transfers", className="none")]
    return [html.Strong(SIDE_WORDS[service.held_up_by]), f" ({service.verdict}): ", service.statement]


def _service_note(text: str) -> html.Span:
    return html.Span(text, className="note")
