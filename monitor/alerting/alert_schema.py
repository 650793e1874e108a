"""The alerts part of the API, as plain structures. Times are RFC 3339, None for what has not come yet."""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope.monitor.alert_state import AlertView as AlertView
from kvscope.monitor.alert_state import ReceiverView as ReceiverView
from kvscope.monitor.schema import DeliveryState as DeliveryState
from kvscope.monitor.schema import DeliveryView as DeliveryView
from kvscope.monitor.schema import SilenceView as SilenceView

ENDS: Final[tuple[DeliveryState, ...]] = ("delivered", "given-up", "damped", "disabled")
"""How a message can end."""


class ReceiverFigures(msgspec.Struct, frozen=True):
    """How it goes with one receiver, in figures: what waits and for how long at most (0: nothing waits), and since the
    service was started how messages to it ended, and how many tries of them failed.
    """

    name: str
    disabled: bool
    pending: int
    oldest_pending_s: float
    ended: dict[DeliveryState, int]
    failed_tries: int


class AlertFigures(msgspec.Struct, frozen=True):
    """How it goes with alerts, in figures."""

    receivers: list[ReceiverFigures] = []
    open: int | None = None
    silences: int | None = None


class AlertsView(msgspec.Struct, frozen=True):
    """All alerts, silences and receivers, and the latest deliveries."""

    receivers: list[ReceiverView]
    open: list[AlertView]
    silences: list[SilenceView]
    deliveries: list[DeliveryView]


class TriedView(msgspec.Struct, frozen=True):
    """The answer of a receiver to a test."""

    receiver: str
    delivered: bool
    answer: str
