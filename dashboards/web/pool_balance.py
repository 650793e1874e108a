"""The pool's balance now, in words and numbers, and as one bar."""

from __future__ import annotations

from typing import Any

from dash import html

from kvscope.dashboards.web.markup import aria
from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.monitor.schema import EngineView
from kvscope.monitor.text import counted, percent


def legend(engine: EngineView) -> list[Any]:
    """Every state that a block can be in, with its count: together the whole pool."""
    balance = engine.balance
    if balance is None:
        return [html.Li("The balance needs the event stream: this engine is known by its figures alone.")]
    items = []
    for shade in PALETTE_SHADES:
        blocks = getattr(balance, shade.field)
        items.append(
            html.Li(
                [
                    html.Span(className="swatch", style={"backgroundColor": shade.css}),
                    html.Span(shade.label, className="what"),
                    html.Span(f"{blocks:,}", className="count"),
                    html.Span(percent(blocks / balance.total if balance.total else 0.0), className="share"),
                ],
                title=shade.meaning,
                className="bad" if shade.field == "unaccounted" and blocks else "none" if not blocks else "",
            )
        )
    items.append(
        html.Li(
            [
                html.Span(className="swatch"),
                html.Span("total", className="what"),
                html.Span(f"{balance.total:,}", className="count"),
                html.Span("adds up" if balance.holds else "DOES NOT ADD UP", className="share"),
            ],
            className="total" if balance.holds else "total bad",
        )
    )
    if balance.unexplained_references:
        text = f"{counted(balance.unexplained_references, 'reference')} that nobody can explain"
        items.append(html.Li(text, className="bad wide"))
    return items


def balance_bar(engine: EngineView) -> html.Div | str:
    """The pool as one bar, as wide as its share for each state."""
    balance = engine.balance
    if balance is None or not balance.total:
        return ""
    there = [(shade, blocks) for shade in PALETTE_SHADES if (blocks := getattr(balance, shade.field))]
    return html.Div(
        [
            html.Span(
                style={"backgroundColor": shade.css, "flexGrow": str(blocks)},
                title=f"{blocks:,} {shade.label}: {shade.meaning}",
            )
            for shade, blocks in there
        ],
        className="pool-bar",
        role="img",
        **aria(label=", ".join(f"{blocks:,} {shade.label}" for shade, blocks in there)),
    )
