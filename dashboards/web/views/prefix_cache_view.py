"""The prefix cache: the tree of shared prefixes, who has them, and what was evicted for which request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, duration, percent
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EvictionView, PrefixCacheView, PrefixNode

from .. import ui
from ..display_text import clock_text
from ..links import PagePlace
from ..view import Here, PageView

MAX_SHOWN_NODES: Final = 200
MAX_SHOWN_HOLDERS: Final = 3
MAX_PREFIX_RUNS: Final = 3
MAX_SHOWN_EVICTIONS: Final = 50
LONGEST_PX: Final = 60
"""The bar of the longest stretch."""
DEEPEST: Final = 12
"""Further in, the tree goes on at the same indent."""


def view(query: Query, here: Here) -> PageView:
    """Return the forest at the time of the page, and the evictions before that."""
    cache = query.prefix_cache(here.name, here.moment)
    return PageView(
        {
            "head": html.Header(_head(cache)),
            "tree": ui.card(_tree(here.place, cache), "card scroll", label="Prefixes"),
            "evictions": ui.card(_evictions(here.place, cache), "card scroll", label="Evictions"),
        }
    )


def _head(cache: PrefixCacheView) -> list[Any]:
    if not cache.cached_blocks:
        title = "Nothing is in the prefix cache"
    else:
        title = f"{counted(cache.cached_blocks, 'block')} in the prefix cache"
    tiles = (
        ("Cached", f"{cache.cached_blocks:,}", "blocks with a hash"),
        ("Idle", f"{cache.idle_blocks:,}", "no request uses them, evictable at once"),
        ("Shared", f"{cache.shared_blocks:,}", "in the tables of several requests"),
        ("Hit rate", "no lookup yet" if cache.hit_rate is None else percent(cache.hit_rate), "of tokens looked up"),
    )
    return [html.H1(title), ui.tiles(tiles)]


# -------------------------------------------------------------------- the tree


def _tree(place: PagePlace, cache: PrefixCacheView) -> list[Any]:
    parts: list[Any] = [
        html.H2("Prefixes"),
        ui.note(
            "Each line is a stretch of blocks that follow each other, under the stretch that it goes on from. A prefix"
            " is named by its keyed hash: what is in it is not known here."
        ),
    ]
    if not cache.nodes:
        return [*parts, ui.note("None is kept.")]
    ordered = _in_order(cache.nodes)
    widest = max(node.blocks for _, node in ordered)
    rows = [_row(place, cache.engine, depth, node, widest) for depth, node in ordered[:MAX_SHOWN_NODES]]
    figures = ("Blocks#", "Tokens#", "References#", "Hits#")
    parts.append(ui.table(rows, "Prefix", *figures, "Computed", "Idle for", "Requests", "Block ids"))
    left = cache.left_out + max(0, len(ordered) - MAX_SHOWN_NODES)
    return [*parts, ui.note(f"{counted(left, 'smaller one')} left out.")] if left else parts


def _in_order(nodes: Sequence[PrefixNode]) -> list[tuple[int, PrefixNode]]:
    """Return each with its depth, right under its parent, and among siblings the most hit first."""
    known = {node.id for node in nodes}
    under: dict[str, list[PrefixNode]] = {}
    for node in nodes:
        under.setdefault(node.parent if node.parent in known else "", []).append(node)
    ordered: list[tuple[int, PrefixNode]] = []
    todo = [(0, node) for node in _last_first(under.get("", []))]
    while todo:
        depth, node = todo.pop()
        ordered.append((depth, node))
        todo += [(depth + 1, child) for child in _last_first(under.get(node.id, []))]
    return ordered


def _last_first(nodes: Sequence[PrefixNode]) -> list[PrefixNode]:
    return sorted(nodes, key=lambda node: (node.hits, node.references, node.blocks))


def _row(place: PagePlace, engine: str, depth: int, node: PrefixNode, widest: int) -> html.Tr:
    holders: list[Any] = []
    length = max(2, round(LONGEST_PX * node.blocks / widest))
    for name in node.holders[:MAX_SHOWN_HOLDERS]:
        holders += [ui.request_link(place, engine, name), " "]
    return ui.tr(
        html.Th(
            [ui.dot("running" if node.references else "cached_idle"), html.Code(node.id)],
            scope="row",
            style={"paddingLeft": f"{10 + 18 * min(depth, DEEPEST)}px"},
        ),
        html.Td(
            [
                html.Span(f"{node.blocks:,}"),
                html.Span(
                    className="share-of", style={"width": f"{length}px", "marginRight": f"{LONGEST_PX - length}px"}
                ),
            ],
            className="n",
        ),
        ui.number_cell(node.tokens),
        ui.number_cell(node.references),
        ui.number_cell(node.hits),
        html.Td("long ago" if node.age_s is None else f"{duration(node.age_s)} ago"),
        html.Td("in use" if node.idle_s is None else duration(node.idle_s)),
        html.Td([*holders, *ui.and_more(len(node.holders) - MAX_SHOWN_HOLDERS)] or "none"),
        html.Td(ui.block_links(place, engine, node.ids, MAX_PREFIX_RUNS), className="blocks"),
        key=node.id,
    )


# -------------------------------------------------------------------- evictions


def _evictions(place: PagePlace, cache: PrefixCacheView) -> list[Any]:
    heading = html.H2("Recent evictions")
    if not cache.evictions:
        return [heading, ui.note("No eviction in the events that are kept.")]
    rows = [_evicted(place, cache.engine, one) for one in cache.evictions[:MAX_SHOWN_EVICTIONS]]
    table = ui.table(rows, "When", "To make room for", "Blocks#", "Needed again since#", "Event")
    return [heading, table, ui.note(ui.and_more(len(cache.evictions) - MAX_SHOWN_EVICTIONS))]


def _evicted(place: PagePlace, engine: str, one: EvictionView) -> html.Tr:
    return ui.tr(
        html.Td(clock_text(one.at)),
        ui.row_head(ui.request_link(place, engine, one.by) if one.by else one.cause),
        ui.number_cell(one.blocks),
        html.Td(f"{one.needed_again:,}" if one.needed_again else "none", className="n"),
        html.Td(ui.event_link(place, engine, one.position)),
        key=one.position,
        kind="culprit" if one.needed_again else "",
    )
