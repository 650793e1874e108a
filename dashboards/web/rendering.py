"""Current pages, each rendered at most once a tick for all viewers, and only while it is open.

A query may wait for the ledger, so it runs in a thread. Costly views are rendered less often: all views together take
no more than a tenth of the time, however many blocks a pool has and however many viewers are connected, since the
reader of the stream has the same processor. Open views are rendered again one after another, and show how often that
is. The past does not change, and is rendered again only for later findings about it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from dash import html
from dash.development.base_component import Component

from kvscope.monitor.base.errors import BadQuestion, BadTime, NotKnown, Unreachable
from kvscope.monitor.base.latest_entries import LatestEntries
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EngineView

from . import header, history_panel, ui
from .display_text import sentence
from .links import PagePlace, is_of_many, wall_ns
from .view import Here, PageView, Tree, engine_now_ns, worst_first
from .view_registry import PATHS, answer_links, tab_of

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
REST: Final = 9
"""A view rests for this many times what it took to make, and those that are to be made again rest with it."""
LOOKED_AT_S: Final = 3 * TICK_S
"""A viewer of a view asks for it every tick. After this long without a request, the old content of a view is never
shown.
"""
SLOW_S: Final = 2.5
"""A view with a longer interval shows it."""
PAST_RESTS_S: Final = 30.0
KEPT_VIEWS: Final = 64


class Page(NamedTuple):
    """All that a viewer sees. `notices`: the window's title, the engine, the time, and the places of `sections`."""

    notices: dict[str, Any]
    sections: dict[str, str]
    """By name, each as the JSON of a tree."""


class ShownView(NamedTuple):
    """A view as sent, and the position in the engine's stream that all of it belongs to (empty: of the past)."""

    sections: dict[str, str]
    position: str


class _Shared:
    """One shared rendering: viewers that ask meanwhile wait for it, and those soon after get the same."""

    def __init__(self) -> None:
        self.making: asyncio.Task[None] | None = None
        self.value: Any = None
        self.is_made = False
        self.fresh_until = 0.0
        self.asked_at = 0.0
        self.made_at = 0.0
        self.every_s = 0.0
        """The time between the last two renderings, if it was open."""
        self.in_turn = False

    def is_due(self, now: float) -> bool:
        """Whether it may be made, or made again."""
        return self.making is None or (self.making.done() and now >= self.fresh_until)

    def is_looked_at(self, now: float) -> bool:
        """Whether a viewer asked for it recently."""
        return now < self.asked_at + LOOKED_AT_S


