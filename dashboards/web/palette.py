"""The colour of each block state, on the map, in the bands of the chart and in every legend, and of reasons and limits.

They differ in lightness as well as in hue, each from its neighbours in the chart, and are seen on light and dark alike.
Red is kept for unaccounted blocks, and what requests can have at once is pale. Order: as the chart stacks them, what
does not come back lowest, so that a leak is a floor that rises.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.questions.schema import PART_LABELS


class Shade(NamedTuple):
    """A block state: its name in BLOCK_STATES and in PointView, its name on the page, what it means, its colour."""

    state: str
    field: str
    label: str
    meaning: str
    rgb: tuple[int, int, int]
    opacity: float = 1.0

    @property
    def css(self) -> str:
        """As a style sheet writes it."""
        return css(self.rgb, self.opacity)


PALETTE_SHADES: Final = (
    Shade("UNACCOUNTED", "unaccounted", PART_LABELS["unaccounted"], "in use without an owner", (226, 49, 45)),
    Shade(
        "finished",
        "finished",
        PART_LABELS["finished"],
        "of requests that have ended, with a deferred free",
        (139, 70, 170),
    ),
    Shade("running", "running", "running", "of requests that are being computed", (104, 168, 235)),
    Shade("waiting", "waiting", "waiting", "of requests that wait, and keep blocks meanwhile", (243, 184, 66)),
    Shade(
        "cached-idle",
        "cached_idle",
        PART_LABELS["cached_idle"],
        "kept for prefix hits until needed",
        (58, 145, 134),
        0.35,
    ),
    Shade("free", "free", "free", "empty, ready to be allocated", (128, 140, 160), 0.22),
    Shade("reserved", "reserved", "reserved", "never allocated", (112, 118, 130)),
)

REASONS: Final = {
    "KV_BLOCKS": (230, 140, 40),
    "BEHIND_HEAD": (138, 146, 160),
    "MAX_NUM_SEQS": (150, 120, 215),
    "TOKEN_BUDGET": (80, 145, 220),
    "PREEMPTED": (205, 85, 150),
    "REMOTE_KV": (45, 160, 150),
    "GRAMMAR": (140, 150, 60),
    "ENCODER": (95, 165, 90),
    "STREAMING_INPUT": (120, 170, 200),
    "CAPACITY": (230, 140, 40),
    "DEFERRED": (45, 160, 150),
}
"""Why requests wait, with OTHER for any other reason."""
OTHER: Final = (120, 126, 138)
LIMITS: Final = {
    "KV": REASONS["KV_BLOCKS"],
    "SEQUENCES": REASONS["MAX_NUM_SEQS"],
    "TOKENS": REASONS["TOKEN_BUDGET"],
    "ENCODER": REASONS["ENCODER"],
    "DEFERRED": REASONS["REMOTE_KV"],
    "NONE": (128, 140, 160),
}
"""The bound on steps, as the reason that it is for a request."""


MANY: Final = (
    (66, 133, 214),
    (230, 140, 40),
    (58, 160, 120),
    (190, 80, 150),
    (120, 98, 205),
    (180, 160, 40),
    (60, 180, 190),
    (215, 95, 90),
    (100, 150, 70),
    (150, 110, 75),
    (235, 150, 190),
    (90, 110, 160),
    (160, 200, 110),
    (240, 190, 110),
)
"""Things of one kind with different colours, such as owners."""
RISING: Final = ((205, 225, 245), (160, 195, 235), (110, 160, 220), (70, 120, 195), (45, 80, 160), (25, 40, 110))
"""Shades for a value that grows, such as an age. The order, not the ends, reads well on light and dark."""
NO_VALUE: Final = (128, 140, 160)


def colour_of(by: str, value: int) -> tuple[int, int, int]:
    """Return the colour of a value of a colouring of blocks."""
    if value == 0:
        return NO_VALUE
    if by in ("owner", "prefix"):
        return MANY[value - 1] if value <= len(MANY) else OTHER
    return RISING[min(value, len(RISING)) - 1]


def css(rgb: tuple[int, int, int], opacity: float = 1.0) -> str:
    """Return a colour as a style sheet writes it."""
    return f"rgba({', '.join(map(str, rgb))}, {opacity:g})"
