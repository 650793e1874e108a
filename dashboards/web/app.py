"""Puts the page on the service's app.

One callback a viewer runs for as long as the page is open and pushes, each tick, the sections that have changed, over
the page's WebSocket. Callbacks are coroutines: a slow query holds up nobody's scrape.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, ctx
from fastapi import FastAPI

from dashboards.web.links import place_of
from dashboards.web.page import INDEX, layout
from dashboards.web.views import TICK_S, Page, Views
from monitor.query import Query


def mount(app: FastAPI, query: Query) -> None:
    """Serve the page from `app` at every path that is not taken, showing what `query` says."""
    views = Views(query)
    dash = Dash(
        "kvscope",
        server=app,  # type: ignore[arg-type]  # annotated for Flask alone
        backend="fastapi",
        assets_folder=str(Path(__file__).parent / "assets"),
        title="kvscope",
        update_title="",
        index_string=INDEX,
        serve_locally=True,
        websocket_callbacks=True,
        websocket_inactivity_timeout=0,  # a page on a wall is looked at, not clicked
    )
    dash.layout = layout()

    @dash.callback(persistent=True)
    async def push() -> None:
        """Until the page is closed."""
        viewer = ctx.websocket
        sent: dict[str, Any] = {}
        while not viewer.is_shutdown:
            try:
                address = await viewer.get_prop("url", "href")
            except TimeoutError:
                return  # closed, while another page of the browser keeps the connection; or asleep, then it reloads
            _send(viewer, await views.page(place_of(address)), sent)
            await asyncio.sleep(TICK_S)

    @dash.callback(Input("url", "href"), prevent_initial_call=True)
    async def go(address: str) -> None:
        """A link was followed: show it now, not at the next tick."""
        _send(ctx.websocket, await views.page(place_of(address)), {})

    @dash.callback(
        Output("pointed-block", "children"), Input("pointed", "data"), State("beat", "data"), prevent_initial_call=True
    )
    async def point(block: int | None, beat: dict[str, str]) -> list[Any]:
        """Somebody points at a block of the map, or no longer does."""
        return [] if block is None else await views.pointed(beat["engine"], block)

    dash.clientside_callback(ClientsideFunction("kvscope", "beat"), Input("beat", "data"))  # type: ignore[no-untyped-call]


def _send(viewer: Any, page: Page, sent: dict[str, Any]) -> None:
    """What is not as it was sent before. A view that was not made anew is the same object."""
    for component, section in page.items():
        if sent.get(component) is not section:
            sent[component] = section
            for name, value in section.items():
                viewer.set_prop_sync(component, name, value)
