"""The page's frame: its initial content, the places that sections go to, and the component that data arrives in."""

from __future__ import annotations

from typing import ClassVar

from dash import dcc, html
from dash.development.base_component import Component

from . import ui
from .palette import PALETTE_SHADES
from .static_assets import ASSETS_PATH, CHART_LIBRARY_ADDRESS
from .view_registry import PATHS


class PushedData(Component):
    """Passes each new `data` to a function of the page, `shows`, in assets/kvscope.js.

    It is no Input of a callback. Dash keeps every value that an Input ever had, to undo it: each second's page, for as
    long as the page is open.
    """

    _namespace = "kvscopePage"
    _type = "PushedData"
    _children_props: ClassVar[list[str]] = []  # type: ignore[misc]
    _base_nodes: ClassVar[list[str]] = ["children"]  # type: ignore[misc]

    def __init__(self, id: str, shows: str) -> None:
        self._prop_names = ["id", "shows", "data"]
        self._valid_wildcard_attributes: list[str] = []
        self.available_properties = self._prop_names
        self.available_wildcard_properties: list[str] = []
        super().__init__(id=id, shows=shows)  # type: ignore[no-untyped-call]


_SHADES = "".join(f"--{shade.field.replace('_', '-')}: {shade.css};" for shade in PALETTE_SHADES)

INDEX = (
    """<!DOCTYPE html>
<html lang="en">
<head>
  {%metas%}
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{%title%}</title>
  <link rel="icon" type="image/svg+xml" href="/"""
    + ASSETS_PATH
    + """/kvscope.svg">
  <style>:root {"""
    + _SHADES
    + """}</style>
  {%css%}
</head>
<body>
  {%app_entry%}
  <noscript>This page is live and needs JavaScript. <code>monitor doctor</code> reports the same findings.</noscript>
  <div hidden>{%config%}{%scripts%}{%renderer%}</div>
</body>
</html>
"""
)


def layout() -> html.Div:
    """Every place that a section goes to, empty."""
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            PushedData("received", shows="received"),
            dcc.Store(id="pointed"),
            PushedData("pointed-block-data", shows="pointed"),
            html.A("Skip to the view", href="#main", className="skip"),
            html.Header(id="bar"),
            html.Div(id="stale", role="alert", hidden=True, className="banner quiet"),
            html.Div(id="unreadable", role="alert", hidden=True, className="banner quiet"),
            html.Div(id="alarms", role="alert"),
            html.Div(id="arrived", role="status", className="unseen"),
            html.Div(
                [
                    html.Main([_empty(), html.Div(id="view")], id="main", tabIndex="-1"),
                    html.Aside(id="aside", hidden=True, **ui.aria(label="Event history")),
                ],
                className="columns",
            ),
            html.Dialog(id="keys", **ui.aria(label="Keys")),
            html.Footer(
                [
                    html.A("alerts", href="/alerts"),
                    html.A("metrics", href="/metrics"),
                    html.A("API", href="/api/openapi.json"),
                    html.Span(
                        "Times are UTC unless you choose your browser's zone."
                        " No prompt and no token leaves the engine: lengths and counts only."
                    ),
                ]
            ),
        ],
        id="page",
        **ui.data(paths=" ".join(f"/{path}" for path in PATHS), plotly=CHART_LIBRARY_ADDRESS),
    )


def _empty() -> html.Section:
    return html.Section(
        [
            html.H1("Waiting for an engine"),
            html.P("No engine is known yet. This service reads:"),
            html.Ul(id="sources"),
            html.H2("Add a vLLM"),
            html.P("Start kvscope on the metrics of a running vLLM, which you need not change:"),
            ui.command("monitor serve --metrics http://127.0.0.1:8000/metrics"),
            html.P("Or start vLLM with the event stream, which also shows its blocks and requests:"),
            ui.command("KVSCOPE_EVENTS=tcp://127.0.0.1:5757 vllm serve MODEL", id="probe-command"),
            ui.note("The engine appears here by itself."),
        ],
        id="empty",
        hidden=True,
    )
