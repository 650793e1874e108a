"""Formats `monitor top` as text of 80 columns that is good in black and white."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from ..base.text import counted, cut, duration, escaped, percent
from ..detectors.findings import FindingReport, severity_at_least
from ..questions.schema import EngineView, RequestView
from .report_table import SIGNS, STYLES, first_sentence
from .terminal import WIDTH

TOP_BAR: Final = 60
TOP_HOLDERS: Final = (
    ("running", "█", "green"),
    ("waiting", "▒", "yellow"),
    ("finished", "▓", "magenta"),
    ("unaccounted", "!", "bold red"),
    ("cached_idle", "░", "cyan"),
    ("free", "·", "dim"),
)
"""Each with its sign, so that colours are not needed."""
IN_USE_SIGN: Final = "■"
"""Where it is not known who holds it."""
LEGEND: Final = "█ running  ▒ waiting  ▓ finished, held  ! UNACCOUNTED  ░ cached-idle  · free"
COLUMNS: Final = (
    ("request", 17),
    ("state, reason", 26),
    ("for", 8),
    ("blocks", 7),
    ("computed/prompt", 16),
    ("out", 5),
)
"""Columns of the requests: name and width."""


def engines(views: Sequence[EngineView], chosen: str) -> Text:
    """Two lines for each: what it does, and who holds its pool."""
    out = Text()
    for view in views:
        mark = "▸" if view.engine == chosen else " "
        out.append(f"{mark} {escaped(view.engine)}\n", "bold" if view.engine == chosen else "")
        out.append(f"  {_doing(view)}\n")
        out.append_text(_top_bar(view))
        out.append("\n")
    out.append(LEGEND, "dim")
    return out


def _doing(view: EngineView) -> str:
    running, waiting = (f"{count:,}" if count is not None else "?" for count in (view.running, view.waiting))
    found = ", ".join(
        f"{count} {severity}" for severity, count in view.findings.items() if severity_at_least(severity, "warning")
    )
    rate = f", {view.output_tokens_per_s:,.0f} tokens/s" if view.output_tokens_per_s is not None else ""
    return f"{view.status}, {running} running, {waiting} waiting{rate}; findings: {found or 'none'}"


def _top_bar(view: EngineView) -> Text:
    bar = Text("  ")
    balance = view.balance
    if view.usage is None:
        return bar.append("neither its usage nor who holds what is exposed")
    if balance is None:
        return bar.append(f"{IN_USE_SIGN * round(TOP_BAR * view.usage):{'·'}<{TOP_BAR}}  {percent(view.usage)} in use")
    for holder, sign, style in TOP_HOLDERS:
        count = getattr(balance, holder)
        if count:
            bar.append(sign * max(1, round(TOP_BAR * (balance.share(count) or 0))), style)
    bar.truncate(TOP_BAR + 2)
    return bar.append(f"  {percent(view.usage)} in use")


def row(view: RequestView) -> list[str]:
    """One request, a text for each of COLUMNS."""
    state = view.reason if view.ended or view.state.startswith("FINISHED") else f"{view.state} {view.reason}".strip()
    cells = (
        view.id,
        state or view.state,
        duration(view.for_s),
        f"{view.blocks:,}",
        f"{view.computed_tokens:,}/{view.prompt_tokens:,}",
        f"{view.output_tokens:,}",
    )
    return [cut(escaped(cell), width - 1) for cell, (_, width) in zip(cells, COLUMNS, strict=True)]


def findings(reports: Sequence[FindingReport], engine: str) -> Text:
    """Return those of one engine, each with its first sentence, and then how many there are elsewhere."""
    here = [report for report in reports if report.engine == engine]
    out = Text()
    for report in here:
        head = f"{SIGNS[report.severity]} {report.severity} {report.code} ({report.verdict})\n"
        out.append(head, STYLES[report.severity])
        sentence = escaped(first_sentence(report.explanation))
        out.append("\n".join(textwrap.wrap(sentence, WIDTH - 4, initial_indent="  ", subsequent_indent="  ")) + "\n")
    if not here:
        out.append("No problem found in this engine.\n")
    if len(reports) > len(here):
        out.append(f"{counted(len(reports) - len(here), 'finding')} of other engines: e shows them.\n")
    return out
