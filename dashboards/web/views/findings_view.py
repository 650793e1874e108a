"""Findings: open and resolved ones, each with its duration over the window.

/findings?severity=SEVERITY&code=CODE&state=open&of=all

`of=all` is of every engine, not only of the chosen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, duration
from kvscope.monitor.detectors.findings import FindingReport, severity_at_least
from kvscope.monitor.questions.query import Query

from .. import ui
from ..display_text import clock_text
from ..finding_cards import cards, dotted_link
from ..links import PagePlace, PageWindow, wall_ns
from ..view import Here, PageView

SEVERITY_CHOICES: Final = ("critical", "error", "warning", "info")
FINDING_FILTERS: Final = ("severity", "code", "state", "of")
FULL_CARDS: Final = 6
"""How many are shown in full. The rest unfold."""
OPEN: Final = ("open", "open")
OVER: Final = ("over", "over")


def view(query: Query, here: Here) -> PageView:
    """Return the findings of the window, as bars over it, and those open at its end, in full."""
    place, window = here.place, here.window
    engine = "" if place.get("of") else here.name
    every = query.findings(None, engine, window.since, "" if window.live else window.until)
    if window.live and not here.engine.restarts:  # of an engine that is young, as much as there is
        window = window._replace(since_ns=max(window.since_ns, here.engine.epoch))
        here = here._replace(window=window)
    wanted = [finding for finding in every if _is_wanted(place, window, finding)]
    still = [finding for finding in wanted if _is_open(finding, window)]
    sections: dict[str, Any] = {"head": html.Header([html.H1(_headline(here, wanted)), _filter(place, every)])}
    if wanted:
        timeline = ui.card(_timeline(here, wanted), id="finding-timeline", label="Timeline of findings")
        sections["finding-timeline"] = timeline
    full: list[Any] = []
    if still or not any(place.get(name) for name in FINDING_FILTERS):
        full = [html.H2("Open", className="unseen"), *cards(here, still, FULL_CARDS)]
    return PageView(sections | {"findings": html.Section(full, id="findings")})


def _is_wanted(place: PagePlace, window: PageWindow, finding: FindingReport) -> bool:
    state = OPEN[0] if _is_open(finding, window) else OVER[0]
    asked = {name: place.get(name) for name in FINDING_FILTERS}
    have = {"severity": finding.severity, "code": finding.code, "state": state}
    return all(not asked[name] or asked[name] == value for name, value in have.items())


def _is_open(finding: FindingReport, window: PageWindow) -> bool:
    """At the end of the window."""
    return finding.resolved_at is None or wall_ns(finding.resolved_at, 0) > window.until_ns


def _headline(here: Here, wanted: Sequence[FindingReport]) -> str:
    if not wanted:
        return "No finding in this window" + (" matches" if any(map(here.place.get, FINDING_FILTERS)) else "")
    grave = [finding for finding in wanted if severity_at_least(finding.severity, "warning")]
    still = sum(_is_open(finding, here.window) for finding in grave)
    words = [f"{counted(still, 'finding')} open" if still else "No finding open"]
    if len(grave) > still:
        words.append(f"{len(grave) - still:,} over")
    if len(wanted) > len(grave):
        words.append(f"{len(wanted) - len(grave):,} for information")
    return ", ".join(words)


def _filter(place: PagePlace, every: Sequence[FindingReport]) -> html.Form:
    kept = (("engine", place.engine), ("from", place.since), ("to", place.until), ("at", place.at))
    fields: list[Any] = [*ui.hidden(kept)]
    fields += [
        ui.choice("severity", "Severity", ui.same(SEVERITY_CHOICES), place.get("severity")),
        ui.choice("code", "Code", ui.same(sorted({finding.code for finding in every})), place.get("code")),
        ui.choice("state", "State", [OPEN, OVER], place.get("state")),
        ui.choice("of", "Engine", [("all", "every engine")], place.get("of"), none="this one"),
        html.Button("Show", type="submit"),
    ]
    if any(map(place.get, FINDING_FILTERS)):
        fields.append(html.A("Show all", href=place.but(**dict.fromkeys(FINDING_FILTERS, "")), className="button"))
    key = " ".join(map(place.get, FINDING_FILTERS))
    return ui.filter_form(fields, "findings", key)


# -------------------------------------------------------------------- lives


def _timeline(here: Here, findings: Sequence[FindingReport]) -> list[Any]:
    several = len({finding.engine for finding in findings}) > 1 or here.place.get("of")
    columns = ["Finding", *(["Engine"] if several else []), "From", "For", ""]
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in columns[:-1]] + [html.Th(_axis(here.window))]))
    rows = []
    for alike in _rows_of(sorted(findings, key=lambda one: one.since or "", reverse=True)):
        finding = alike[0]
        cells: list[Any] = [ui.row_head(dotted_link(here.place, finding))]
        if several:
            cells.append(html.Td(html.A(finding.engine, href=here.place.to("engine", engine=finding.engine))))
        spans = [span for one in alike for span in _spans(one, here.window)]
        lasted = duration(sum(ended_ns - began_ns for began_ns, ended_ns in spans) / 1e9)
        lasted = lasted if all(one.since for one in alike) else "always"
        words = [lasted, *([counted(len(spans), "time")] if len(spans) > 1 else [])]
        began = alike[-1].earlier[0].since if alike[-1].earlier else alike[-1].since
        cells.append(html.Td(clock_text(began) if began else "the start"))
        cells.append(html.Td(", ".join(words if finding.resolved_at else [*words, "open"])))
        bars = [bar for one in alike for bar in _bars(one, here.window)]
        cells.append(html.Td(html.Span(bars, className="bars"), className="track"))
        rows.append(html.Tr(cells, key=finding.id))
    return [html.Div(html.Table([head, html.Tbody(rows)], className="finding-timeline"), className="wide")]


def _rows_of(findings: Sequence[FindingReport]) -> list[list[FindingReport]]:
    """Return the findings of each row: one, or of those for information all of a code in an engine."""
    rows: dict[tuple[str, ...], list[FindingReport]] = {}
    for finding in findings:
        is_info = not severity_at_least(finding.severity, "warning")
        rows.setdefault((finding.engine, finding.code, "" if is_info else finding.id), []).append(finding)
    return list(rows.values())


def _axis(window: PageWindow) -> html.Span:
    """Return the window's ends, over the bars."""
    return html.Span([html.Span(clock_text(window.since)), html.Span(clock_text(window.until))], className="axis")


def _spans(finding: FindingReport, window: PageWindow) -> list[tuple[int, int]]:
    """Return from when until when it was there, each time (wall ns), as far as the window goes where that is not known,
    or not over.
    """
    spans = []
    for since, resolved_at in (
        *((one.since, one.resolved_at) for one in finding.earlier),
        (finding.since, finding.resolved_at),
    ):
        began_ns = wall_ns(since, 0) if since else window.since_ns
        spans.append((began_ns, max(began_ns, wall_ns(resolved_at, 0) if resolved_at else window.until_ns)))
    return spans


def _bars(finding: FindingReport, window: PageWindow) -> list[html.Span]:
    whole = window.until_ns - window.since_ns
    spans = _spans(finding, window)
    bars = []
    for number, span in enumerate(spans, 1):
        first, last = (min(max((ns - window.since_ns) / whole, 0), 1) for ns in span)
        place = {"left": f"{100 * first:.2f}%", "width": f"{100 * (last - first):.2f}%"}
        state = "open" if number == len(spans) and _is_open(finding, window) else "over"
        bars.append(html.Span(className=f"life {finding.severity} {state}", style=place))
    return bars
