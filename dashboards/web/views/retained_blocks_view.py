"""Retained blocks: those allocated in the window and not freed by its end, and whether that is a leak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import IdleFloorView, RetainedBlocksView, RetainedGroup

from .. import ui
from ..charts import Bar, bars
from ..display_text import clock_text
from ..links import PagePlace
from ..view import Here, PageView

MAX_RETAINED_RUNS: Final = 12
MOST_FLOORS: Final = 20
RETAINED_SHADES: Final = {"FREE_DEFERRED": "finished", "UNACCOUNTED": "unaccounted"}


def view(query: Query, here: Here) -> PageView:
    """Return the blocks by owner, oldest first, how long the others stayed, and the rest at each drain to idle."""
    retained = query.retained_blocks(here.name, here.window.since, "" if here.window.live else here.window.until)
    return PageView(
        {
            "head": html.Header(_head(retained)),
            "held": ui.card(_groups(here.place, retained), "card scroll", label="By owner"),
            "lifetimes": ui.card(_lifetimes(retained), label="How long blocks stay"),
            "floors": ui.card(_floors(retained.floors), label="After each drain to idle"),
        }
    )


def _head(retained: RetainedBlocksView) -> list[Any]:
    suspect = sum(one.blocks for one in retained.held if one.reason in RETAINED_SHADES)
    when = f"from {clock_text(retained.since)} to {clock_text(retained.until)} UTC"
    if not retained.allocated:
        title = f"No block was allocated {when}"
    elif not retained.held_blocks:
        title = f"All blocks that were allocated {when} were freed"
    else:
        title = f"{counted(retained.held_blocks, 'block')} of those allocated {when} were not freed by its end"
    parts: list[Any] = [html.H1(title)]
    tiles = (
        ("Allocated", retained.allocated, "times that a block got an owner"),
        ("Freed", retained.freed, "within the window"),
        ("In live requests", retained.held_blocks - suspect, "in use as expected"),
        ("Without a live request", suspect, "held by ended requests, or UNACCOUNTED"),
        ("Warm cache", retained.still_cached, "freed, and kept for their prefix"),
    )
    parts.append(ui.tiles((name, f"{value:,}", about) for name, value, about in tiles))
    if not retained.is_complete:
        parts.append(
            ui.note("Some events of this window are missing. Blocks that were allocated before them are not counted.")
        )
    return parts


def _groups(place: PagePlace, retained: RetainedBlocksView) -> list[Any]:
    parts: list[Any] = [html.H2("Owners, the longest first")]
    if not retained.held:
        return [*parts, ui.note("No request holds any.")]
    rows = [_row(place, retained.engine, one) for one in retained.held]
    return [*parts, ui.table(rows, "Owner", "State", "Why", "Since", "For", "Blocks#", "Which")]


def _row(place: PagePlace, engine: str, one: RetainedGroup) -> html.Tr:
    family = RETAINED_SHADES.get(one.reason, "running" if one.state == "RUNNING" else "waiting")
    owner = ui.request_link(place, engine, one.owner) if one.owner else "no known owner"
    state = in_words(one.state) if one.state else "no owner"
    return ui.tr(
        ui.row_head(owner),
        html.Td([ui.dot(family), state], className="state", title=one.state),
        html.Td(in_words(one.reason) if one.reason else "it is alive", title=one.reason),
        html.Td(clock_text(one.since)),
        html.Td(duration(one.for_s)),
        ui.number_cell(one.blocks),
        html.Td(ui.block_links(place, engine, one.ids, MAX_RETAINED_RUNS), className="blocks"),
        key=f"{one.owner} {one.state} {one.reason}",
        kind="culprit" if one.reason in RETAINED_SHADES else "",
    )


def _lifetimes(retained: RetainedBlocksView) -> list[Any]:
    heading = html.H2("Lifetimes of blocks that were freed")
    shortest = 0.0
    rows = []
    for bucket in retained.lifetimes:
        upper = bucket.at_most_s
        words = f"over {duration(shortest)}" if upper is None else f"up to {duration(upper)}"
        rows.append(Bar(words, bucket.blocks))
        shortest = upper or shortest
    while rows and not rows[-1].value:
        rows.pop()
    while rows and not rows[0].value:
        rows.pop(0)
    return [heading, bars(rows) if rows else ui.note("None was freed yet.")]


def _floors(floors: Sequence[IdleFloorView]) -> list[Any]:
    heading = html.H2("Floor after each idle")
    if not floors:
        return [heading, ui.note("It has not been idle in this window.")]
    rises = len(floors) > 1 and floors[-1].blocks > floors[0].blocks
    sentence = (
        f"It rose from {floors[0].blocks:,} to {floors[-1].blocks:,}. An idle engine should hold none."
        if rises
        else "It does not rise: allocated blocks are freed."
    )
    stride = -(-len(floors) // MOST_FLOORS)
    shown = [*floors[:-1:stride], floors[-1]]
    rows = [Bar(clock_text(floor.at), floor.blocks, "bad" if floor.blocks else "") for floor in shown]
    left_out = [ui.note(f"{counted(len(floors), 'drain')} in all.")] if len(shown) < len(floors) else []
    return [heading, ui.note(sentence), bars(rows), *left_out]
