"""The additions of the event stream for an engine with metrics only, and how to attach it."""

from __future__ import annotations

from typing import Any, Final

from dash import html

from kvscope.monitor.questions.query import Query

from .. import ui
from ..view import Here, PageView

ADDED_BY_STREAM: Final = (
    ("Blocks", "the state and the owner of every block, at any moment, and why it is not free"),
    ("Retained blocks", "blocks that were allocated in a window and not freed by its end, by owner"),
    ("Requests", "each request: what it waits for and who holds that, its blocks, its times"),
    ("Prefix cache", "which prefixes the pool keeps, who uses them, and who evicted what is needed again"),
    ("Timeline", "the pool by holder, waiting requests by cause, and what limits the steps"),
    ("Findings", "confirmed verdicts: a metrics page shows how much is in use, but not the owners"),
)


def view(_query: Query, here: Here) -> PageView:
    """Return the table of additions, and the two lines that attach it."""
    rows = [ui.tr(ui.row_head(name), html.Td(text)) for name, text in ADDED_BY_STREAM]
    attached = here.engine.signal == "stream"
    known = (
        "attached by its event stream, which adds:" if attached else "seen through its metrics. Its event stream adds:"
    )
    table = html.Table(html.Tbody(rows), className="facts-table")
    return PageView(
        {
            "head": html.H1("What the event stream adds"),
            "added": ui.card([html.P(f"{here.name} is {known}"), table]),
            "attach": "" if attached else ui.card(_how_to_attach()),
        }
    )


def _how_to_attach() -> list[Any]:
    return [
        html.H2("Attach it to a vLLM"),
        html.P("Install kvscope beside vLLM, start vLLM with the probe, and read its stream:"),
        ui.command("KVSCOPE_EVENTS=tcp://0.0.0.0:5757 vllm serve MODEL"),
        ui.command("monitor serve --events tcp://HOST:5757"),
        ui.note("The probe changes nothing that vLLM computes. docs/probe.md has its cost."),
    ]
