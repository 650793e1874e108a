"""Retained blocks: who holds them, whether that is a leak, and how long blocks of a window stayed."""

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
    until = "" if here.window.live else here.window.until
    retained = query.retained_blocks(here.name, here.replayed_since, until)
    return PageView(
        {
            "head": html.Header(_head(here, retained)),
            "held": ui.card(_groups(here.place, retained), "card scroll", label="By owner"),
            "lifetimes": ui.card(_lifetimes(retained), label="How long blocks stay"),
            "floors": ui.card(_floors(retained.floors), label="After each drain to idle"),
        }
    )


def _head(here: Here, retained: RetainedBlocksView) -> list[Any]:
    suspect = sum(one.blocks for one in retained.held if one.reason in RETAINED_SHADES)
    when = "now" if here.window.live else f"at {clock_text(retained.until)} UTC"
    window = f"from {clock_text(retained.since)} to {clock_text(retained.until)} UTC"
    blocks = counted(retained.held_blocks, "block") if retained.held_blocks else "No block"
    one = retained.held_blocks <= 1
    verb = ("is" if one else "are") if here.window.live else "was" if one else "were"
    parts: list[Any] = [html.H1(f"{blocks} {verb} held {when}")]
    tiles = (
        ("In live requests", retained.held_blocks - suspect, f"in use as expected, {when}"),
        ("Without a live request", suspect, "held by ended requests, or UNACCOUNTED"),
        ("Allocated", retained.allocated, f"times that a block got an owner, {window}"),
        ("Freed", retained.freed, "of these, within the window"),
        ("Warm cache", retained.still_cached, "of these, kept for their prefix"),
    )
    parts.append(ui.tiles((name, f"{value:,}", about) for name, value, about in tiles))
    if not retained.is_complete:
        parts.append(
            ui.note("Some events of this window are missing. Blocks that were allocated or freed by them do not count.")
        )
    return parts


def _groups(place: PagePlace, retained: RetainedBlocksView) -> list[Any]:
    parts: list[Any] = [html.H2("Owners, the longest first")]
    if not retained.held:
        return [*parts, ui.note("No request holds any.")]
    rows = [_row(place, retained.engine, one) for one in retained.held]
    note = ui.note("Each block counts once: one that several requests hold counts under the most active of them.")
    return [*parts, note, ui.table(rows, "Owner", "State", "Why", "Since", "For", "Blocks#", "Which")]


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
