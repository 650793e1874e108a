"""The block map as an indexed PNG, one pixel for each block, in rows: the browser enlarges it without smoothing.

A pool of more than MAX_CELLS blocks has several blocks to a pixel, which then shows the one that asks for attention
most, so that a single UNACCOUNTED block is never lost in the picture.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from kvscope.dashboards.web.palette import PALETTE_SHADES, colour_of
from kvscope.monitor.schema import BLOCK_STATES, BlockColours, BlockMap

MAX_CELLS: Final = 32_768

# Palette entries, the least in need of attention first: max() of several blocks is the one to show.
_COLOURS_BY_NAME: Final = {shade.state: shade for shade in PALETTE_SHADES}
_ORDER: Final = ("reserved", "free", "cached-idle", "running", "waiting", "finished", "UNACCOUNTED")
_RANK: Final = bytes(_ORDER.index(state) + 1 for state in BLOCK_STATES).ljust(256, b"\0")
_COLOURS: Final = [component for state in _ORDER for component in _COLOURS_BY_NAME[state].rgb]
_OPACITIES: Final = bytes(round(255 * _COLOURS_BY_NAME[state].opacity) for state in _ORDER)
_NOTHING: Final = 0
_VEILED: Final = 1
_CLEAR: Final = 2


class Grid(NamedTuple):
    """How the blocks of a pool are laid out: `per_cell` to a pixel, in rows of `columns`."""

    total: int
    per_cell: int
    columns: int
    rows: int


def grid(total: int) -> Grid:
    """Return the grid for a pool of `total` blocks: two to eight times as wide as high, its width a power of two."""
    per_cell = max(1, math.ceil(total / MAX_CELLS))
    cells = max(1, math.ceil(total / per_cell))
    columns = min(2 ** math.ceil(math.log2(math.sqrt(2 * cells))), cells)
    return Grid(total, per_cell, columns, math.ceil(cells / columns))


def picture(blocks: BlockMap) -> str:
    """Return the map as a data URL."""
    ranks = blocks.states.translate(_RANK)
    return _png(ranks, grid(blocks.total), [0, 0, 0, *_COLOURS], b"\0" + _OPACITIES)


def coloured_map(blocks: BlockColours) -> str:
    """Return the map by one of the blocks' properties, as a data URL: of several in a cell the highest value shows."""
    values = bytes(value + 1 for value in range(255)) + b"\xff"
    colours = [part for value in range(15 + 1) for part in colour_of(blocks.by, value)]
    opacities = bytes([0, 45, *[255] * 15])
    return _png(blocks.values.translate(values), grid(blocks.total), [0, 0, 0, *colours], opacities)


def spotlight(total: int, blocks: Iterable[int]) -> str:
    """Return a veil to lay over the map, clear where `blocks` are, as a data URL."""
    veil = bytearray([_VEILED]) * total
    for block in blocks:
        if block < total:
            veil[block] = _CLEAR
    return _png(bytes(veil), grid(total), [0, 0, 0, 127, 131, 140, 0, 0, 0], bytes([0, 190, 0]))


def _png(values: bytes, laid: Grid, colours: list[int], opacities: bytes) -> str:
    if laid.per_cell > 1:
        padded = values.ljust(laid.per_cell * -(-len(values) // laid.per_cell), bytes([_NOTHING]))
        values = np.frombuffer(padded, np.uint8).reshape(-1, laid.per_cell).max(axis=1).tobytes()
    pixels = values.ljust(laid.columns * laid.rows, bytes([_NOTHING]))
    image = Image.frombytes("P", (laid.columns, laid.rows), pixels)
    image.putpalette(colours)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=opacities, bits=4 if len(colours) <= 48 else 8)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
