"""The table of engines: one line for each, the worst off first or sorted by a column, with the last ten minutes of its
pool and its queue.

    /?sort=COLUMN    by that column, the least first; -COLUMN: the most first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.dashboards.web import pool_balance
from kvscope.dashboards.web.display_text import (
    clock_text,
    latency_note,
    latency_text,
    no_rate,
    number_text,
    queue_reasons,
    sentence,
    slow_text,
)
from kvscope.dashboards.web.markup import aria, data
from kvscope.dashboards.web.palette import LIMITS, css
from kvscope.dashboards.web.pool_traces import IN_USE, QUEUE_TIME
from kvscope.dashboards.web.sparkline import sparkline
from kvscope.dashboards.web.view import Here
from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.query import Query
from kvscope.monitor.reason_words import in_words
from kvscope.monitor.schema import EngineView, LatencyView, PointView
from kvscope.monitor.text import counted, percent

MOST_NAMED: Final = 5
"""Findings of one engine in its row."""
BOUND_OVER_S: Final = 10.0
SPARKLINE_S: Final = 600.0
SPARKLINE_POINTS: Final = 40
SORT: Final = "sort"
NO_LATENCY: Final = "No request was measured in the last five minutes, or its metrics have no histogram of it"


class EngineColumn(NamedTuple):
    """A column of the table. `sort_key`: the value to sort by, None where that is not known. Without a key, the column
    is not sortable. `needs_stream`: it is there if an engine's stream is read, since metrics do not expose it.
    """

    name: str
    parameter: str = ""
    sort_key: Callable[[EngineView], Any] | None = None
    needs_stream: bool = False


def p95_s(latency: LatencyView | None) -> float | None:
    """Return the 95th percentile, if any request was measured."""
    return None if latency is None else latency.p95_s


BOUND_COLUMN: Final = EngineColumn("Steps bound by", needs_stream=True)
FINDINGS_COLUMN: Final = EngineColumn("Open findings")
ENGINE_COLUMNS: Final = (
    EngineColumn("Engine", "engine", lambda engine: engine.engine),
    EngineColumn("Pool", "pool", lambda engine: engine.usage),
    EngineColumn("Requests", "waiting", lambda engine: engine.waiting),
    EngineColumn("Output", "output", lambda engine: engine.output_tokens_per_s),
    EngineColumn("First token, p95", "first_token", lambda engine: p95_s(engine.first_token)),
    EngineColumn("Queue time, p95", "queue_time", lambda engine: p95_s(engine.queue_time)),
    BOUND_COLUMN,
    FINDINGS_COLUMN,
)


def engine_table(query: Query, here: Here, engines: Sequence[EngineView], found: Sequence[FindingReport]) -> html.Table:
    """`engines`: the worst off first. `found`: the open findings of all of them."""
    has_stream = any(engine.signal == "stream" for engine in engines)
    columns = [column for column in ENGINE_COLUMNS if has_stream or not column.needs_stream]
    rows = []
    for engine in sorted_engines(here.place.get(SORT), engines):
        past = [] if here.moment or engine.status == "gone" else _recent_points(query, engine, SPARKLINE_S)
        own = [finding for finding in found if finding.engine == engine.engine]
        rows.append(_engine_row(query, here, engine, own, past, bound=has_stream))
    head = html.Thead(html.Tr([_column_head(here, column) for column in columns]))
    return html.Table([head, html.Tbody(rows)])


def sorted_engines(sort: str, engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines in the order that the address asks for, those without a value last, and equal ones as
    given.
    """
    columns = {column.parameter: column.sort_key for column in ENGINE_COLUMNS if column.sort_key is not None}
    value = columns.get(sort.removeprefix("-"))
    if value is None:
        return list(engines)
    known = [engine for engine in engines if value(engine) is not None]
    unknown = [engine for engine in engines if value(engine) is None]
    return sorted(known, key=value, reverse=sort.startswith("-")) + unknown


def _column_head(here: Here, column: EngineColumn) -> html.Th:
    """Return the heading of a column, which sorts by it: the most first, then the least, then the worst off again."""
    if column.sort_key is None:
        return html.Th(column.name, scope="col")
    chosen, name = here.place.get(SORT), column.parameter
    following = {f"-{name}": name, name: ""}.get(chosen, f"-{name}")
    order = {f"-{name}": "descending", name: "ascending"}.get(chosen, "none")
    sign = {"descending": " ▼", "ascending": " ▲"}.get(order, "")
    words = html.A([column.name, html.Span(sign, **aria(hidden="true"))], href=here.place.but(sort=following))
    return html.Th(words, scope="col", title="Sort by this column", **aria(sort=order))


def _recent_points(query: Query, engine: EngineView, seconds: float, until: str = "") -> list[PointView]:
    """As far as they are known: the agent that has the engine may not answer."""
    try:
        return query.points(engine.engine, seconds, SPARKLINE_POINTS, until=until)
    except KvscopeError:
        return []


