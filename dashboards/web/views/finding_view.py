"""One finding: its requests and blocks, its evidence, the pool meanwhile, its remedy, and its notifications."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.base.text import counted
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EventView, NotificationsView, PointView

from .. import ui
from ..charts import ChartMark, ChartRow
from ..display_text import clock_text, sentence
from ..finding_cards import advice, alternatives, culprits, evidence, marks
from ..links import BEFORE_FINDING_S, PagePlace, PageWindow, rfc3339, wall_ns
from ..pool import points_over_time, pool_row, request_traces
from ..view import Here, PageView
from .alerts_view import literally, silence_form, silence_note

MAX_SHOWN_CULPRITS: Final = 60
MAX_FINDING_EVENTS: Final = 14
LEAST_COMPARED_NS: Final = 10_000_000_000
MOST_COMPARED_NS: Final = 600_000_000_000
SEEN_BEFORE_END_NS: Final = 3_500_000_000
"""A finding ends a moment after it was last seen: its subject is visible this long before."""
REPORTED_AFTER_NS: Final = 1_000_000_000
"""But not before its first report: an engine's events arrive a little later."""


def view(query: Query, here: Here) -> PageView:
    """Return the finding with that `id`."""
    detail = query.finding(here.place.id)
    finding, points = detail.finding, detail.points
    then = _then(here.place, finding)
    return PageView(
        {
            "finding": html.Article(
                [
                    marks(here, finding),
                    html.H1(finding.title),
                    html.P(finding.explanation, className="explanation"),
                    *culprits(then, finding, MAX_SHOWN_CULPRITS),
                    *_root_causes(here.place, finding),
                    html.H2("What to do", className="unseen"),
                    *advice(finding),
                    html.Nav(_links(here, then, finding), className="more", **ui.aria(label="More about it")),
                ],
                className=f"finding whole {finding.severity}",
                id="finding",
            ),
            "chart": ui.card(_chart(here, finding, points), label="Meanwhile"),
            "alerts": ui.card(
                [
                    *_notifications(finding, query.notifications(finding.id)),
                    *silence_note(here.place.get("silenced"), query.alert_state().silences),
                ],
                id="notifications",
            ),
            "grounds": html.Div(
                [
                    ui.card(
                        [
                            html.H2("Evidence"),
                            evidence(then, finding),
                            *([html.H2("Alternatives"), alternatives(finding)] if finding.alternatives else []),
                        ],
                        "card scroll",
                        id="evidence",
                    ),
                    ui.card(_began(query, then, finding), id="began"),
                ],
                className="beside",
            ),
        }
    )


def _then(place: PagePlace, finding: FindingReport) -> PagePlace:
    """Return where it is visible: now, as long as it is there, or else just before its end."""
    place = place._replace(engine=finding.engine)
    if not finding.resolved_at:
        return place
    last_ns = wall_ns(finding.resolved_at, 0) - SEEN_BEFORE_END_NS
    last_received_ns = wall_ns(finding.since, 0) + REPORTED_AFTER_NS if finding.since else last_ns
    return place._replace(since="", until="", at=rfc3339(max(last_ns, last_received_ns)))


def _root_causes(place: PagePlace, finding: FindingReport) -> list[Any]:
    """Return its causes, if other findings cause it."""
    if not finding.caused_by:
        return []
    links = [html.A(code, href=place.to("findings", code=code), className="id") for code in finding.caused_by]
    return [html.Dl([html.Dt("caused by"), html.Dd(links)], className="culprits")]


def _links(here: Here, then: PagePlace, finding: FindingReport) -> list[Any]:
    return [
        html.A("Runbook", href=f"/{finding.runbook}"),
        *_comparison(here, finding),
        html.A("Blocks at that time" if finding.resolved_at else "Blocks now", href=then.to("blocks")),
        html.A("Retained blocks", href=then.to("held")),
        html.A("Timeline of that time", href=_timeline(then, finding)),
        html.A("All findings", href=then.to("findings")),
    ]


def _timeline(then: PagePlace, finding: FindingReport) -> str:
    """Return the address of the engine's timeline: of an open finding, from before it began until now."""
    if finding.resolved_at or not finding.since:
        return then.to("engine")
    began_ns = wall_ns(finding.since, 0) - round(BEFORE_FINDING_S * 1e9)
    return then.to("engine", since=rfc3339(began_ns), until="", at="")


def _comparison(here: Here, finding: FindingReport) -> list[Any]:
    """Its first minutes, compared with as long a time before it began."""
    if not finding.since:
        return []
    began_ns = wall_ns(finding.since, 0)
    now = next((engine.at for engine in here.engines if engine.engine == finding.engine), None)
    ended_ns = wall_ns(finding.resolved_at or now or finding.since, 0)
    lasted_ns = min(max(ended_ns - began_ns, LEAST_COMPARED_NS), MOST_COMPARED_NS)
    first = {"since": finding.since, "until": rfc3339(began_ns + lasted_ns), "at": ""}
    there = here.place.to("compare", engine=finding.engine, **first)
    return [html.A("Compare with before it began", href=there)]


