"""The picture of the pool shows each block's state, and never loses the one that matters."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from kvscope.dashboards.web import pictures
from kvscope.dashboards.web.palette import PALETTE_SHADES
from kvscope.monitor.questions.schema import BLOCK_STATES, BlockMap, PointView

RGB = {shade.state: shade.rgb for shade in PALETTE_SHADES}


def decoded(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")


def test_every_state_has_a_shade_and_every_shade_is_a_figure_of_the_balance() -> None:
    assert sorted(RGB) == sorted(BLOCK_STATES)
    assert {shade.field for shade in PALETTE_SHADES} <= set(PointView.__struct_fields__)


@pytest.mark.parametrize("total", [2, 7, 65, 800, pictures.MAX_CELLS])
def test_a_pixel_for_each_block(total: int) -> None:
    states = bytes(block % len(BLOCK_STATES) for block in range(total))
    laid = pictures.grid(total)
    image = decoded(pictures.picture(BlockMap("e", None, total, states)))
    assert image.size == (laid.columns, laid.rows)
    for block in range(total):
        red, green, blue, opacity = image.getpixel((block % laid.columns, block // laid.columns))
        assert (red, green, blue) == RGB[BLOCK_STATES[states[block]]]
        assert opacity > 0
    for cell in range(total, laid.columns * laid.rows):
        assert image.getpixel((cell % laid.columns, cell // laid.columns))[3] == 0


def test_one_unaccounted_block_in_a_million_is_seen() -> None:
    total, lost = 1_000_003, 654_321
    states = bytearray([BLOCK_STATES.index("running")]) * total
    states[lost] = BLOCK_STATES.index("UNACCOUNTED")
    laid = pictures.grid(total)
    image = decoded(pictures.picture(BlockMap("e", None, total, bytes(states))))
    assert laid.columns * laid.rows <= 2 * pictures.MAX_CELLS
    cell = lost // laid.per_cell
    assert image.getpixel((cell % laid.columns, cell // laid.columns))[:3] == RGB["UNACCOUNTED"]
    assert sum(pixel[:3] == RGB["UNACCOUNTED"] for pixel in image.get_flattened_data()) == 1


@pytest.mark.parametrize("total", [100, 3 * pictures.MAX_CELLS])
def test_the_spotlight_is_clear_where_the_blocks_are(total: int) -> None:
    laid = pictures.grid(total)
    image = decoded(pictures.spotlight(total, [3, 50, total + 9]))
    clear = {
        cell
        for cell in range(-(-total // laid.per_cell))
        if image.getpixel((cell % laid.columns, cell // laid.columns))[3] == 0
    }
    assert clear == {3 // laid.per_cell, 50 // laid.per_cell}
