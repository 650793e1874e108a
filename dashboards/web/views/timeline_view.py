"""One engine over time: who had the pool, who waited and why, what was computed, and what happened here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, in_words, percent
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EngineView, ExplanationView, PointView

from .. import ui
from ..charts import ChartMark, ChartRow, Trace
from ..display_text import (
    clock_text,
    latency_note,
    latency_text,
    no_rate,
    number_text,
    pool_full_in,
    queue_reasons,
    rate_note,
)
from ..links import rfc3339, wall_ns
from ..palette import LIMITS, REASONS
from ..pool import RUNNING_TRACE, latency_traces, points_over_time, pool_row, pool_text, queue_text, request_traces
from ..view import Here, PageView, engine_then
from .configuration_view import changes_text, last_starts

MAX_TIMELINE_POINTS: Final = 300
MOST_MARKS: Final = 40
QUIET_TIMELINE: Final = 20
"""Preemptions closer together than this part of the window are one run in the activity."""
LOST_MARK: Final = REASONS["PREEMPTED"]
PREFIX_HITS: Final = (58, 145, 134)
MEANT: Final = {
    "KV": "the next request lacked KV blocks",
    "TOKENS": "max_num_batched_tokens was used up",
    "SEQUENCES": "max_num_seqs requests ran",
    "ENCODER": "the encoder's budget was used up",
    "DEFERRED": "what waited was waiting for something outside of the scheduler",
    "NONE": "nothing more waited",
}


def view(query: Query, here: Here) -> PageView:
    """Its figures then, what happened in the window, and the chart of it with all that stands out."""
    engine = engine_then(query, here)
    since, until = here.window.since, "" if here.window.live else here.window.until
    points = query.points(here.name, limit=MAX_TIMELINE_POINTS, since=since, until=until)
    if here.window.live and points:  # of an engine that is young, as much as there is
        first_ns, known = points[0].at_ns, query.history(here.name).first
        if here.open_since_ns and known:  # the points are thinned: the first may be later than the finding's beginning
            first_ns = min(first_ns, max(here.open_since_ns, wall_ns(known, 0)))
        here = here._replace(window=here.window._replace(since_ns=max(here.window.since_ns, first_ns)))
    marks = _marks(query, here, points)
    explained = query.explain(here.name, since, until)
    found = [] if here.moment else query.findings("firing", here.name)  # of a past time, the forecast is over
    return PageView(
        {
            "summary": html.Section(_summary(here, engine, found), id="summary", **ui.aria(label="The engine")),
            "explanation": ui.card(_explanation(here, explained), id="explanation"),
            "chart": ui.card(_chart(here, points, marks), label="Timeline"),
            "marks": ui.card(_list(here, marks), id="marks"),
        }
    )


def _summary(here: Here, engine: EngineView, found: Sequence[FindingReport]) -> list[Any]:
    """Return the engine's state, and its main numbers."""
    full_in, band = pool_full_in(found)
    about = " · ".join(
        filter(
            None,
            (
                engine.model,
                engine.version,
                f"step {engine.step:,}" if engine.step is not None else "",
                f"restarted {counted(engine.restarts, 'time')}" if engine.restarts else "",
                f"as of {engine.at[:10]} {clock_text(engine.at)} UTC" if engine.at else "",
            ),
        )
    )
    tiles = (
        ("Running", number_text(engine.running), ""),
        ("Waiting", number_text(engine.waiting), queue_reasons(engine)),
        ("Pool in use", _percent(engine.usage), "cached-idle blocks not counted"),
        *([("Pool full in", full_in, band)] if full_in else []),
        ("Output", number_text(engine.output_tokens_per_s, "tok/s", no_rate(engine)), rate_note(engine)),
        ("Computed", number_text(engine.computed_tokens_per_s, "tok/s", no_rate(engine)), ""),
        *(
            (f"{name}, p95", latency_text(latency), latency_note(latency))
            for name, latency in (("First token", engine.first_token), ("Queue time", engine.queue_time))
            if latency is not None
        ),
        ("Preemptions", number_text(engine.preemptions), ""),
        ("Prefix hits", _percent(engine.prefix_hit_rate), ""),
    )
    return [
        html.H1(engine.engine),
        html.P([about, " · ", html.A("configuration", href=here.place.to("configuration"))], className="about"),
        ui.tiles(tiles),
    ]


def _percent(part: float | None) -> str:
    return "not exposed" if part is None else percent(part)


# -------------------------------------------------------------------- what happened


