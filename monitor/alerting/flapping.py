"""Stops notifications of an alert that fires and resolves again and again.

Once it has begun to fire more than FIRES times within WINDOW_S, its ends are held back: it counts as firing until it
has been gone for CALM_S. The delivery log keeps the transitions in between, without notifications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRES: Final = 3
WINDOW_S: Final = 600.0
CALM_S: Final = 600.0


def recent(fires: Sequence[float], now: float) -> list[float]:
    """Return the starts of firing (wall seconds) that still count."""
    return [at for at in fires if at > now - WINDOW_S]


def is_flapping(fires: Sequence[float], now: float) -> bool:
    """Whether an alert that began to fire at these times (wall seconds) flaps."""
    return len(recent(fires, now)) > FIRES