class Pages:
    """Renders the answers of `query`. For one event loop."""

    def __init__(self, query: Query, clock: Callable[[], float] = time.monotonic) -> None:
        self._query = query
        self._clock = clock
        self._shared: LatestEntries[object, _Shared] = LatestEntries(KEPT_VIEWS)
        self._rests_until = 0.0

    async def page(self, place: PagePlace) -> Page:
        """Return the page at `place`."""
        live: list[EngineView] = await self._once("engines", self._query.engines)
        gone: list[EngineView] = await self._once("gone", self._query.past_engines, PAST_RESTS_S)
        known = worst_first([*live, *gone])
        if not known:
            return Page(_notices("waiting for an engine", place, [], empty=True), {})
        opened: dict[str, int] = await self._once("opened", lambda: _opened(self._query))
        here, complaint = _here(place, known, opened)
        goes_on = here.window.live or here.window.until_ns > engine_now_ns(here.engine)
        rests_s = 0 if goes_on else PAST_RESTS_S
        view: ShownView = await self._once(here.place, lambda: _shown(self._query, here), rests_s, in_turn=True)
        every_s = self._every_s(here.place) if goes_on else 0
        known_s: float = await self._once(("known", here.name), lambda: _known_s(self._query, here), PAST_RESTS_S)
        around: dict[str, str] = await self._once(
            ("around", place, every_s), lambda: _around(here, complaint, known_s, every_s)
        )
        main = [name for name in view.sections if name.startswith("main ")]
        notices = _notices(
            header.title(here), place, main, engine=here.name, moment=here.moment, position=view.position
        )
        return Page(notices, around | view.sections)

    async def pointed(self, place: PagePlace, block: int) -> list[Any]:
        """Return the block under the pointer, in a few lines."""
        children: list[Any] = await self._once(("pointed", place, block), lambda: _pointed(self._query, place, block))
        return children

    def _every_s(self, key: object) -> int:
        """How often what is shown is made again, where that is not about as often as one looks."""
        shared = self._shared.get(key)
        return round(shared.every_s) if shared is not None and shared.every_s > SLOW_S else 0

    async def _once(self, key: object, make: Callable[[], Any], rest_s: float = 0.0, *, in_turn: bool = False) -> Any:
        """Return the result of `make`, or a recent one. While it takes longer than a tick, its viewers keep the last
        result. `in_turn`: it is made again when it is its turn among all that are.
        """
        shared = self._shared[key] = self._shared.get(key) or _Shared()
        is_looked_at = shared.is_made and shared.is_looked_at(self._clock())
        shared.asked_at, shared.in_turn = self._clock(), in_turn
        if shared.is_due(self._clock()) and (not (in_turn and is_looked_at) or self._is_its_turn(shared)):
            shared.making = asyncio.create_task(self._make(shared, make, rest_s, again=is_looked_at))
        making = shared.making
        assert making is not None, "what was never made is due"
        if not making.done():
            await asyncio.wait({making}, timeout=TICK_S if is_looked_at else None)
        if making.done():
            making.result()  # raises what making it raised
        return shared.value

    def _is_its_turn(self, shared: _Shared) -> bool:
        """Whether none is being made again, nor made just now, and this is the oldest of those that are due."""
        now = self._clock()
        due = [one for one in self._shared.values() if one.in_turn and one.is_due(now) and one.is_looked_at(now)]
        return now >= self._rests_until and all(shared.made_at <= one.made_at for one in due)

    async def _make(self, shared: _Shared, make: Callable[[], Any], rest_s: float, *, again: bool) -> None:
        started = self._clock()
        is_turn = again and shared.in_turn
        if is_turn:
            self._rests_until = math.inf
        try:
            shared.value = await asyncio.to_thread(make)
        finally:
            took_s = self._clock() - started
            if is_turn:
                self._rests_until = started + (1 + REST) * took_s
        shared.every_s = started - shared.made_at if again else 0.0
        shared.made_at, shared.is_made = started, True
        shared.fresh_until = started + max(0.9 * TICK_S, REST * took_s, rest_s)


def _notices(
    title: str,
    place: PagePlace,
    main: list[str],
    *,
    engine: str = "",
    moment: str = "",
    position: str = "",
    empty: bool = False,
) -> dict[str, Any]:
    return {
        "title": title,
        "pointing": place._replace(engine=engine, at=moment).to("blocks"),
        "main": main,
        "engine": engine,
        "position": position,
        "empty": empty,
        "at": time.time(),
    }


def _opened(query: Query) -> dict[str, int]:
    """Return when the first open finding of each engine began that needs action (wall ns)."""
    opened: dict[str, int] = {}
    for finding in query.findings("firing"):
        if finding.since and severity_at_least(finding.severity, "warning"):
            since_ns = wall_ns(finding.since, 0)
            opened[finding.engine] = min(since_ns, opened.get(finding.engine, since_ns))
    return opened


def _here(place: PagePlace, known: list[EngineView], opened: Mapping[str, int]) -> tuple[Here, str]:
    """Return the current place, and the error in the address, if any. `opened`: when the findings of engines began."""
    complaints = []
    if is_of_many(place.engine) and place.engine not in (view.engine for view in known):
        place = place._replace(view=place.view if len(known) == 1 else "", engine="", id="")
    engine = next((view for view in known if view.engine == place.engine), known[0])
    if place.engine not in ("", engine.engine):
        complaints.append(f"No engine '{place.engine[:80]}' is known here. This is {engine.engine}.")
    now_ns, open_since_ns = engine_now_ns(engine), opened.get(engine.engine, 0)
    try:
        window = place.window(now_ns, open_since_ns)
    except BadTime as error:
        complaints.append(f"{error}. The time until now is shown.")
        place = place._replace(since="", until="", at="")
        window = place.window(now_ns, open_since_ns)
    place = place._replace(engine=engine.engine)
    return Here(place, window, engine, known, open_since_ns), " ".join(complaints)


