"""The usage of many pools over the last ten minutes, as a PNG: a row for each engine, a column for ten seconds."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Final

from PIL import Image

from kvscope.dashboards.web.palette import RISING

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
    image = Image.frombytes("P", (width, max(1, len(strips))), pixels)
    image.putpalette(_STRIP_COLOURS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=_STRIP_OPACITIES, bits=4)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
