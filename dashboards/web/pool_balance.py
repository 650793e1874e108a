"""The pool's balance now, in words and numbers, and as one bar."""

from __future__ import annotations

from typing import Any, Final

from dash import html

from kvscope.dashboards.web.markup import aria
from kvscope.dashboards.web.palette import PALETTE_SHADES, css
from kvscope.dashboards.web.pool_traces import IN_USE
from kvscope.monitor.schema import EngineView
from kvscope.monitor.text import counted, percent

NOT_IN_USE: Final = ((128, 140, 160), 0.22)


def legend(engine: EngineView) -> list[Any]:
    """Every state that a block can be in, with its count: together the whole pool."""
    balance = engine.balance
    if balance is None:
        return _usage_legend(engine)
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
        text = f"{counted(balance.unexplained_references, 'reference')} without a known owner"
        items.append(html.Li(text, className="bad wide"))
    return items


def balance_bar(engine: EngineView) -> html.Div | str:
    """Return the pool as one bar, as wide as its share for each state."""
    balance = engine.balance
    if balance is None:
        return _usage_bar(engine)
    if not balance.total:
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


def _usage_bar(engine: EngineView) -> html.Div | str:
    """Return the pool of an engine whose holders are not known: in use, and the rest."""
    if engine.usage is None:
        return ""
    used = round(1000 * engine.usage)
    return html.Div(
        [
            html.Span(style={"backgroundColor": colour, "flexGrow": str(part)}, title=words)
            for part, colour, words in (
                (used, css(IN_USE), f"{percent(engine.usage)} in use"),
                (1000 - used, css(*NOT_IN_USE), f"{percent(1 - engine.usage)} free, or cached and idle"),
            )
            if part > 0
        ],
        className="pool-bar",
        role="img",
        **aria(label=f"{percent(engine.usage)} of the pool in use"),
    )


def _usage_legend(engine: EngineView) -> list[Any]:
    """In use and not, by the engine's page."""
    if engine.usage is None:
        return [html.Li("Usage of the pool is not exposed.")]
    rows = (
        ("in use", css(IN_USE), engine.usage, "of requests: the event stream shows the owners"),
        ("free, or cached and idle", css(*NOT_IN_USE), 1 - engine.usage, "ready to be allocated"),
    )
    return [
        html.Li(
            [
                html.Span(className="swatch", style={"backgroundColor": colour}),
                html.Span(label, className="what"),
                html.Span(percent(share), className="share"),
            ],
            title=meaning,
        )
        for label, colour, share, meaning in rows
    ]
