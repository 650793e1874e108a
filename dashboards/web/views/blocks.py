"""The block map: every block of the pool, and why the one that is chosen is held."""

from __future__ import annotations

from typing import Any

from dash import html

from dashboards.web import blockmap, pool, story
from dashboards.web.links import Place
from dashboards.web.markup import aria, data
from dashboards.web.view import Here, View, engine_then
from monitor.query import NotKnown, Query


def view(query: Query, here: Here) -> View:
    """The map; beside it, at /block, the story of block `id`, or with ?id= at /blocks, those of a request marked."""
    engine = engine_then(query, here)
    blocks = query.block_map(here.name, here.moment)
    marked, aside = _chosen(query, here.place, here.moment)
    laid = blockmap.grid(blocks.total)
    layers: list[Any] = [html.Img(id="map", alt="", src=blockmap.picture(blocks), draggable="false")]
    if marked and blocks.total:
        layers.append(html.Img(id="spotlight", alt="", src=blockmap.spotlight(blocks.total, marked), draggable="false"))
    frame = html.Div(
        [*layers, html.Div(className="lines"), html.Div(className="cursor")],
        id="map-frame",
        tabIndex="0",
        role="application",
        style={
            "--columns": str(laid.columns),
            "--rows": str(laid.rows),
            "maxWidth": f"{laid.columns * blockmap.CELL_PX}px",
        },
        **data(total=laid.total, per_cell=laid.per_cell, columns=laid.columns),
        **aria(label="Block map: arrow keys go from block to block, Enter opens a block’s story"),
    )
    legend = html.Ul(pool.legend(engine), className="legend")
    return View(
        {
            "head": html.H1("Every block"),
            "map": html.Section([legend, frame], className="card"),
            "pointed": html.Section(html.Div(id="pointed-block", **aria(live="polite")), className="card"),
        },
        aside,
    )


def _chosen(query: Query, place: Place, moment: str) -> tuple[list[int], list[Any]]:
    """Blocks to be marked, and the story beside the map."""
    if not place.id:
        return [], []
    try:
        if place.view == "blocks":
            return query.request(place.engine, place.id, moment).blocks, []
        if not place.id.isdecimal():
            raise NotKnown(f"{place.id} is not the number of a block")
        return [int(place.id)], story.of_block(place, query.block(place.engine, int(place.id), moment))
    except NotKnown as error:
        return [], story.unknown(place, str(error))
