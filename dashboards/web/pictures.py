"""Pictures as data URLs: the block map, the usage of many pools, and sparklines.

The block map is an indexed PNG, one pixel for each block, in rows: the browser enlarges it without smoothing. A pool of
more than MAX_CELLS blocks has several blocks to a pixel, which then shows the one that asks for attention most, so that
a single UNACCOUNTED block is never lost in the picture.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
from dash import html
from PIL import Image

from kvscope.monitor.questions.schema import BLOCK_STATES, BlockColours, BlockMap

from .palette import PALETTE_SHADES, RISING, colour_of

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
    return _as_url(pixels, laid.columns, laid.rows, colours, opacities)


def _as_url(pixels: bytes, columns: int, rows: int, colours: list[int], opacities: bytes) -> str:
    """Return an indexed PNG."""
    image = Image.frombytes("P", (columns, rows), pixels)
    image.putpalette(colours)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=opacities, bits=4 if len(colours) <= 48 else 8)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


_FULL_SHADE: Final = (226, 49, 45)
_LEVELS: Final = (*RISING, _FULL_SHADE)
FULL_FROM: Final = 97
"""Percent: a pool that has nothing to give."""
_STRIP_COLOURS: Final = [0, 0, 0, *(part for shade in _LEVELS for part in shade)]
_STRIP_OPACITIES: Final = bytes([0, *[255] * len(_LEVELS)])


_LEVEL_OF: Final = [
    *(1 + percent * len(RISING) // FULL_FROM for percent in range(FULL_FROM)),
    *[len(_LEVELS)] * (100 - FULL_FROM + 1),
    0,
]
"""The palette's entry of each percent. The last one, -1, is for unknown values."""


def strips_picture(strips: Sequence[Sequence[int]]) -> str:
    """Return the strips as a data URL, clear where values are not known."""
    width = max(map(len, strips), default=0) or 1
    pixels = b"".join(bytes(map(_LEVEL_OF.__getitem__, strip)).rjust(width, b"\0") for strip in strips) or b"\0"
    return _as_url(pixels, width, max(1, len(strips)), _STRIP_COLOURS, _STRIP_OPACITIES)


SPARKLINE_WIDTH: Final = 120
SPARKLINE_HEIGHT: Final = 22


def sparkline(
    name: str, values: Sequence[float | None], unit: str, rgb: tuple[int, int, int], top: float = 0.0
) -> list[Any]:
    """Return the line as an image, with its extremes in words, or nothing if too few are known or all are 0.

    top: where its axis ends, 0 for the highest value.
    """
    known = [value for value in values if value is not None]
    if len(known) < 2 or not any(known):
        return []
    words = f"{name} over 10 min: {min(known):,.0f} to {max(known):,.0f}{unit}, now {known[-1]:,.0f}{unit}"
    return [html.Img(src=_svg(values, rgb, top or max(known) or 1.0), alt=words, title=words, className="sparkline")]


def _svg(values: Sequence[float | None], rgb: tuple[int, int, int], top: float) -> str:
    """As a data URL. Unknown values break the line."""
    step = SPARKLINE_WIDTH / max(len(values) - 1, 1)
    lines: list[list[tuple[float, float]]] = [[]]
    for place, value in enumerate(values):
        if value is not None:
            lines[-1].append((place * step, 1 + (SPARKLINE_HEIGHT - 2) * (1 - min(value / top, 1.0))))
        elif lines[-1]:
            lines.append([])
    path, areas = "", ""
    for line in filter(None, lines):
        path += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
        outline = [(line[0][0], SPARKLINE_HEIGHT), *line, (line[-1][0], SPARKLINE_HEIGHT)]
        areas += f"<polygon points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in outline)}'/>"
    colour = "#" + "".join(f"{part:02x}" for part in rgb)
    size = f"viewBox='0 0 {SPARKLINE_WIDTH} {SPARKLINE_HEIGHT}' preserveAspectRatio='none'"
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}>"
        f"<g fill='{colour}' fill-opacity='0.2'>{areas}</g>"
        f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.5'/></svg>"
    )
    return "data:image/svg+xml," + quote(svg, safe=" =:/'")
