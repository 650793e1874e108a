"""Read models of the alert store: what the API, the page of one finding and /metrics show of it."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from kvscope.monitor.alerting import flapping
from kvscope.monitor.alerting.alert_schema import (
    ENDS,
    AlertFigures,
    AlertsView,
    AlertView,
    DeliveryView,
    ReceiverFigures,
    ReceiverView,
)
from kvscope.monitor.alerting.alert_store import AlertStore
from kvscope.monitor.alerting.message import AlertedFinding, Message
from kvscope.monitor.alerting.receivers.receiver import Receiver
from kvscope.monitor.schema import NotificationsView
from kvscope.monitor.text import timestamp

MAX_SHOWN_DELIVERIES: Final = 200


class AlertViews:
    """Read-only views of the `store`. All `now` are wall seconds."""

    def __init__(self, store: AlertStore) -> None:
        self._store = store

    def alerts(self, now: float) -> AlertsView:
        """Return the alerts for the API."""
        with self._store.lock:
            return AlertsView(
                receivers=[self._receiver_view(receiver, now) for receiver in self._store.receivers.values()],
                open=[_alert_view(row, now) for row in self._store.read("SELECT * FROM alerts WHERE alert != ''")],
                silences=[silence.view(number) for number, silence in self._store.silences(now).items()],
                deliveries=[
                    _delivery_view(row)
                    for row in self._store.read(
                        "SELECT * FROM deliveries ORDER BY sequence DESC LIMIT ?", MAX_SHOWN_DELIVERIES
                    )
                ],
            )

    def notifications(self, finding: str, now: float) -> NotificationsView:
        """Return the notifications of one finding. They may carry the id of an earlier finding that this one
        continues.
        """
        with self._store.lock:
            rows = self._store.read("SELECT * FROM alerts WHERE finding = ?", finding)
            alert = rows[0]["alert"] or finding if rows else finding
            deliveries = self._store.read(
                "SELECT * FROM deliveries WHERE alert = ? ORDER BY sequence DESC LIMIT ?", alert, MAX_SHOWN_DELIVERIES
            )
            alerted = msgspec.json.decode(rows[0]["trouble"], type=AlertedFinding) if rows else None
            return NotificationsView(
                receivers=list(self._store.receivers),
                deliveries=[_delivery_view(row) for row in deliveries],
                silences=[
                    silence.view(number)
                    for number, silence in self._store.silences(now).items()
                    if alerted is not None and silence.matches(alerted)
                ],
            )

    def figures(self, now: float) -> AlertFigures:
        """Return the numbers for /metrics."""
        with self._store.lock:
            (is_open,) = self._store.read("SELECT count(*) AS number FROM alerts WHERE alert != ''")
            return AlertFigures(
                receivers=[self._receiver_figures(name, now) for name in self._store.receivers],
                open=is_open["number"],
                silences=len(self._store.silences(now)),
            )

    def _receiver_figures(self, name: str, now: float) -> ReceiverFigures:
        (row,) = self._store.read(
            "SELECT count(*) AS pending, min(created) AS oldest FROM deliveries"
            " WHERE receiver = ? AND state = 'pending'",
            name,
        )
        return ReceiverFigures(
            name=name,
            disabled=self._store.is_disabled(name),
            pending=row["pending"],
            oldest_pending_s=max(0.0, now - row["oldest"]) if row["pending"] else 0.0,
            ended={state: self._store.ended[name, state] for state in ENDS},
            failed_tries=self._store.failed_tries[name],
        )

    def _receiver_view(self, receiver: Receiver, now: float) -> ReceiverView:
        (row,) = self._store.read(
            "SELECT *, (SELECT count(*) FROM deliveries WHERE receiver = name AND state = 'pending') AS pending"
            " FROM receivers WHERE name = ?",
            receiver.name,
        )
        paused = row["paused_until"] if row["paused_until"] > now else None
        return ReceiverView(
            receiver.name, receiver.url.host, row["pending"], _iso_time(paused), _iso_time(row["disabled"])
        )


def _alert_view(row: sqlite3.Row, now: float) -> AlertView:
    alerted = msgspec.json.decode(row["trouble"], type=AlertedFinding)
    flaps = flapping.is_flapping(msgspec.json.decode(row["fires"], type=list[float]), now)
    return AlertView(
        alerted.id,
        alerted.engine,
        alerted.code,
        alerted.severity,
        alerted.since,
        flaps,
        alerted.explanation,
        row["finding"],
    )


def _delivery_view(row: sqlite3.Row) -> DeliveryView:
    alerted = msgspec.json.decode(row["message"], type=Message).finding
    due = row["due"] if row["state"] == "pending" else None
    return DeliveryView(
        row["sequence"],
        row["id"],
        row["receiver"],
        row["kind"],
        row["alert"],
        alerted.engine,
        alerted.code,
        row["state"],
        row["tries"],
        _iso_time(row["created"]) or "",
        _iso_time(due),
        _iso_time(row["ended"]),
        row["answer"],
    )


def _iso_time(seconds: float | None) -> str | None:
    return timestamp(round((seconds or 0) * 1e9))