def _engine_row(
    query: Query,
    here: Here,
    engine: EngineView,
    found: Sequence[FindingReport],
    past: Sequence[PointView],
    *,
    bound: bool,
) -> html.Tr:
    """One engine in a line. bound: whether the column of what bound its steps is there. past: its last minutes."""
    link = html.A(engine.engine, href=here.place.to("engine", engine=engine.engine), className="name")
    name = [html.Span(className=f"status {engine.status}", **aria(hidden="true")), link]
    status = f"gone, last seen {engine.at[:19].replace('T', ' ')} UTC" if engine.status == "gone" and engine.at else ""
    if not status and engine.status_since:
        status = f"{engine.status} since {clock_text(engine.status_since)} UTC"
    about = " · ".join(filter(None, (status or engine.status, engine.model, engine.version)))
    compared = sentence(slow_text(engine.slow)) if engine.slow is not None else None
    used = "not exposed" if engine.usage is None else f"{percent(engine.usage)} in use"
    cells: list[Any] = [
        html.Th([*name, html.Span(about, className="note", title=compared)], scope="row"),
        html.Td(
            [pool_balance.balance_bar(engine), html.Span(used, className="note"), *_usage_line(past)], className="pool"
        ),
        html.Td(
            [
                f"{number_text(engine.running)} running, {number_text(engine.waiting)} waiting",
                html.Span(queue_reasons(engine), className="note"),
                *_queue_line(past),
            ]
        ),
        html.Td(_output(engine)),
        html.Td(_latency(engine.first_token), **data(label="First token, p95")),
        html.Td(_latency(engine.queue_time), **data(label="Queue time, p95")),
        *([html.Td(_bound(query, engine, here.moment), **data(label=BOUND_COLUMN.name))] if bound else []),
        html.Td(
            _overview_findings(here, engine.engine, found) or html.Span("none", className="none"),
            **data(label=FINDINGS_COLUMN.name),
        ),
    ]
    return html.Tr(cells, key=engine.engine, className="bad" if found else "")


def _usage_line(past: Sequence[PointView]) -> list[Any]:
    return sparkline("Pool in use", [None if one.usage is None else 100 * one.usage for one in past], " %", IN_USE, 100)


def _queue_line(past: Sequence[PointView]) -> list[Any]:
    return sparkline("Waiting requests", [one.requests_waiting for one in past], "", QUEUE_TIME)


def _latency(latency: LatencyView | None) -> list[Any]:
    """Over the last five minutes."""
    if latency is None:
        return [html.Span(latency_text(None), className="note", title=NO_LATENCY)]
    return [latency_text(latency), html.Span(latency_note(latency), className="note")]


def _output(engine: EngineView) -> Any:
    """Tokens a second."""
    if engine.output_tokens_per_s is None and engine.computed_tokens_per_s is None:
        return html.Span(no_rate(engine), className="note")
    computed = html.Span(f"{number_text(engine.computed_tokens_per_s)} computed", className="note")
    return [number_text(engine.output_tokens_per_s, "tok/s"), computed]


def _bound(query: Query, engine: EngineView, then: str) -> list[Any]:
    """Return the most frequent bound on the size of the last steps."""
    if engine.signal == "metrics":
        return [html.Span("not exposed", className="note")]
    points = _recent_points(query, engine, BOUND_OVER_S, then)
    before = points[0].limits if points else {}
    grew = {limit: steps - before.get(limit, 0) for limit, steps in (points[-1].limits.items() if points else ())}
    steps = sum(grew.values())
    if not steps:
        return [html.Span("no steps", className="note")]
    most = max(grew, key=lambda limit: grew[limit])
    return [
        html.Span(className="swatch", style={"backgroundColor": css(LIMITS[most])}, **aria(hidden="true")),
        html.Span(in_words(most), title=most),
        html.Span(f"{percent(grew[most] / steps)} of {counted(steps, 'step')}", className="note"),
    ]


def _overview_findings(here: Here, engine: str, found: Sequence[FindingReport]) -> list[Any]:
    """Return the first of them, and where the others are."""
    links: list[Any] = [_overview_finding(here, finding) for finding in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        there = here.place.to("findings", engine=engine)
        links.append(html.A(f"and {len(found) - MOST_NAMED:,} more", href=there, className="brief-finding", key="more"))
    return links


def _overview_finding(here: Here, finding: FindingReport) -> html.A:
    return html.A(
        [html.Span(className=f"severity-dot {finding.severity}", **aria(hidden="true")), finding.title],
        href=here.place.to("finding", engine=finding.engine, id=finding.id),
        title=f"{finding.severity}: {finding.code}",
        className="brief-finding",
        key=finding.id,
    )