# -------------------------------------------------------------------- notifications


def _notifications(finding: FindingReport, alerting: NotificationsView) -> list[Any]:
    heading = html.H2("Notifications")
    if not alerting.receivers:
        asked = html.Code("monitor serve --alert URL")
        return [
            heading,
            ui.note(["This service has no receivers. Start it with ", asked, " to send alerts."]),
        ]
    parts: list[Any] = [heading]
    for silence in alerting.silences:
        words = f"Silenced until {clock_text(silence.until)} UTC: {silence.comment or 'without a comment'} "
        parts.append(html.P([words, html.A("All silences", href="/alerts")], className="silenced"))
    rows = [
        ui.tr(
            ui.row_head(f"{clock_text(one.created_at)} UTC"),
            html.Td(one.kind),
            html.Td(one.receiver),
            html.Td(one.state),
            html.Td(counted(one.tries, "try", "tries")),
            html.Td(one.answer, className="note"),
            key=str(one.number),
        )
        for one in alerting.deliveries
    ]
    none = ui.note("No notification yet. Findings for information and pending findings send none.")
    parts.append(html.Table(html.Tbody(rows)) if rows else none)
    return parts if finding.resolved_at else [*parts, _silence_form(finding)]


def _silence_form(finding: FindingReport) -> html.Details:
    matchers = (f"code={finding.code}", f"engine={literally(finding.engine)}")
    return silence_form(
        "Acknowledge, or silence it",
        [ui.field("hidden", "matchers", matcher) for matcher in matchers],
        "Comment",
        "Silence it until then",
        f"Of {finding.code} on {finding.engine}. It stays on this page.",
    )


# -------------------------------------------------------------------- meanwhile


def _chart(here: Here, finding: FindingReport, points: Sequence[PointView]) -> list[Any]:
    heading = html.H2("Pool and queues during the finding")
    if not points:
        return [heading, ui.note("No data of that time is kept.")]
    window = here.window
    if not (here.place.since or here.place.until):
        window = PageWindow(points[0].at_ns, max(points[-1].at_ns, points[0].at_ns + 1_000_000), False)
    rows = [
        pool_row(points, 190),
        ChartRow("Requests", 110, request_traces(points)),
    ]
    caption = (
        f"Blocks by who holds them, and requests, from {clock_text(window.since)} to {clock_text(window.until)} UTC."
    )
    chart = points_over_time(
        "meanwhile",
        points,
        rows,
        window,
        marks=_onset(here.place, finding, window),
        at_ns=here.place.moment_ns(window.until_ns),
        caption=caption,
    )
    return [heading, chart]


def _onset(place: PagePlace, finding: FindingReport, window: PageWindow) -> list[ChartMark]:
    """Where it began, and where it ended."""
    grave = "error" if severity_at_least(finding.severity, "error") else "warning"
    found = []
    for at, words in ((finding.since, f"It began: {finding.title}"), (finding.resolved_at, "It was over")):
        at_ns = wall_ns(at, 0) if at else 0
        if window.since_ns <= at_ns <= window.until_ns:
            kind = grave if at == finding.since else "configuration"
            href = place.to("blocks", engine=finding.engine, at=at or "")
            found.append(ChartMark(at_ns, kind, words, href))  # type: ignore[arg-type]
    return found


def _began(query: Query, then: PagePlace, finding: FindingReport) -> list[Any]:
    """Return the events around its beginning."""
    heading = html.H2("Events at its start")
    events: list[EventView] = []
    if finding.since:
        began = rfc3339(wall_ns(finding.since, 0) + 1_000_000)
        try:
            before = query.events(finding.engine, until=began, limit=1)
            if before:
                events = query.events(finding.engine, around=before[-1].position, limit=MAX_FINDING_EVENTS)
        except NotKnown as error:
            return [heading, ui.note(sentence(str(error)))]
    if not events:
        return [heading, ui.note("No event of that time is kept.")]
    items = [
        html.Li(
            [
                html.A(
                    event.at[11:23] if event.at else "then",
                    href=then.to("blocks", since="", until="", at=event.position),
                    title="the pool at that event",
                ),
                html.Code(event.kind),
                _about(then, event),
            ],
            key=event.position,
        )
        for event in events
    ]
    return [heading, html.Ol(items, className="happened")]


def _about(then: PagePlace, event: EventView) -> html.Span:
    if not event.request:
        return html.Span(event.text)
    link = html.A(event.request, href=then.to("request", id=event.request), className="id")
    text = event.text.replace(f"{event.request}: ", "")
    return html.Span([link, " ", text])
