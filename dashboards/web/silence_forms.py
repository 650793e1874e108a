"""Notes on silences, and the parts of the forms that create one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.dashboards.web.display_text import day_and_clock
from kvscope.monitor.schema import SilenceView

LENGTHS: Final = (("3600", "an hour"), ("14400", "4 hours"), ("86400", "a day"), ("604800", "a week"))


def silence_note(number: str, silences: Sequence[SilenceView]) -> list[Any]:
    """Confirm the silence that was created just now, if it is in force. `number` is from the address. Nothing, if it is
    over.
    """
    return [
        html.P(
            f"Silence {one.number} is set until {day_and_clock(one.until)}: {' '.join(one.matchers)}.",
            role="status",
            className="confirmed",
        )
        for one in silences
        if str(one.number) == number
    ]


def literally(text: str) -> str:
    """Return a pattern that matches only that."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)
