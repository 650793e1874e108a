"""The page's sections as they are now, made at most once a tick for all viewers.

A query may wait for the ledger, so it runs in a thread. What is costly to make is made less often: no view takes more
than a tenth of the time, however many blocks a pool has.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dash import html

from dashboards.web import blockmap, engines, findings, pool, requests, story
from dashboards.web.links import Place
from monitor.query import NotKnown, Query
from monitor.views import EngineView

TICK_S: Final = 1.0
REST: Final = 9
"""A view rests for this many times what it took to make."""
KEPT: Final = 64
PLACES: Final = ("engines", "health", "alarms", "summary", "findings", "legend", "requests", "story")
"""Where sections go."""

Sections = dict[str, Any]
"""Trees of HTML components by the id of the place on the page that they fill."""

Properties = dict[str, dict[str, Any]]
"""Properties of Dash components, by id and name."""


class Page(NamedTuple):
    """All that a viewer sees. `told` is the page's title, its engine, when it was made, and its sections."""

    told: dict[str, Any]
    properties: Properties


class Body(NamedTuple):
    """All that is shown of one engine, and the number of its blocks."""

    sections: Sections
    properties: Properties
    total_blocks: int


class Aside(NamedTuple):
    """A story, and the blocks that it is about (None: not to be marked on the map)."""

    children: list[Any]
    blocks: list[int] | None


class _Shared:
    """One view: whoever asks while it is made waits for it, whoever asks soon after gets the same."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.value: Any = None
        self.fresh_until = 0.0


class Views:
    """Renders what `query` says. For one event loop."""

    def __init__(self, query: Query) -> None:
        self._query = query
        self._shared: OrderedDict[object, _Shared] = OrderedDict()

    async def page(self, place: Place) -> Page:
        """The page at `place`."""
        known: list[EngineView] = await self._once("engines", self._query.engines)
        if not known:
            hidden = {"empty": {"hidden": False}, "engine": {"hidden": True}, "story": {"hidden": True}}
            return _page("waiting for an engine", "", dict.fromkeys(PLACES, ""), hidden)
        engine = next((view for view in known if view.engine == place.engine), known[0])
        name = engine.engine
        body: Body = await self._once(("body", name), lambda: _body(self._query, engine))
        sections = {**body.sections, "engines": engines.picker(known, name), "story": ""}
        properties = {
            **body.properties,
            "empty": {"hidden": True},
            "engine": {"hidden": False},
            "story": {"hidden": True},
            "spotlight": {"src": "", "hidden": True},
        }
        if place.engine not in ("", name):
            message = f"There is no engine {place.engine} here any more; this is {name}."
            sections["alarms"] = html.P(message, className="banner quiet")
        elif place.thing:
            aside: Aside = await self._once(place, lambda: _aside(self._query, place._replace(engine=name)))
            sections["story"] = aside.children
            properties["story"] = {"hidden": False}
            if aside.blocks is not None and body.total_blocks:
                marked = blockmap.spotlight(body.total_blocks, aside.blocks)
                properties["spotlight"] = {"src": marked, "hidden": False}
        return _page(_title(engine), name, sections, properties)

    async def pointed(self, engine: str, block: int) -> list[Any]:
        """The block that somebody points at."""
        children: list[Any] = await self._once(("pointed", engine, block), lambda: _pointed(self._query, engine, block))
        return children

    async def _once(self, key: object, make: Callable[[], Any]) -> Any:
        shared = self._shared.setdefault(key, _Shared())
        self._shared.move_to_end(key)
        while len(self._shared) > KEPT:
            self._shared.popitem(last=False)
        async with shared.lock:
            started = time.monotonic()
            if started >= shared.fresh_until:
                shared.value = await asyncio.to_thread(make)
                took = time.monotonic() - started
                shared.fresh_until = started + max(0.9 * TICK_S, REST * took)
        return shared.value


def _page(title: str, engine: str, sections: Sections, properties: Properties) -> Page:
    return Page({"title": title, "engine": engine, "at": time.time(), "sections": sections}, properties)


def _title(engine: EngineView) -> str:
    wrong = sum(count for severity, count in engine.findings.items() if severity != "info")
    return f"({wrong}) {engine.engine}" if wrong else engine.engine


def _body(query: Query, engine: EngineView) -> Body:
    name = engine.engine
    found = [finding for finding in query.find("firing") if finding.engine == name]
    culprits = {request for finding in found for request in finding.culprits.requests}
    points = query.points(name, pool.SECONDS, pool.MOMENTS)
    blocks = query.block_map(name)
    laid = blockmap.grid(blocks.total)
    sections = {
        "health": engines.stream_health(engine),
        "alarms": engines.alarms(engine),
        "summary": engines.summary(engine),
        "findings": findings.section(found, engine.at),
        "legend": pool.legend(engine),
        "requests": requests.section(name, query.requests(name), culprits),
    }
    layout = {"--columns": str(laid.columns), "--rows": str(laid.rows)}
    properties: Properties = {
        "history": {"figure": pool.bands(name, points)},
        "history-frame": {"aria-label": pool.in_words(engine, points)},
        "map": {"src": blockmap.picture(blocks)},
        "map-frame": {
            "style": {**layout, "maxWidth": f"{laid.columns * blockmap.CELL_PX}px"},
            "data-total": str(laid.total),
            "data-per-cell": str(laid.per_cell),
            "data-columns": str(laid.columns),
        },
    }
    return Body(sections, properties, blocks.total)


def _aside(query: Query, place: Place) -> Aside:
    try:
        if place.thing == "request":
            request = query.request(place.engine, place.id)
            return Aside(story.of_request(request), request.blocks)
        if not place.id.isdecimal():
            raise NotKnown(f"{place.id} is not the number of a block")
        return Aside(story.of_block(query.block(place.engine, int(place.id))), [int(place.id)])
    except NotKnown as error:
        return Aside(story.unknown(place.engine, str(error)), None)


def _pointed(query: Query, engine: str, block: int) -> list[Any]:
    try:
        return story.pointed(query.block(engine, block))
    except NotKnown as error:
        return [html.P(str(error), className="note")]
