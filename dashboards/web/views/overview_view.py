"""Every engine at a glance, the worst off first, and what is wrong with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dash import html

from kvscope.dashboards.web.display_text import clock_text, pool_full_in, slow_text
from kvscope.dashboards.web.engine_table import engine_table, p95_s
from kvscope.dashboards.web.finding_cards import cards
from kvscope.dashboards.web.markup import aria
from kvscope.dashboards.web.view import UNSERVED, Here, PageView, worst_first
from kvscope.dashboards.web.views import fleet_view
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.query import Query
from kvscope.monitor.schema import EngineView
from kvscope.monitor.text import counted, duration

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
    found = [finding for finding in found if finding.severity != "info"]
    unserved = any(engine.status in UNSERVED for engine in engines)
    slow = any(engine.slow is not None or _queue_p95_s(engine) >= SLOW_QUEUE_S for engine in engines)
    how = "bad" if found or unserved else "well" if _received_engines(engines) and not slow else ""
    return PageView(
        {
            "head": html.H1(_overview_headline(engines, found), className=how),
            "engines": html.Section(engine_table(query, here, engines, found), id="engines", className="card"),
            "findings": html.Section(
                cards(here, found, FULL_FINDINGS) if found or _received_engines(engines) else [],
                id="findings",
                **aria(label="Findings"),
            ),
        }
    )


def _overview_headline(engines: Sequence[EngineView], found: Sequence[FindingReport]) -> str:
    """Return the worst engine in terms of its clients, and how many others have open findings."""
    there = _received_engines(engines)
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
        return f"{worst.engine} is slow since {clock_text(worst.slow.since)} UTC: {slow_text(worst.slow)}. {known}"
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


def _received_engines(engines: Sequence[EngineView]) -> int:
    """Return how many of them the service has received itself."""
    return sum(engine.status != "gone" for engine in engines)


def _queue_p95_s(engine: EngineView) -> float:
    return p95_s(engine.queue_time) or 0.0
