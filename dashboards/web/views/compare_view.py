"""Compare: what got better and what got worse, from one window to another, of this engine or of two.

    /compare?engine=ENGINE&from=TIME&to=TIME&with=ENGINE&with_from=TIME&with_to=TIME

The window is compared with that of `with_…`. Without, it is as long a time just before it, or of another engine the
same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.errors import BadQuestion, NotKnown
from kvscope.monitor.base.text import counted, duration, in_words, percent
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import Diff, FindingRow, MetricRow, PointView, WindowStats

from .. import ui
from ..charts import ChartMark, ChartRow
from ..display_text import clock_text, sentence
from ..links import PagePlace, PageWindow, rfc3339, wall_ns
from ..pool import points_over_time, pool_row, pool_text, queue_text, request_traces
from ..time_menu import time_field
from ..view import Here, PageView
from .configuration_view import before_and_after, last_starts

MAX_COMPARE_POINTS: Final = 300
MOST_LINKS: Final = 6
AGAINST: Final = ("with", "with_from", "with_to")
CHANGE_SIGNS: Final = {"better": "▲", "worse": "▼", "same": "=", "differs": "↕", "": ""}
STATUS_SIGNS: Final = {"added": "+ new", "unchanged": "= open", "removed": "− gone"}
MANY_TIMES: Final = 10
DAY_NS: Final = 86_400_000_000_000
NO_TIME: Final = "Where no time is given: as long a time just before it, or of another engine the same time."


def view(query: Query, here: Here) -> PageView:
    """Return the comparison in a sentence, as a table, as findings, and both pools over time, with the form to choose
    other windows.
    """
    try:
        compared = _compared(query, here)
    except (NotKnown, BadQuestion) as error:
        why = html.P(sentence(str(error)), role="alert")
        return PageView(
            {"head": html.Header([html.H1("Nothing to compare"), why, _form(query, here, None)], className="card")}
        )
    both = (compared.before, compared.after)
    points = [
        query.points(side.engine, limit=MAX_COMPARE_POINTS, since=side.since or "", until=side.until or "")
        for side in both
    ]
    return PageView(
        {
            "head": html.Header(
                [*_headline(compared), _sides(here.place, compared), _form(query, here, compared)],
                className="card",
            ),
            "findings": ui.card(_findings(here.place, compared), id="compared-findings"),
            "figures": ui.card(_metrics(compared), "card wide", id="figures"),
            "pools": ui.card(_pools(here, both, points), id="pools", label="Timeline"),
        }
    )


def _compared(query: Query, here: Here) -> Diff:
    """Return the comparison. Raises NotKnown, and BadQuestion for windows that cannot be compared."""
    place, window = here.place, here.window
    since, until = window.since, "" if window.live else window.until
    if not (place.since or place.until or place.at):
        since = ""  # as much of what is known as leaves something to hold it against
    other = place.get("with")
    now_ns = next((wall_ns(one.at, 0) for one in here.engines if one.engine == (other or here.name) and one.at), 0)
    against = [rfc3339(wall_ns(at, now_ns)) if at else "" for at in map(place.get, AGAINST[1:])]
    return query.compare(here.name, since, until, other, *against)


def _headline(compared: Diff) -> list[Any]:
    came = sum(row.status == "added" and severity_at_least(row.severity, "warning") for row in compared.findings)
    went = sum(row.status == "removed" and severity_at_least(row.severity, "warning") for row in compared.findings)
    better, worse, same = (sum(row.change == word for row in compared.metrics) for word in ("better", "worse", "same"))
    words = f"{counted(came, 'new finding')}" if came else "No new finding"
    if went:
        words += f", {went:,} gone"
    figures = f"{counted(worse, 'figure')} worse, {better:,} better, {same:,} the same"
    if compared.after.computed_nothing and not compared.before.computed_nothing:
        figures = "no token was computed in the second window"
    return [html.H1(f"{words}; {figures}", className="bad" if compared.is_worse else "well" if not worse else "")]


# -------------------------------------------------------------------- what is compared


def _sides(place: PagePlace, compared: Diff) -> html.Dl:
    parts: list[Any] = []
    for name, side in (("Before", compared.before), ("After", compared.after)):
        there = place.to("engine", engine=side.engine, since=side.since or "", until=side.until or "", at="")
        parts += [
            html.Dt(name),
            html.Dd(
                [
                    html.A(side.engine, href=there),
                    html.Span(f"{_when(side, compared)}, {duration(side.seconds)}"),
                ]
            ),
        ]
    return html.Dl(parts, className="sides")


def _when(side: WindowStats, compared: Diff) -> str:
    """Return from when to when, with the days where they are not the same."""
    days = {(at or "")[:10] for one in (compared.before, compared.after) for at in (one.since, one.until)}
    since, until = (
        clock_text(at) if len(days) == 1 or not at else f"{at[:10]} {clock_text(at)}" for at in (side.since, side.until)
    )
    return f"{since} – {until} UTC"


def _form(query: Query, here: Here, compared: Diff | None) -> html.Form:
    """Empty fields are left out of the address."""
    place, window = here.place, here.window
    names = sorted(one.engine for one in here.engines)
    since, until = (
        (compared.after.since, compared.after.until) if compared is not None else (window.since, window.until)
    )
    with_since, with_until = (_local(place.get(name), window.until_ns) for name in AGAINST[1:])
    this: list[Any] = [ui.field("hidden", "engine", here.name)]
    against: list[Any] = []
    if len(names) > 1:
        options = [html.Option(name, value=name) for name in names]
        this = [html.Label([html.Span("Engine"), html.Select(options, name="engine", **ui.data(value=here.name))])]
        others = ui.same(name for name in names if name != here.name)
        against = [ui.choice("with", "Engine", others, place.get("with"), none="the same")]
    this += [_time("from", "From", (since or "")[:19]), _time("to", "To", (until or "")[:19])]
    against += [_time("with_from", "From", with_since), _time("with_to", "To", with_until)]
    actions: list[Any] = [html.Button("Compare", type="submit")]
    if compared is not None:
        actions.append(html.A("Swap", href=_swapped(place, compared), className="button"))
    actions += _offered(query, here)
    if any(map(place.get, AGAINST)):
        before_it = place.but(**dict.fromkeys(AGAINST, ""))
        actions.append(html.A("With the time before it", href=before_it, className="button"))
    return html.Form(
        [
            html.Fieldset([html.Legend("This window"), *this], className="filter"),
            html.Fieldset([html.Legend("Compared with"), *against], className="filter"),
            html.Div([*actions, ui.note(NO_TIME)], className="filter"),
        ],
        action="/compare",
        method="get",
        className="to-compare",
        key=place.but(),
    )


def _offered(query: Query, here: Here) -> list[Any]:
    """Windows that people ask for: before and after the last start, and the same time of the day before."""
    place, window = here.place, here.window
    links = []
    starts = last_starts(query, here)
    if starts:
        there = before_and_after(place, starts[0], here.engine.at or "")
        links.append(html.A("Before and after the last start", href=there, className="button"))
    first = query.history(here.name).first
    if first and wall_ns(first, 0) <= window.since_ns - DAY_NS:
        day = {"with_from": rfc3339(window.since_ns - DAY_NS), "with_to": rfc3339(window.until_ns - DAY_NS)}
        there = place.to("compare", since=window.since, until=window.until, at="", **day)
        links.append(html.A("With the same time yesterday", href=there, className="button"))
    return links


def _time(name: str, words: str, value: str) -> html.Label:
    return html.Label([html.Span(words), time_field(name, value)])


def _local(text: str, now_ns: int) -> str:
    """Return a TIME of the address as a field has it, or an empty string for none, and for an invalid one."""
    try:
        return rfc3339(wall_ns(text, now_ns))[:19] if text else ""
    except BadQuestion:
        return ""


def _swapped(place: PagePlace, compared: Diff) -> str:
    before, after = compared.before, compared.after
    other = after.engine if after.engine != before.engine else ""
    against = dict(zip(AGAINST, (other, after.since or "", after.until or ""), strict=True))
    return place.to(
        "compare", engine=before.engine, since=before.since or "", until=before.until or "", at="", **against
    )


# -------------------------------------------------------------------- figures


def _metrics(compared: Diff) -> list[Any]:
    head = ui.headings("Metric", "Before#", "After#", "Change", "Difference#", "Before and after")
    rows = [_metric_row(row) for row in compared.metrics if row.before is not None or row.after is not None]
    note = 'Values within 5 % count as the same. "differs": neither direction is better.'
    table = html.Table([head, html.Tbody(rows)], className="compared figures")
    return [html.H2("Metrics"), table, html.P(note, className="note hint")]


def _metric_row(row: MetricRow) -> html.Tr:
    most = max(row.before or 0.0, row.after or 0.0) or 1.0
    rods = [
        html.Span(className=f"rod-of {side}", style={"width": f"{100 * (value or 0.0) / most:.2f}%"})
        for side, value in (("before", row.before), (f"after {row.change}", row.after))
    ]
    return ui.tr(
        ui.row_head(metric_in_words(row.name)),
        html.Td(_value(row.before, row.unit), className="n"),
        html.Td(_value(row.after, row.unit), className="n"),
        html.Td(
            [
                html.Span(CHANGE_SIGNS[row.change], className="sign", **ui.aria(hidden="true")),
                html.Span(f" {row.change}", className="word"),
            ],
            className=f"change {row.change}",
        ),
        html.Td(_by(row), className="n"),
        html.Td(rods, className="rods", **ui.aria(hidden="true")),
        key=row.name,
    )


def metric_in_words(name: str) -> str:
    """Return the name of a metric, with the reason of a wait in words."""
    what, *reasons, share = name.split(", ") if name.startswith("waited, ") else (name, "")
    return ", ".join([what, *map(in_words, reasons), share]) if reasons else name


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "none"
    if unit == "share":
        return percent(value)
    if unit == "s":
        return f"{value:,.{3 if value < 10 else 1}f} s"
    return f"{value:,.1f} {unit}"


def _by(row: MetricRow) -> str:
    """Return the relative change, which does not exist for next to nothing."""
    if row.change in ("same", "") or not row.before or row.after is None:
        return ""
    if _value(row.before, row.unit) == _value(0.0, row.unit):
        return ""
    if row.after >= MANY_TIMES * row.before:
        return f"× {row.after / row.before:,.0f}"
    return f"{row.after / row.before - 1:+.0%}".replace("-", "−").replace("%", " %")


# -------------------------------------------------------------------- findings


def _findings(place: PagePlace, compared: Diff) -> list[Any]:
    heading = html.H2("Findings added, unchanged and removed")
    if not compared.findings:
        return [heading, ui.note("None in either window.")]
    columns = ("Change", "Severity", "Finding", "Code", "Verdict", "Before", "After", "Requests", "Occurrences")
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in columns]))
    rows = [_finding(place, compared, row) for row in compared.findings]
    return [heading, html.Div(html.Table([head, html.Tbody(rows)], className="compared"), className="wide")]


def _finding(place: PagePlace, compared: Diff, row: FindingRow) -> html.Tr:
    side = compared.before if row.status == "removed" else compared.after
    sign, word = STATUS_SIGNS[row.status].split()
    then = place._replace(since="", until="", at=side.until or "")
    reports = {one.id: one for one in (*compared.before.findings, *compared.after.findings) if one.code == row.code}
    named: list[Any] = [ui.request_link(then, side.engine, name) for name in row.requests[:MOST_LINKS]]
    each: list[Any] = [_link(place, compared, one) for one in list(reports.values())[:MOST_LINKS]]
    return ui.tr(
        html.Td(
            [html.Span(sign, className="sign", **ui.aria(hidden="true")), f" {word}"],
            className=f"change {word} {row.severity}",
        ),
        html.Td(row.severity, className=f"severity {row.severity}"),
        ui.row_head(row.title),
        html.Td(html.Code(row.code)),
        html.Td(row.verdict),
        ui.number_cell(row.before),
        ui.number_cell(row.after),
        html.Td(named + ui.and_more(len(row.requests) - MOST_LINKS), className="blocks"),
        html.Td(each + ui.and_more(len(reports) - MOST_LINKS), className="blocks"),
        key=row.code,
    )


def _link(place: PagePlace, compared: Diff, finding: FindingReport) -> html.A:
    words = f"since {clock_text(finding.since)}" if finding.since else "from the start"
    if compared.before.engine != compared.after.engine:
        words = f"{'before' if finding.engine == compared.before.engine else 'after'}, {words}"
    there = place.to("finding", engine=finding.engine, id=finding.id, since="", until="", at="")
    return html.A(words, href=there, title=finding.title, className="id")


# -------------------------------------------------------------------- over time


def _pools(here: Here, both: Sequence[WindowStats], points: Sequence[Sequence[PointView]]) -> list[Any]:
    """One above the other, a second as wide and a block as high in both."""
    longest_ns = max(round(side.seconds * 1e9) for side in both)
    tops = [pool_row(side, 130).top or 0 for side in points]
    queues = [max(point.requests_waiting or 0, point.requests_running or 0) for side in points for point in side]
    parts: list[Any] = [html.H2("Both pools, to the same scale")]
    for name, words, side, there in zip(("before", "after"), ("Before", "After"), both, points, strict=True):
        parts.append(html.H3(f"{words}: {side.engine}, from {clock_text(side.since)} to {clock_text(side.until)} UTC"))
        if not there or not side.since:
            parts.append(ui.note("No points of this window are kept."))
            continue
        since_ns = wall_ns(side.since, 0)
        window = PageWindow(since_ns, since_ns + max(longest_ns, 1_000_000), False)
        rows = [
            pool_row(there, 130)._replace(top=max(tops, default=0)),
            ChartRow("Requests", 70, request_traces(there), max(queues, default=0)),
        ]
        at_ns = _chosen_ns(here.place, window)
        times = ("from", "to") if name == "after" else AGAINST[1:]
        parts.append(
            points_over_time(
                f"{name}-pool",
                there,
                rows,
                window,
                marks=_marks(here.place, side, window),
                at_ns=at_ns,
                caption=_caption(words, there),
                times=times,
            )
        )
    return parts


def _chosen_ns(place: PagePlace, window: PageWindow) -> int | None:
    """Return the moment that is chosen, if it is in this window."""
    at_ns = place.moment_ns(window.until_ns)
    return at_ns if at_ns is not None and window.since_ns <= at_ns <= window.until_ns else None


def _marks(place: PagePlace, side: WindowStats, window: PageWindow) -> list[ChartMark]:
    """Where findings began."""
    found = []
    for finding in side.findings:
        at_ns = wall_ns(finding.since, 0) if finding.since else 0
        if severity_at_least(finding.severity, "warning") and window.since_ns <= at_ns <= window.until_ns:
            href = place.to("finding", engine=finding.engine, id=finding.id, since="", until="", at="")
            found.append(ChartMark(at_ns, "warning" if finding.severity == "warning" else "error", finding.title, href))
    return sorted(found)


def _caption(words: str, points: Sequence[PointView]) -> str:
    """Return the chart in words, for screen readers."""
    last = points[-1]
    times = f"from {clock_text(points[0].at)} to {clock_text(last.at)} UTC"
    return f"{words}, {times}. At its end, {pool_text(last)}; requests: {queue_text(last)}."
