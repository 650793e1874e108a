"""Accounts that cannot be right."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import exactly, heirs, inherited, no_requests, overdrawn
from .scenario import Way, incident
from .shapes import AHEAD, BUSY, CHAT, FINE, MEDIUM, NO_PREFIXES, SMALL, URGENT

GOING: Final = (Clients(at_once=8, prompt=(20, 60), output=(30, 80), leave=0.9, until_s=10),)

CORRUPT: Final = (
    *incident(
        "corrupt.double-free",
        Way("once", {**SMALL, **NO_PREFIXES}, (CHAT,), ":limit=1"),
        Way("twice", MEDIUM, (BUSY,), ":every=4:limit=2"),
        Way("urgent", FINE, (URGENT, CHAT), ":after=3:limit=1"),
        blocks=exactly(overdrawn),
    ),
    *incident(
        "corrupt.use-after-free",
        Way(
            "bare",
            {**SMALL, **AHEAD, **NO_PREFIXES, "block_size": 4, "num_gpu_blocks_override": 251},
            GOING,
            ":limit=30",
        ),
        Way("hits", {**SMALL, **AHEAD}, GOING, ":every=3"),
        Way("urgent", {**FINE, **AHEAD, **NO_PREFIXES, "num_gpu_blocks_override": 251}, GOING, ":after=3:limit=30"),
        seconds=20,
        onset=lambda simulated: bool(simulated.heirs),
        requests=exactly(heirs),
        blocks=exactly(inherited),
    ),
    *incident(
        "corrupt.counter-drift",
        Way("chat", SMALL, (CHAT,)),
        Way("busy", MEDIUM, (BUSY,), ":every=3"),
        Way("once", FINE, (URGENT, CHAT), ":limit=1"),
        requests=exactly(no_requests),
    ),
)