def _known_s(query: Query, here: Here) -> float:
    """Return for how long before now the engine is known, or 0 on a page of many engines, which asks none of them."""
    if here.is_fleet:
        return 0.0
    try:
        first = query.history(here.name).first
    except (NotKnown, Unreachable):
        return 0.0
    return (engine_now_ns(here.engine) - wall_ns(first, 0)) / 1e9 if first else 0.0


def _around(here: Here, complaint: str, known_s: float, every_s: float) -> dict[str, str]:
    bar = header.header_bar(here, known_s, every_s)
    return {"bar": _encoded(bar), "alarms": _encoded(header.alarms(here, complaint))}


def _at_one_position(query: Query, here: Here) -> tuple[Query, Here]:
    """Return the query and the place, so that all live data on a page belongs to one position of the stream.

    A window of the past does not change meanwhile, and needs no copy of the ledger.
    """
    if here.engine.status == "gone" or not here.window.live or here.is_fleet:
        return query, here
    still = query.snapshot(here.name)
    live = still.engines()
    engine = next((view for view in live if view.engine == here.name), here.engine)
    gone = [view for view in here.engines if view.status == "gone"]
    window = here.place.window(engine_now_ns(engine), here.open_since_ns)
    return still, here._replace(window=window, engine=engine, engines=worst_first([*live, *gone]))


def _shown(query: Query, here: Here) -> ShownView:
    query, here = _at_one_position(query, here)
    entry = PATHS.get(here.place.view)
    try:
        if entry is None:
            raise NotKnown(f"There is no page /{here.place.view} here.")
        made = entry.make(query, here)
        view = made._replace(sections={**made.sections, "data": answer_links(here)})
    except (NotKnown, BadQuestion) as error:
        view = _sentence(here, str(error), _known(query, here))
    except Unreachable as error:
        view = _sentence(here, str(error))
    except Exception:  # a fault of ours in one view, which is no reason to show nothing at all
        logger.exception("the view /%s could not be rendered", here.place.view)
        view = _sentence(here, "This view could not be rendered because of an error in kvscope. See its log.")
    sections = {f"main {name}": _encoded(tree) for name, tree in view.sections.items()}
    return ShownView(sections | {"aside": _encoded(view.aside)}, "" if here.moment else here.engine.position or "")


def _known(query: Query, here: Here) -> list[Any]:
    """Return the time range with data, where the page shows a time outside it."""
    if here.window.live:
        return []
    try:
        span = query.history(here.name)
    except (NotKnown, Unreachable):
        return []
    if not span.first or not span.last:
        return []
    first, last = (at[:19].replace("T", " ") for at in (span.first, span.last))
    there = here.place.but(since=span.first, until=span.last, at="")
    return [html.P([f"The history of {here.name} runs ", html.A(f"from {first} to {last} UTC", href=there), "."])]


def _sentence(here: Here, text: str, more: Sequence[Any] = ()) -> PageView:
    """Instead of a view: its name, why it is not there, and `more`."""
    tab = tab_of(here.place.view)
    parts = [html.H1(tab.label if tab else "No such page"), ui.note(sentence(text))]
    if here.engine.signal == "metrics" and tab and not here.place.id:
        parts.append(
            ui.note(
                ["With its event stream, all of it is shown here: ", html.Code("monitor serve --events ENDPOINT"), "."]
            )
        )
    return PageView({"sentence": ui.card([*parts, *more])})


def _encoded(tree: Tree) -> str:
    return json.dumps(tree, default=Component.to_plotly_json, separators=(",", ":"))


def _pointed(query: Query, place: PagePlace, block: int) -> list[Any]:
    try:
        return history_panel.pointed(place, query.block(place.engine, block, place.at))
    except (NotKnown, Unreachable) as error:
        return [ui.note(sentence(str(error)))]
