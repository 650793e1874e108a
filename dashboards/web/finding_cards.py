"""Findings in full: each with its culprits, and what to do, what to change, what will not help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from kvscope.monitor.base.text import counted
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least

from . import ui
from .display_text import age, clock_text
from .links import PagePlace
from .view import UNSERVED, Here

MAX_CARD_CULPRITS = 12


def cards(here: Here, findings: Sequence[FindingReport], in_full: int) -> list[Any]:
    """Return the cards of findings that need action, the first of them in full, and then those that only inform. The
    other cards unfold.
    """
    grave = [finding for finding in findings if severity_at_least(finding.severity, "warning")]
    others = [finding for finding in findings if not severity_at_least(finding.severity, "warning")]
    parts: list[Any] = [_card(here, finding) for finding in grave[:in_full]]
    if not grave:
        unserved = [engine.engine for engine in here.engines if engine.status in UNSERVED]
        if unserved:
            parts.append(ui.note(f"No finding explains yet why {unserved[0]} serves no client."))
        else:
            parts.append(html.P("No finding is open.", className="all-well"))
    parts += [_folded(here, finding) for finding in [*grave[in_full:], *others]]
    return parts


def dotted_link(place: PagePlace, finding: FindingReport, **more: Any) -> html.A:
    """Return a finding's title with a dot of its severity, which leads to it."""
    return html.A(
        [html.Span(className=f"severity-dot {finding.severity}", **ui.aria(hidden="true")), finding.title],
        href=place.to("finding", engine=finding.engine, id=finding.id),
        title=f"{finding.severity}: {finding.code}",
        **more,
    )


def _card(here: Here, finding: FindingReport) -> html.Article:
    link = html.A(finding.title, href=here.place.to("finding", engine=finding.engine, id=finding.id))
    return html.Article(
        [marks(here, finding), html.H2(link), *_body(here.place, finding)],
        className=f"finding {finding.severity}",
        key=finding.id,
    )


def _folded(here: Here, finding: FindingReport) -> html.Details:
    return html.Details(
        [
            html.Summary([html.H2(finding.title), marks(here, finding)]),
            *_body(here.place, finding),
        ],
        className=f"finding {finding.severity}",
        key=finding.id,
    )


def marks(here: Here, finding: FindingReport) -> html.Div:
    """How grave, which code, how sure, since when."""
    parts: list[Any] = [
        html.Span(finding.severity, className="severity"),
        html.Code(finding.code),
        html.Span(finding.verdict, className=f"verdict {finding.verdict}", title="how the verdict was reached"),
    ]
    if finding.since:
        parts.append(html.Span(_time(here, finding), className="since"))
    if not here.place.view:
        parts.append(html.A(finding.engine, href=here.place.to("engine", engine=finding.engine), className="on"))
    return html.Div(parts, className="marks")


def _time(here: Here, finding: FindingReport) -> str:
    """Return since when, and for how long until now, or until when; and when it was there before."""
    before = "".join(f", before {clock_text(one.since)} – {clock_text(one.resolved_at)}" for one in finding.earlier)
    if finding.resolved_at:
        return f"{clock_text(finding.since)} – {clock_text(finding.resolved_at)} UTC{before}"
    now = next((engine.at for engine in here.engines if engine.engine == finding.engine), None)
    return f"since {clock_text(finding.since)} UTC, {age(finding.since, now)}{before}"


def _body(place: PagePlace, finding: FindingReport) -> list[Any]:
    return [
        html.P(finding.explanation, className="explanation"),
        *culprits(place, finding),
        *advice(finding),
        html.Div(
            [
                html.Details([html.Summary("Evidence"), evidence(place, finding)], className="evidence"),
                html.A("All about it", href=place.to("finding", engine=finding.engine, id=finding.id)),
                html.A("Runbook", href=f"/{finding.runbook}"),
            ],
            className="more",
        ),
    ]


def advice(finding: FindingReport) -> list[Any]:
    """Return what would confirm it, if it is not confirmed, with the steps to take, the settings to change, and the
    fixes that will not help.
    """
    parts: list[Any] = []
    if finding.missing:
        parts.append(html.P([html.Strong("To be sure: "), finding.missing], className="missing"))
    columns = [
        html.Div([html.H3(title), html.Ul([html.Li(line) for line in lines])], className=name)
        for title, name, lines in (
            ("Do now", "do-now", finding.do_now),
            ("Change", "change", finding.change),
            ("Won’t help", "wont-help", finding.wont_help),
        )
        if lines
    ]
    return [*parts, html.Div(columns, className="advice")]


def culprits(place: PagePlace, finding: FindingReport, most: int = MAX_CARD_CULPRITS) -> list[Any]:
    """Return its requests and blocks, and its effects, with links to them as they are at `place`."""
    rows = []
    requests, blocks = finding.culprits.requests, finding.culprits.blocks
    if requests:
        names: list[Any] = [ui.request_link(place, finding.engine, name) for name in requests[:most]]
        rows += [html.Dt(counted(len(requests), "request")), html.Dd(names + ui.and_more(len(requests) - most))]
    if blocks:
        links = ui.block_links(place, finding.engine, blocks, most)
        rows += [html.Dt(counted(len(blocks), "block")), html.Dd(links)]
    for effect in finding.effects:
        named = [ui.request_link(place, finding.engine, name) for name in effect.requests[:MAX_CARD_CULPRITS]]
        rest = ui.and_more(len(effect.requests) - MAX_CARD_CULPRITS)
        rows += [html.Dt("effect"), html.Dd([html.Code(effect.code), " ", *named, *rest])]
    return [html.Dl(rows, className="culprits")] if rows else []


def alternatives(finding: FindingReport) -> html.Table:
    """Return the other explanations, each with what excludes it."""
    rows = [
        ui.tr(ui.row_head(one.name), ui.text_cell(one.excluded_by or "not excluded")) for one in finding.alternatives
    ]
    return ui.table(rows, "Alternative", "Excluded by")


def evidence(place: PagePlace, finding: FindingReport) -> html.Table:
    """Return the numbers that it rests on, each with where it was read. A position leads to the pool as it was then."""
    rows = [
        ui.tr(
            ui.row_head(one.name.removesuffix("_s").replace("_", " ")),
            ui.number_cell(one.value) if isinstance(one.value, int | float) else ui.text_cell(one.value),
            html.Td(one.unit),
            html.Td(one.source),
            html.Td(ui.event_link(place, finding.engine, one.position) if one.position else ""),
        )
        for one in finding.evidence
    ]
    return ui.table(rows, "Figure", "Value#", "Unit", "From", "Event")
