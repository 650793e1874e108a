"""Every engine at a glance, and what is wrong with any of them: a line for each engine, the worst off first or sorted
by a column, with the last ten minutes of its pool and its queue.

    /?sort=COLUMN    by that column, the least first; -COLUMN: the most first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.base.text import counted, duration, in_words, percent
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EngineView, LatencyView, PointView

from .. import ui
from ..display_text import (
    clock_text,
    latency_note,
    latency_text,
    no_rate,
    number_text,
    pool_full_in,
    queue_reasons,
    sentence,
    slow_text,
)
from ..finding_cards import cards, dotted_link
from ..palette import LIMITS, css
from ..pictures import sparkline
from ..pool import IN_USE, QUEUE_TIME, balance_bar
from ..view import UNSERVED, Here, PageView, worst_first
from . import fleet_view

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
    words = html.A([column.name, html.Span(sign, **ui.aria(hidden="true"))], href=here.place.but(sort=following))
    return html.Th(words, scope="col", title="Sort by this column", **ui.aria(sort=order))


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
    link = ui.engine_link(here.place, engine.engine)
    name = [ui.status_dot(engine.status), link]
    status = f"gone, last seen {engine.at[:19].replace('T', ' ')} UTC" if engine.status == "gone" and engine.at else ""
    if not status and engine.status_since:
        status = f"{engine.status} since {clock_text(engine.status_since)} UTC"
    about = " · ".join(filter(None, (status or engine.status, engine.model, engine.version)))
    compared = sentence(slow_text(engine.slow)) if engine.slow is not None else None
    used = "not exposed" if engine.usage is None else f"{percent(engine.usage)} in use"
    usage = [None if one.usage is None else 100 * one.usage for one in past]
    usage_line = sparkline("Pool in use", usage, " %", IN_USE, 100)
    queue_line = sparkline("Waiting requests", [one.requests_waiting for one in past], "", QUEUE_TIME)
    cells: list[Any] = [
        ui.row_head([*name, html.Span(about, className="note", title=compared)]),
        html.Td([balance_bar(engine), ui.small_note(used), *usage_line], className="pool"),
        html.Td(
            [
                f"{number_text(engine.running)} running, {number_text(engine.waiting)} waiting",
                ui.small_note(queue_reasons(engine)),
                *queue_line,
            ]
        ),
        html.Td(_output(engine)),
        html.Td(_latency(engine.first_token), **ui.data(label="First token, p95")),
        html.Td(_latency(engine.queue_time), **ui.data(label="Queue time, p95")),
        *([html.Td(_bound(query, engine, here.moment), **ui.data(label=BOUND_COLUMN.name))] if bound else []),
        html.Td(
            _findings(here, engine.engine, found) or html.Span("none", className="none"),
            **ui.data(label=FINDINGS_COLUMN.name),
        ),
    ]
    return html.Tr(cells, key=engine.engine, className="bad" if found else "")


def _latency(latency: LatencyView | None) -> list[Any]:
    """Over the last five minutes."""
    if latency is None:
        return [html.Span(latency_text(None), className="note", title=NO_LATENCY)]
    return [latency_text(latency), ui.small_note(latency_note(latency))]


def _output(engine: EngineView) -> Any:
    """Tokens a second."""
    if engine.output_tokens_per_s is None and engine.computed_tokens_per_s is None:
        return ui.small_note(no_rate(engine))
    computed = ui.small_note(f"{number_text(engine.computed_tokens_per_s)} computed")
    return [number_text(engine.output_tokens_per_s, "tok/s"), computed]


def _bound(query: Query, engine: EngineView, then: str) -> list[Any]:
    """Return the most frequent bound on the size of the last steps."""
    if engine.signal == "metrics":
        return [ui.small_note("not exposed")]
    points = _recent_points(query, engine, BOUND_OVER_S, then)
    before = points[0].limits if points else {}
    grew = {limit: steps - before.get(limit, 0) for limit, steps in (points[-1].limits.items() if points else ())}
    steps = sum(grew.values())
    if not steps:
        return [ui.small_note("no steps")]
    most = max(grew, key=lambda limit: grew[limit])
    return [
        html.Span(className="swatch", style={"backgroundColor": css(LIMITS[most])}, **ui.aria(hidden="true")),
        html.Span(in_words(most), title=most),
        ui.small_note(f"{percent(grew[most] / steps)} of {counted(steps, 'step')}"),
    ]


def _findings(here: Here, engine: str, found: Sequence[FindingReport]) -> list[Any]:
    """Return the first of them, and where the others are."""
    links: list[Any] = [
        dotted_link(here.place, finding, className="brief-finding", key=finding.id) for finding in found[:MOST_NAMED]
    ]
    if len(found) > MOST_NAMED:
        there = here.place.to("findings", engine=engine)
        links.append(html.A(f"and {len(found) - MOST_NAMED:,} more", href=there, className="brief-finding", key="more"))
    return links


FULL_FINDINGS: Final = 2
"""How many findings are shown in full. The rest unfold."""
SLOW_QUEUE_S: Final = 1.0
"""A shorter time in the queue is not worth the headline."""


def view(query: Query, here: Here) -> PageView:
    """Return the table of engines, and the findings of all of them that were open then, or the fleet view for many
    engines.
    """
    if here.is_fleet:
        return fleet_view.view(query, here)
    then = here.moment
    engines = worst_first(query.engines(then)) if then else here.engines
    found = query.findings(None, since=then, until=then) if then else query.findings("firing")
    found = [finding for finding in found if severity_at_least(finding.severity, "warning")]
    unserved = any(engine.status in UNSERVED for engine in engines)
    slow = any(engine.slow is not None or _queue_p95_s(engine) >= SLOW_QUEUE_S for engine in engines)
    how = "bad" if found or unserved else "well" if _received(engines) and not slow else ""
    return PageView(
        {
            "head": html.H1(_headline(engines, found), className=how),
            "engines": ui.card(engine_table(query, here, engines, found), id="engines"),
            "findings": html.Section(
                cards(here, found, FULL_FINDINGS) if found or _received(engines) else [],
                id="findings",
                **ui.aria(label="Findings"),
            ),
        }
    )


def _headline(engines: Sequence[EngineView], found: Sequence[FindingReport]) -> str:
    """Return the worst engine in terms of its clients, and how many others have open findings."""
    there = _received(engines)
    if not there:
        return f"No engine is received. The past of {counted(len(engines), 'engine')} is kept"
    worst = engines[0]
    if found or worst.status in UNSERVED:
        own = [finding for finding in found if finding.engine == worst.engine]
        # The cause of a stuck engine comes first: another severe finding may have been open for long.
        own.sort(key=lambda finding: worst.status == "stuck" and not finding.code.startswith("stuck."))
        gravest = own[0].title if own else ""
        state = _unserved_text(worst)
        others = len({finding.engine for finding in found} - {worst.engine})
        full_in, band = pool_full_in(own)
        full = f"; its pool is full in {full_in} ({band})" if full_in else ""
        more = f" ({counted(others, 'other engine')} with open findings)" if others else ""
        return f"{worst.engine}{state or ': '}{': ' if state and gravest else ''}{_in_line(gravest)}{full}{more}"
    known = f"No known fault on {counted(there, 'engine')}"
    if worst.slow is not None:
        return f"{worst.engine}, since {clock_text(worst.slow.since)} UTC: {slow_text(worst.slow)}. {known}"
    slowest = max(engines, key=_queue_p95_s)
    if _queue_p95_s(slowest) >= SLOW_QUEUE_S:
        waiting = f", {counted(slowest.waiting, 'request')} waiting" if slowest.waiting else ""
        return f"{known}; queue p95 is {duration(_queue_p95_s(slowest))} on {slowest.engine}{waiting}"
    queue = max(engines, key=lambda engine: engine.waiting or 0)
    return f"{known}; {counted(queue.waiting, 'request')} waiting on {queue.engine}" if queue.waiting else known


def _unserved_text(engine: EngineView) -> str:
    """Return that clients of the engine get nothing, since when and how many, or an empty string if they are served."""
    if engine.status not in UNSERVED:
        return ""
    since = f" since {clock_text(engine.status_since)} UTC" if engine.status_since else ""
    if engine.status != "stuck":
        return f" {'has stopped' if engine.status == 'stopped' else 'is silent'}{since}"
    queue = (engine.running or 0) + (engine.waiting or 0)
    return f" has computed no token{since} with {counted(queue, 'unfinished request')}"


def _in_line(title: str) -> str:
    """Return a title for the middle of a sentence: names that are all capitals stay unchanged."""
    return title[:1].lower() + title[1:] if title[1:2].islower() else title


def _received(engines: Sequence[EngineView]) -> int:
    """Return how many of them the service has received itself."""
    return sum(engine.status != "gone" for engine in engines)


def _queue_p95_s(engine: EngineView) -> float:
    return p95_s(engine.queue_time) or 0.0
