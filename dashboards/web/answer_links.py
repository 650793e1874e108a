"""Links from each view to the answers that it shows, as JSON and CSV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlencode

from dash import html

from kvscope.dashboards.web.markup import aria
from kvscope.dashboards.web.view import Here
from kvscope.monitor.query import QUESTIONS

MOMENT: Final = "moment"
WINDOW: Final = "window"
ENGINE: Final = "engine"
ANSWERS_OF: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "": (("engines", MOMENT), ("findings", WINDOW)),
    "fleet": (("fleet_overview", ""), ("findings", WINDOW)),
    "engine": (("points", WINDOW), ("explain", WINDOW)),
    "configuration": (("engines", MOMENT), ("history", ENGINE)),
    "blocks": (("block_map", MOMENT), ("events", WINDOW)),
    "block": (("block", MOMENT),),
    "held": (("retained_blocks", WINDOW),),
    "requests": (("requests", MOMENT),),
    "request": (("request", MOMENT),),
    "prefixes": (("prefix_cache", MOMENT),),
    "memory": (("memory", ENGINE),),
    "plan": (("plan", ENGINE),),
    "findings": (("findings", WINDOW),),
    "finding": (("finding", ""),),
    "compare": (("compare", WINDOW),),
    "alerts": (("alert_state", ""),),
    "search": (("find_request", ""),),
    "stream": (("engines", MOMENT),),
}
"""By view, the questions whose answers it shows, and what of the place each is asked for."""
OF_ALL_ENGINES: Final = ("engines", "fleet_overview", "alert_state", "finding", "find_request")
WITHOUT_TABLE: Final = ("block_map", "fleet_overview")
"""Which no table shows: JSON only."""


def answer_links(here: Here) -> html.P:
    """Return the links of the view. A position or time in the address, and its filters, go with them."""
    parts: list[Any] = ["This view as data:"]
    for name, scope in ANSWERS_OF[here.place.view]:
        if name == "find_request" and not here.place.get("q"):
            continue
        query = urlencode(dict(_asked_for(here, name, scope)))
        for form in ("JSON",) if name in WITHOUT_TABLE else ("JSON", "CSV"):
            asked = "&".join(filter(None, (query, "format=csv" if form == "CSV" else "")))
            link = html.A(f"{name} {form}", href=f"/api/{name}" + (f"?{asked}" if asked else ""))
            parts += [" ", link]
    if len(parts) == 1:
        return html.P()
    return html.P(parts, className="exports", **aria(label="Data"))


def _asked_for(here: Here, name: str, scope: str) -> Iterator[tuple[str, str]]:
    place = here.place
    if name not in OF_ALL_ENGINES and not (name == "findings" and (not place.view or place.get("of"))):
        yield "engine", here.name
    if scope == MOMENT and here.moment:
        yield "at", here.moment
    if scope == WINDOW:
        yield "since", here.window.since
        if not here.window.live:
            yield "until", here.window.until
    if place.id and place.view in ("block", "request", "finding"):
        yield "id", place.id
    if name == "find_request":
        yield "id", place.get("q")
        yield from [("engine", place.get("of"))] if place.get("of") else []
    if name == "plan":
        known = QUESTIONS[name].parameters.__struct_fields__
        yield from ((given, value) for given, value in place.more if given in known)
    if name == "compare":
        others = (("other", "with"), ("other_since", "with_from"), ("other_until", "with_to"))
        yield from ((asked, place.get(given)) for asked, given in others if place.get(given))