def _explanation(here: Here, explained: ExplanationView) -> list[Any]:
    """Return sentences, of which those about findings lead to them. Mere information stays in the view of findings."""
    codes = {finding.code for finding in explained.findings}
    sentences = [sentence for sentence in explained.sentences if sentence.partition(" ")[0].rstrip(":") not in codes]
    grave = [finding for finding in explained.findings if severity_at_least(finding.severity, "warning")]
    return [
        html.H2("Activity"),
        html.P(" ".join(sentences), className="explanation"),
        html.Ul([_finding(here, finding) for finding in grave], className="brief"),
    ]


def _finding(here: Here, finding: FindingReport) -> html.Li:
    ended = f", until {clock_text(finding.resolved_at)} UTC" if finding.resolved_at else ""
    return html.Li(
        [
            html.Div(
                [
                    html.Span(finding.severity, className=f"severity {finding.severity}"),
                    html.A(finding.title, href=here.place.to("finding", id=finding.id)),
                    html.Span(f"since {clock_text(finding.since)} UTC{ended}", className="since"),
                ]
            ),
            html.P(finding.explanation),
        ],
        key=finding.id,
    )


def _marks(query: Query, here: Here, points: Sequence[PointView]) -> list[ChartMark]:
    """Return the marks of the window, in order: findings, preemptions, epochs of the engine."""
    marks = _preemptions(here, points)
    for finding in query.findings(None, here.name, here.window.since, here.window.until):
        if finding.since and severity_at_least(finding.severity, "warning"):
            href = here.place.to("finding", id=finding.id)
            grave = finding.severity != "warning"
            marks.append(ChartMark(wall_ns(finding.since, 0), "error" if grave else "warning", finding.title, href))
    marks += _starts_marked(query, here)
    if here.engine.signal == "metrics":
        marks += [
            ChartMark(point.at_ns, "configuration", "The engine was restarted", _then(here, point.at_ns))
            for point in points
            if point.restarted
        ]
    inside = [mark for mark in marks if here.window.since_ns <= mark.at_ns <= here.window.until_ns]
    return sorted(inside)[-MOST_MARKS:]


def _starts_marked(query: Query, here: Here) -> list[ChartMark]:
    """Return the starts of the engine, with what they changed in its configuration."""
    there = here.place.to("configuration")
    epochs = [epoch.epoch for epoch in query.history(here.name).epochs]
    if not any(here.window.since_ns <= epoch <= here.window.until_ns for epoch in epochs):
        return []
    changed = {start.after.epoch: changes_text(start.changes) for start in last_starts(query, here)}
    texts = dict.fromkeys(epochs, "The engine was started")
    texts |= {epoch: f"The engine was restarted: {words or 'same configuration'}" for epoch, words in changed.items()}
    return [ChartMark(epoch, "configuration", text, there) for epoch, text in texts.items()]


def _preemptions(here: Here, points: Sequence[PointView]) -> list[ChartMark]:
    """One mark for each run of preemptions, which ends when there was none for a while."""
    while_ns = (here.window.until_ns - here.window.since_ns) // QUIET_TIMELINE
    runs: list[tuple[int, int, int]] = []
    for point, lost in zip(points, _differences(points, lambda point: point.preemptions), strict=True):
        if lost and runs and point.at_ns - runs[-1][1] <= while_ns:
            began, _, count = runs.pop()
            runs.append((began, point.at_ns, count + lost))
        elif lost:
            runs.append((point.at_ns, point.at_ns, lost))
    return [ChartMark(began, "preempted", counted(count, "preemption"), _then(here, began)) for began, _, count in runs]


def _then(here: Here, at_ns: int) -> str:
    """Return the address of this view with a chosen time, in an unchanged window."""
    return here.place.but(since=here.window.since, until=here.window.until, at=rfc3339(at_ns))


def _list(here: Here, marks: Sequence[ChartMark]) -> list[Any]:
    if not marks:
        return [
            html.H2("In this window"),
            ui.note("No finding began, nothing was preempted, the engine was not restarted."),
        ]
    items = [
        html.Li(
            [
                html.A(clock_text(rfc3339(mark.at_ns)), href=_then(here, mark.at_ns), title="as it was then"),
                html.Span(className=f"mark-of {mark.kind}", **ui.aria(hidden="true")),
                html.A(mark.text, href=mark.href),
            ]
        )
        for mark in marks
    ]
    return [html.H2("In this window"), html.Ul(items, className="happened")]


# -------------------------------------------------------------------- chart


