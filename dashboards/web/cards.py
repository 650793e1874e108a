"""Findings in full: each with its culprits, and what to do, what to change, what will not help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web.links import Place
from dashboards.web.markup import and_more, block_links, request_link
from dashboards.web.words import age, clock
from monitor.findings import FindingReport
from monitor.query import counted

MOST_CULPRITS = 12


def cards(place: Place, findings: Sequence[FindingReport], now: str | None) -> list[Any]:
    """Those that need somebody, in full; then those that only inform, folded."""
    grave = [finding for finding in findings if finding.severity != "info"]
    others = [finding for finding in findings if finding.severity == "info"]
    parts: list[Any] = [_card(place, finding, now) for finding in grave]
    if not grave:
        parts.append(html.P("Nothing is wrong that can be seen.", className="all-well"))
    parts += [_folded(place, finding, now) for finding in others]
    return parts


def _card(place: Place, finding: FindingReport, now: str | None) -> html.Article:
    return html.Article(
        [_marks(finding, now), html.H3(finding.title), *_body(place, finding)],
        className=f"finding {finding.severity}",
        key=finding.id,
    )


def _folded(place: Place, finding: FindingReport, now: str | None) -> html.Details:
    return html.Details(
        [html.Summary([html.Span(finding.title, className="title"), _marks(finding, now)]), *_body(place, finding)],
        className=f"finding {finding.severity}",
        key=finding.id,
    )


def _marks(finding: FindingReport, now: str | None) -> html.Div:
    since = ""
    if finding.since:
        since = f"since {clock(finding.since)} UTC, {age(finding.since, now)}"
    return html.Div(
        [
            html.Span(finding.severity, className="severity"),
            html.Code(finding.code),
            html.Span(finding.verdict, className=f"verdict {finding.verdict}", title="how the verdict was reached"),
            html.Span(since, className="since"),
        ],
        className="marks",
    )


def _body(place: Place, finding: FindingReport) -> list[Any]:
    parts: list[Any] = [html.P(finding.explanation, className="explanation"), *_culprits(place, finding)]
    if finding.missing:
        parts.append(html.P([html.Strong("To be sure: "), finding.missing], className="missing"))
    advice = [
        html.Div([html.H4(title), html.Ul([html.Li(line) for line in lines])], className=name)
        for title, name, lines in (
            ("Do now", "do-now", finding.do_now),
            ("Change", "change", finding.change),
            ("Won’t help", "wont-help", finding.wont_help),
        )
        if lines
    ]
    parts.append(html.Div(advice, className="advice"))
    parts.append(html.Div([_evidence(finding), html.A("Runbook", href=f"/{finding.runbook}")], className="more"))
    return parts


def _culprits(place: Place, finding: FindingReport) -> list[Any]:
    rows = []
    requests, blocks = finding.culprits.requests, finding.culprits.blocks
    if requests:
        names: list[Any] = [request_link(place, finding.engine, name) for name in requests[:MOST_CULPRITS]]
        rows += [html.Dt(counted(len(requests), "request")), html.Dd(names + and_more(len(requests) - MOST_CULPRITS))]
    if blocks:
        links = block_links(place, finding.engine, blocks, MOST_CULPRITS)
        rows += [html.Dt(counted(len(blocks), "block")), html.Dd(links)]
    for effect in finding.effects:
        named = [request_link(place, finding.engine, name) for name in effect.requests[:MOST_CULPRITS]]
        rest = and_more(len(effect.requests) - MOST_CULPRITS)
        rows += [html.Dt("effect"), html.Dd([html.Code(effect.code), " ", *named, *rest])]
    return [html.Dl(rows, className="culprits")] if rows else []


def _evidence(finding: FindingReport) -> html.Details:
    rows = [
        html.Tr(
            [
                html.Th(evidence.name.replace("_", " "), scope="row"),
                html.Td(f"{evidence.value:,}" if isinstance(evidence.value, int | float) else evidence.value),
                html.Td(evidence.unit),
                html.Td(" ".join(filter(None, (evidence.source, evidence.position)))),
            ]
        )
        for evidence in finding.evidence
    ]
    return html.Details([html.Summary("Evidence"), html.Table(html.Tbody(rows))], className="evidence")
