"""Every engine at a glance, the worst off first, and what is wrong with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.dashboards.web import pool_balance
from kvscope.dashboards.web.display_text import clock_text, no_rate, number_text, pool_full_in, queue_reasons
from kvscope.dashboards.web.finding_cards import cards
from kvscope.dashboards.web.markup import aria, data
from kvscope.dashboards.web.palette import LIMITS, css
from kvscope.dashboards.web.view import UNSERVED, Here, PageView, worst_first
from kvscope.dashboards.web.views import fleet_view
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.query import Query
from kvscope.monitor.reason_words import in_words
from kvscope.monitor.schema import EngineView
from kvscope.monitor.text import counted, percent

FULL_FINDINGS: Final = 2
"""So many findings are shown in full; the rest unfold."""
MOST_NAMED: Final = 5
"""Findings of one engine in its row."""
BOUND_OVER_S: Final = 10.0
ENGINE_COLUMNS: Final = ("Engine", "Pool", "Requests", "Output")
BOUND_COLUMN: Final = "Steps bound by"
"""There if an engine's stream is read: metrics do not expose it."""
FINDINGS_COLUMN: Final = "Open findings"


def view(query: Query, here: Here) -> PageView:
    """The table of engines, and the findings of all of them that were open then; of many engines the fleet view."""
    if here.is_fleet:
        return fleet_view.view(query, here)
    then = here.moment
    engines = worst_first(query.engines(then)) if then else here.engines
    found = query.findings(None, since=then, until=then) if then else query.findings("firing")
    found = [finding for finding in found if finding.severity != "info"]
    bound = any(engine.signal == "stream" for engine in engines)
    columns = (*ENGINE_COLUMNS, *([BOUND_COLUMN] if bound else ()), FINDINGS_COLUMN)
    rows = [
        _engine_row(query, here, engine, [f for f in found if f.engine == engine.engine], bound=bound)
        for engine in engines
    ]
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in columns]))
    unserved = any(engine.status in UNSERVED for engine in engines)
    how = "bad" if found or unserved else "well" if _heard(engines) else ""
    return PageView(
        {
            "head": html.H1(_overview_headline(engines, found), className=how),
            "engines": html.Section(html.Table([head, html.Tbody(rows)]), id="engines", className="card"),
            "findings": html.Section(
                cards(here, found, FULL_FINDINGS) if found or _heard(engines) else [],
                id="findings",
                **aria(label="Findings"),
            ),
        }
    )


def _overview_headline(engines: Sequence[EngineView], found: Sequence[FindingReport]) -> str:
    """The worst engine in terms of its clients, and how many others have open findings."""
    there = _heard(engines)
    if not there:
        return f"No engine is received; the past of {counted(len(engines), 'engine')} is kept"
    worst = engines[0]
    if found or worst.status in UNSERVED:
        gravest = next((finding.title for finding in found if finding.engine == worst.engine), "")
        state = _unserved_text(worst)
        others = len({finding.engine for finding in found} - {worst.engine})
        full_in, band = pool_full_in([finding for finding in found if finding.engine == worst.engine])
        full = f"; its pool is full in {full_in} ({band})" if full_in else ""
        more = f" ({counted(others, 'other engine')} with open findings)" if others else ""
        return f"{worst.engine}{state or ': '}{': ' if state and gravest else ''}{_in_line(gravest)}{full}{more}"
    queue = max(engines, key=lambda engine: engine.waiting or 0)
    known = f"No known fault on {counted(there, 'engine')}"
    return f"{known}; {counted(queue.waiting, 'request')} waiting on {queue.engine}" if queue.waiting else known


def _unserved_text(engine: EngineView) -> str:
    """That clients of the engine get nothing, since when and how many; empty if they are served."""
    if engine.status not in UNSERVED:
        return ""
    since = f" since {clock_text(engine.status_since)} UTC" if engine.status_since else ""
    if engine.status != "stuck":
        return f" {'has stopped' if engine.status == 'stopped' else 'is silent'}{since}"
    queue = (engine.running or 0) + (engine.waiting or 0)
    return f" has computed no token{since} with {counted(queue, 'unfinished request')}"


def _in_line(title: str) -> str:
    """A title in the middle of a sentence: names that are all capitals stay as they are."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def _heard(engines: Sequence[EngineView]) -> int:
    """How many of them the service has heard itself."""
    return sum(engine.status != "gone" for engine in engines)


def _engine_row(
    query: Query, here: Here, engine: EngineView, found: Sequence[FindingReport], *, bound: bool
) -> html.Tr:
    """One engine in a line. bound: whether the column of what bound its steps is there."""
    link = html.A(engine.engine, href=here.place.to("engine", engine=engine.engine), className="name")
    name = [html.Span(className=f"status {engine.status}", **aria(hidden="true")), link]
    status = f"gone, last heard {engine.at[:19].replace('T', ' ')} UTC" if engine.status == "gone" and engine.at else ""
    if not status and engine.status_since:
        status = f"{engine.status} since {clock_text(engine.status_since)} UTC"
    about = " · ".join(filter(None, (status or engine.status, engine.model, engine.version)))
    used = "not exposed" if engine.usage is None else f"{percent(engine.usage)} in use"
    cells: list[Any] = [
        html.Th([*name, html.Span(about, className="note")], scope="row"),
        html.Td([pool_balance.balance_bar(engine), html.Span(used, className="note")], className="pool"),
        html.Td(
            [
                f"{number_text(engine.running)} running, {number_text(engine.waiting)} waiting",
                html.Span(queue_reasons(engine), className="note"),
            ]
        ),
        html.Td(_output(engine)),
        *([html.Td(_bound(query, engine, here.moment), **data(label=BOUND_COLUMN))] if bound else []),
        html.Td(
            _overview_findings(here, engine.engine, found) or html.Span("none", className="none"),
            **data(label=FINDINGS_COLUMN),
        ),
    ]
    return html.Tr(cells, key=engine.engine, className="bad" if found else "")


def _output(engine: EngineView) -> Any:
    """Tokens a second."""
    if engine.output_tokens_per_s is None and engine.computed_tokens_per_s is None:
        return html.Span(no_rate(engine), className="note")
    computed = html.Span(f"{number_text(engine.computed_tokens_per_s)} computed", className="note")
    return [number_text(engine.output_tokens_per_s, "tok/s"), computed]


def _bound(query: Query, engine: EngineView, then: str) -> list[Any]:
    """What kept most of the last steps from being larger."""
    if engine.signal == "metrics":
        return [html.Span("not exposed", className="note")]
    points = query.points(engine.engine, BOUND_OVER_S, until=then)
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
    """The first of them, and where the others are."""
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
