"""When an alert that comes and goes is told of no more.

Once it has begun to fire more than FIRES times within WINDOW_S, its ends are held back: it counts as firing until it
has been gone for CALM_S. What happens in between is in the delivery log, and told to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FIRES: Final = 3
WINDOW_S: Final = 600.0
CALM_S: Final = 600.0


def recent(fires: Sequence[float], now: float) -> list[float]:
    """Those of the times (wall seconds) at which it began to fire that still count."""
    return [at for at in fires if at > now - WINDOW_S]


def is_flapping(fires: Sequence[float], now: float) -> bool:
    """Whether an alert that began to fire at these times (wall seconds) flaps."""
    return len(recent(fires, now)) > FIRES
