"""The JSON schema of alerts as a whole. Times are RFC 3339, None for what has not come yet."""

from __future__ import annotations

import msgspec

from kvscope.monitor.schema import DeliveryView, SilenceView


class ReceiverView(msgspec.Struct, frozen=True):
    """One receiver. `name` is made of its kind and a hash of its URL, which may be a secret."""

    name: str
    host: str
    pending: int
    paused_until: str | None
    disabled_at: str | None


class AlertView(msgspec.Struct, frozen=True):
    """An open alert: reported as firing, and not yet as resolved."""

    id: str
    engine: str
    code: str
    severity: str
    since: str | None
    flapping: bool
    explanation: str
    finding: str = ""
    """The id of the finding that fires."""


class ThresholdView(msgspec.Struct, frozen=True):
    """A threshold of the detectors: the value in force, and the default."""

    name: str
    value: float
    default: float
    unit: str
    reason: str


class AlertStateView(msgspec.Struct, frozen=True):
    """Alerts as a whole: receivers, open alerts, silences, the latest deliveries, and the thresholds in force. No
    receivers: this service sends no alerts.
    """

    receivers: list[ReceiverView] = []
    open: list[AlertView] = []
    silences: list[SilenceView] = []
    deliveries: list[DeliveryView] = []
    thresholds: list[ThresholdView] = []
