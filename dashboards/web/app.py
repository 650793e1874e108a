"""Puts the page on the service's app.

One callback a viewer runs for as long as the page is open and pushes what there is to see, each tick, over the page's
WebSocket. Callbacks are coroutines: a slow query delays no scrape.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from dash import Dash, Input, Output, ctx
from dash.exceptions import DependencyException
from fastapi import FastAPI, Request, Response
from starlette.responses import PlainTextResponse

from kvscope.monitor.questions.query import Query

from .history_panel import point_here
from .links import place_of
from .page_frame import INDEX, layout
from .rendering import TICK_S, Page, Pages
from .static_assets import ASSETS_FOLDER, ASSETS_PATH, CHART_LIBRARY, StaticAssets


def mount(app: FastAPI, query: Query) -> None:
    """Serve the page from `app` at every path that is not taken, with the answers of `query`."""
    pages = Pages(query)
    dash = Dash(
        "kvscope",
        server=app,  # type: ignore[arg-type]  # annotated for Flask alone
        backend="fastapi",
        assets_folder=str(ASSETS_FOLDER),
        assets_url_path=ASSETS_PATH,
        assets_ignore=re.escape(CHART_LIBRARY),
        title="kvscope",
        update_title="",
        index_string=INDEX,
        serve_locally=True,
        websocket_callbacks=True,
        websocket_inactivity_timeout=0,  # a page on a wall display is read, not clicked
    )
    dash.layout = layout()

    @app.exception_handler(DependencyException)
    async def no_such_file(_request: Request, _error: Exception) -> Response:
        return PlainTextResponse("There is no such file.", 404)

    @dash.callback(persistent=True)
    async def push() -> None:
        """Until the page is closed."""
        viewer = ctx.websocket
        shown = ""
        sent: dict[str, str] = {}
        while not viewer.is_shutdown:
            try:
                address = await viewer.get_prop("url", "href")
            except TimeoutError:
                return  # closed, while another page of the browser keeps the connection; or asleep, then it reloads
            page = await pages.page(place_of(address))
            _send(viewer, address, page, sent if address == shown else {})
            shown, sent = address, page.sections
            await asyncio.sleep(TICK_S)

    @dash.callback(Input("url", "href"), prevent_initial_call=True)
    async def go(address: str) -> None:
        """Follow a link: show it now, not at the next tick."""
        _send(ctx.websocket, address, await pages.page(place_of(address)), {})

    @dash.callback(Output("pointed-block-data", "data"), Input("pointed", "data"), prevent_initial_call=True)
    async def point(pointed: dict[str, Any]) -> list[Any]:
        """Return the block under the pointer, as it is then."""
        if pointed["block"] is None:
            return point_here()
        return await pages.pointed(place_of(pointed["pointing"]), pointed["block"])

    # Dash looks for its assets when its start page is asked for first, and a link may lead elsewhere.
    dash._setup_server()  # type: ignore[no-untyped-call]
    app.state.inline_scripts = tuple(dash.csp_hashes())
    app.add_middleware(StaticAssets)


def _send(viewer: Any, address: str, page: Page, sent: dict[str, str]) -> None:
    """Push the content of an address, with the sections that differ from those sent before."""
    changed = {name: section for name, section in page.sections.items() if sent.get(name) != section}
    viewer.set_prop_sync("received", "data", page.notices | {"address": address, "sections": changed})