def _chart(here: Here, points: Sequence[PointView], marks: Sequence[ChartMark]) -> list[Any]:
    if not points:
        return [ui.note("Nothing is known of this time.")]
    rows = [
        pool_row(points, 230),
        ChartRow("Requests", 120, request_traces(points)),
        ChartRow("Tokens per second", 84, _token_traces(points)),
        ChartRow("Setbacks per second", 58, _lost(points)),
    ]
    if any(point.first_token or point.queue_time for point in points):
        rows.insert(2, ChartRow("Latency over a minute", 84, latency_traces(points), unit=" s"))
    if limits := _limits(points):
        rows.append(ChartRow("Steps, by what bound them", 64, limits, 100, " %"))
    if any(point.prefix_hit_rate is not None for point in points):
        rows.append(ChartRow("Prefix hits since its start", 64, [_hit_rate(points)], 100, " %"))
    chart = points_over_time(
        "history",
        points,
        rows,
        here.window,
        marks=marks,
        at_ns=here.place.moment_ns(here.window.until_ns),
        caption=_caption(points),
    )
    hint = "Drag over the chart to look at a part of the time, click to choose a moment."
    before = here.place.to("compare", since=here.window.since, until=here.window.until, at="")
    compare = html.A(
        "Compare this window with the one before", href=before, **ui.key("c", "compare with the time before")
    )
    return [chart, html.P(hint, className="note hint"), html.P(compare, className="hint")]


def _token_traces(points: Sequence[PointView]) -> list[Trace]:
    if all(point.computed_tokens is None for point in points):  # a page's counters, as rates since the scrape before
        return [
            Trace(
                "prompt", (128, 160, 200), [point.computed_tokens_per_s for point in points], after=True, opacity=0.45
            ),
            Trace("output", RUNNING_TRACE, [point.output_tokens_per_s for point in points], "line", after=True),
        ]
    return [
        Trace(
            "computed",
            (128, 160, 200),
            _token_rate(points, lambda point: point.computed_tokens),
            after=True,
            opacity=0.45,
            title="prompt and output tokens",
        ),
        Trace("output", RUNNING_TRACE, _token_rate(points, lambda point: point.output_tokens), "line", after=True),
    ]


def _hit_rate(points: Sequence[PointView]) -> Trace:
    rates = [None if point.prefix_hit_rate is None else 100 * point.prefix_hit_rate for point in points]
    return Trace("hits", PREFIX_HITS, rates, "line", title="share of looked-up prompt tokens that were in the cache")


def _lost(points: Sequence[PointView]) -> list[Trace]:
    preemptions = Trace(
        "preemptions",
        LOST_MARK,
        _token_rate(points, lambda point: point.preemptions),
        after=True,
        title="requests that lost their blocks",
    )
    if points[-1].free is None:
        return [preemptions]
    return [
        preemptions,
        Trace(
            "failed allocations",
            REASONS["KV_BLOCKS"],
            _token_rate(points, lambda point: point.allocation_failures),
            after=True,
            title="times that blocks were asked for and not there",
        ),
    ]


def _limits(points: Sequence[PointView]) -> list[Trace]:
    met = {limit for point in points for limit in point.limits}
    steps = _differences(points, lambda point: point.steps)
    traces = []
    for limit in LIMITS:
        if limit in met:
            bound = _differences(points, partial(_bound_by, limit))
            share = [100 * part / whole if whole else 0.0 for part, whole in zip(bound, steps, strict=True)]
            faint = 0.25 if limit == "NONE" else 1.0
            traces.append(Trace(in_words(limit), LIMITS[limit], share, after=True, opacity=faint, title=MEANT[limit]))
    return traces


def _bound_by(limit: str, point: PointView) -> int:
    return point.limits.get(limit, 0)


def _differences(points: Sequence[PointView], total: Callable[[PointView], int | None]) -> list[int]:
    """Return by how much a sum grew until each time. It starts over with a new epoch of the engine."""
    sums = [total(point) or 0 for point in points]
    return [0, *(max(0, after - before) for before, after in pairwise(sums))][: len(points)]


def _token_rate(points: Sequence[PointView], total: Callable[[PointView], int | None]) -> list[float]:
    spans = [1.0, *((point.at_ns - before.at_ns) / 1e9 or 1.0 for before, point in pairwise(points))]
    rates = [grew / seconds for grew, seconds in zip(_differences(points, total), spans, strict=True)]
    return rates[1:2] + rates[1:] if len(rates) > 1 else rates  # what grew until the first moment is not known


def _caption(points: Sequence[PointView]) -> str:
    """Return the chart in words, for screen readers."""
    last = points[-1]
    times = f"From {clock_text(points[0].at)} to {clock_text(last.at)} UTC"
    return f"{times}. At the end, {pool_text(last)}; requests: {queue_text(last)}."
