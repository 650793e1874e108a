"""The outbox: which messages the transitions of findings and the clock cause, and what others read of them.

A transition, what follows from it and the rows that report it are one transaction: a process that is killed at any
moment has sent, or will send, each transition at least once, with one id. All `now` are wall seconds.

An alert flaps once it has begun to fire more than FIRES times within WINDOW_S. Its ends are then held back: it counts
as firing until it has been gone for CALM_S. The delivery log keeps the transitions in between, without notifications.
A finding that returns within RETURNS_S of its end is the same alert, which has been open twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...base.http_url import HttpUrl
from ...base.text import timestamp
from ...detectors.findings import MAX_INTERVALS, RETURNS_S, FindingInterval, Transition, severity_at_least
from ...questions.schema import AlertView, DeliveryState, DeliveryView, NotificationsView, ReceiverView
from .alert_store import AlertStore
from .message import (
    CHANGED_S,
    ENDS,
    AlertedFinding,
    AlertFigures,
    AlertsView,
    Message,
    MessageKind,
    ReceiverFigures,
    alerted_finding,
    message_id,
)
from .receivers import Receiver

FIRES: Final = 3
WINDOW_S: Final = 600.0
CALM_S: Final = 600.0
DELIVERY_LOG_LENGTH: Final = 10_000
"""Messages of the delivery log that are over."""
MAX_SHOWN_DELIVERIES: Final = 200


class Outbox(AlertStore):
    """Opens and closes alerts, and queues messages for the receivers. Thread-safe. All of it raises sqlite3.Error.

    `repeat_s`: how often an alert that still fires is sent again (0: never). `look_again_s`: how long after a start an
    open alert of an earlier run may be unseen before it is sent as resolved. `page`: where messages link to.
    """

    def __init__(
        self,
        path: Path | None,
        receivers: Sequence[Receiver],
        repeat_s: float,
        look_again_s: float,
        now: float,
        page: HttpUrl | None = None,
    ) -> None:
        super().__init__(path, receivers, now)
        self._page = page
        self._repeat_s = repeat_s
        self._look_again_s = look_again_s
        self._ticked = 0.0

    def put(self, transitions: Sequence[Transition], now: float) -> None:
        """Take transitions and notify of those whose findings are warnings or worse. A repeated transition changes
        nothing.
        """
        graver = [one for one in transitions if severity_at_least(one.finding.severity, "warning")]
        if not graver:
            return
        with self.writing() as database:
            for transition in graver:
                row = database.execute(
                    "SELECT * FROM alerts WHERE engine = ? AND code = ? AND key = ?", transition.finding.place
                ).fetchone()
                if transition.to == "firing":
                    self._fires(transition, row, now)
                elif row is not None and row["alert"] and row["finding"] == transition.finding.id:
                    self._ends(transition, row, now)
            database.execute(
                "DELETE FROM deliveries WHERE state != 'pending' AND sequence <="
                " (SELECT max(sequence) FROM deliveries) - ?",
                (DELIVERY_LOG_LENGTH,),
            )

    def _fires(self, transition: Transition, row: sqlite3.Row | None, now: float) -> None:
        finding = transition.finding
        identity = message_id(finding.id, "firing", transition.at_ns)
        fires = _recent_fires(row, now) if row is not None else []
        if row is not None and row["alert"]:
            alerted = alerted_finding(finding.report(), row["alert"], row["key"], "firing", self._page)
            earlier = msgspec.json.decode(row["trouble"], type=AlertedFinding).earlier
            alerted = msgspec.structs.replace(alerted, earlier=earlier)
            if row["finding"] != finding.id:
                self._log_damped(identity, "firing", transition.at_ns, alerted, now)
                fires.append(now)
            self.database.execute(
                "UPDATE alerts SET finding = ?, first_seen_ns = ?, trouble = ?, fires = ?, held_until = NULL,"
                " unseen_since = NULL WHERE engine = ? AND code = ? AND key = ?",
                (
                    finding.id,
                    finding.first_seen_ns,
                    msgspec.json.encode(alerted),
                    msgspec.json.encode(fires),
                    *finding.place,
                ),
            )
            return
        if self.database.execute("SELECT 1 FROM deliveries WHERE id = ?", (identity,)).fetchone():
            return  # sent before, and over
        fires.append(now)
        alert, earlier = self._continued(row, now) or (finding.id, [])
        alerted = alerted_finding(finding.report(), alert, finding.judgement.key, "firing", self._page)
        alerted = msgspec.structs.replace(alerted, earlier=earlier)
        self.database.execute(
            "INSERT OR REPLACE INTO alerts (engine, code, key, alert, finding, first_seen_ns, trouble, fires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *finding.place,
                alert,
                finding.id,
                finding.first_seen_ns,
                msgspec.json.encode(alerted),
                msgspec.json.encode(fires),
            ),
        )
        flaps = len(fires) > FIRES
        message = self._message(identity, "firing", transition.at_ns, alerted, flapping=flaps)
        for name in self.receivers:
            self._enqueue(message, name, now)

    def _continued(self, row: sqlite3.Row | None, now: float) -> tuple[str, list[FindingInterval]] | None:
        """Return the id of the alert in this place that ended less than RETURNS_S ago, and when it fired."""
        if row is None:
            return None
        ended = msgspec.json.decode(row["trouble"], type=AlertedFinding)
        (last,) = self.database.execute(
            "SELECT max(created) AS at FROM deliveries WHERE alert = ? AND kind = 'resolved'", (ended.id,)
        ).fetchall()
        if last["at"] is None or now - last["at"] >= RETURNS_S:
            return None
        return ended.id, [*ended.earlier, FindingInterval(ended.since, ended.resolved_at)][-MAX_INTERVALS:]

    def _ends(self, transition: Transition, row: sqlite3.Row, now: float) -> None:
        alerted = alerted_finding(transition.finding.report(), row["alert"], row["key"], "resolved", self._page)
        earlier = msgspec.json.decode(row["trouble"], type=AlertedFinding).earlier
        alerted = msgspec.structs.replace(alerted, earlier=earlier)
        identity = message_id(row["finding"], "resolved", transition.at_ns)
        if len(_recent_fires(row, now)) > FIRES:
            self._log_damped(identity, "resolved", transition.at_ns, alerted, now)
            self.database.execute(
                "UPDATE alerts SET held_until = ?, trouble = ?, finding = '' WHERE engine = ? AND code = ? AND key = ?",
                (now + CALM_S, msgspec.json.encode(alerted), *transition.finding.place),
            )
        else:
            self._close_alert(row, alerted, identity, transition.at_ns, now)

    def _close_alert(self, row: sqlite3.Row, alerted: AlertedFinding, identity: str, at_ns: int, now: float) -> None:
        self.database.execute(
            "UPDATE alerts SET alert = '', trouble = ?, held_until = NULL, unseen_since = NULL"
            " WHERE engine = ? AND code = ? AND key = ?",
            (msgspec.json.encode(alerted), row["engine"], row["code"], row["key"]),
        )
        message = self._message(identity, "resolved", at_ns, alerted)
        for name in self.receivers:
            begun = self.database.execute(
                "SELECT state FROM deliveries WHERE alert = ? AND receiver = ? AND kind = 'firing' ORDER BY sequence",
                (row["alert"], name),
            ).fetchall()
            if begun:
                sent = any(one["state"] != "silenced" for one in begun)
                self._enqueue(message, name, now, silenced=not sent)

    def _log_damped(self, identity: str, kind: MessageKind, at_ns: int, alerted: AlertedFinding, now: float) -> None:
        message = self._message(identity, kind, at_ns, alerted, flapping=True)
        for name in self.receivers:
            self.insert(message, name, "damped", now)
            self.ended[name, "damped"] += 1

    def _message(
        self,
        identity: str,
        kind: MessageKind,
        at_ns: int,
        alerted: AlertedFinding,
        repeat: int = 0,
        flapping: bool = False,
        before: AlertedFinding | None = None,
    ) -> Message:
        firing = self.database.execute(
            "SELECT DISTINCT code FROM alerts WHERE engine = ? AND alert != '' ORDER BY code", (alerted.engine,)
        ).fetchall()
        codes = [row["code"] for row in firing]
        changes = alerted.gist.differences(before.gist) if before is not None else []
        was = before.severity if before is not None and changes else None
        return Message(identity, kind, timestamp(at_ns) or "", alerted, codes, repeat, flapping, changes, was)

    def _enqueue(self, message: Message, receiver: str, now: float, silenced: bool | None = None) -> None:
        if silenced is None:
            silenced = message.kind != "resolved" and self.is_silenced(message.finding, now)
        state: DeliveryState = "silenced" if silenced else "disabled" if self.is_disabled(receiver) else "pending"
        self.insert(message, receiver, state, now)

    def stop_watching(self, engines: Iterable[str], now: float) -> None:
        """Expect no more of these engines: an alert not seen again for `look_again_s` closes and gives the reason."""
        with self.writing() as database:
            database.executemany(
                "UPDATE alerts SET unseen_since = ? WHERE engine = ? AND alert != '' AND held_until IS NULL"
                " AND unseen_since IS NULL",
                [(now, engine) for engine in engines],
            )

    def hand_over(self, engines: Iterable[str]) -> None:
        """Close the alerts of these engines without a message: another agent watches them, and alerts for them."""
        with self.writing() as database:
            database.executemany(
                "UPDATE alerts SET alert = '', held_until = NULL, unseen_since = NULL WHERE engine = ?",
                [(engine,) for engine in engines],
            )

    def tick(self, now: float) -> None:
        """Send the notifications that are due by the clock alone: ends that were held back, alerts not seen again, the
        ends of silences, changes, and reminders. At most once a second, however often it is called.
        """
        with self.lock:
            if abs(now - self._ticked) < 1.0:
                return
            self._ticked = now
        with self.writing() as database:
            self._end_what_is_over(database, now)
            database.execute("DELETE FROM silences WHERE until <= ?", (now,))
            for row in database.execute("SELECT * FROM alerts WHERE alert != ''").fetchall():
                alerted = msgspec.json.decode(row["trouble"], type=AlertedFinding)
                if not self.is_silenced(alerted, now):
                    database.execute(
                        "UPDATE deliveries SET state = 'pending', due = ? WHERE alert = ? AND kind != 'resolved'"
                        " AND state = 'silenced'",
                        (now, row["alert"]),
                    )
                if row["held_until"] is None and row["unseen_since"] is None:
                    for receiver in self.receivers.values():
                        self._remind(receiver, row["alert"], alerted, now)

    def _end_what_is_over(self, database: sqlite3.Connection, now: float) -> None:
        over = database.execute(
            "SELECT * FROM alerts WHERE alert != '' AND (held_until <= ? OR unseen_since <= ?)",
            (now, now - self._look_again_s),
        ).fetchall()
        at_ns = round(now * 1e9)
        for row in over:
            alerted = msgspec.json.decode(row["trouble"], type=AlertedFinding)
            if alerted.state != "resolved":
                since = timestamp(round((row["unseen_since"] or now) * 1e9))
                explanation = (
                    f"Not seen since {since}, when kvscope restarted or stopped watching {alerted.engine}. This does"
                    f" not show that it is resolved. Before that: {alerted.explanation}"
                )
                alerted = msgspec.structs.replace(
                    alerted, state="resolved", resolved_at=timestamp(at_ns), explanation=explanation
                )
            self._close_alert(row, alerted, message_id(row["alert"], "over", at_ns), at_ns, now)

    def _remind(self, receiver: Receiver, alert: str, alerted: AlertedFinding, now: float) -> None:
        """Send it again if it differs from what was sent last, or if that was long ago."""
        every_s = receiver.renew_s or self._repeat_s
        if self.is_disabled(receiver.name):
            return
        sent = self.database.execute(
            "SELECT state, created, repeat, message FROM deliveries WHERE alert = ? AND receiver = ?"
            " AND kind IN ('firing', 'changed') AND state != 'damped' ORDER BY sequence DESC LIMIT 1",
            (alert, receiver.name),
        ).fetchone()
        repeat, before, changed = 0, None, False
        if sent is not None and sent["state"] != "disabled":  # else it is new or back, and was not sent
            if sent["state"] in ("pending", "silenced") or now < sent["created"] + min(every_s or CHANGED_S, CHANGED_S):
                return
            before = msgspec.json.decode(sent["message"], type=Message).finding
            changed = bool(alerted.gist.differences(before.gist))
            if not changed and (not every_s or now < sent["created"] + every_s):
                return
            repeat = sent["repeat"] + (not changed)
        if receiver.renew_s:
            self.database.execute(
                "DELETE FROM deliveries WHERE alert = ? AND receiver = ? AND repeat > 0 AND state = 'delivered'",
                (alert, receiver.name),
            )
        at_ns = round(now * 1e9)
        kind: MessageKind = "changed" if changed else "firing"
        identity = message_id(alert, f"{kind} again {repeat} {receiver.name}", at_ns)
        message = self._message(identity, kind, at_ns, alerted, repeat, before=before)
        self._enqueue(message, receiver.name, now)

    # ---------------------------------------------------------------- what is shown of it

    def view(self, now: float) -> AlertsView:
        """Return the alerts for the API."""
        with self.lock:
            return AlertsView(
                receivers=[self._receiver_view(receiver, now) for receiver in self.receivers.values()],
                open=[_alert_view(row, now) for row in self.read("SELECT * FROM alerts WHERE alert != ''")],
                silences=[silence.view(number) for number, silence in self.silences(now).items()],
                deliveries=[
                    _delivery_view(row)
                    for row in self.read(
                        "SELECT * FROM deliveries ORDER BY sequence DESC LIMIT ?", MAX_SHOWN_DELIVERIES
                    )
                ],
            )

    def about(self, finding: str, now: float) -> NotificationsView:
        """Return the notifications of one finding. They may carry the id of an earlier finding that this one
        continues.
        """
        with self.lock:
            rows = self.read("SELECT * FROM alerts WHERE finding = ?", finding)
            alerted = msgspec.json.decode(rows[0]["trouble"], type=AlertedFinding) if rows else None
            alert = alerted.id if alerted is not None else finding
            deliveries = self.read(
                "SELECT * FROM deliveries WHERE alert = ? ORDER BY sequence DESC LIMIT ?", alert, MAX_SHOWN_DELIVERIES
            )
            return NotificationsView(
                receivers=list(self.receivers),
                deliveries=[_delivery_view(row) for row in deliveries],
                silences=[
                    silence.view(number)
                    for number, silence in self.silences(now).items()
                    if alerted is not None and silence.matches(alerted)
                ],
            )

    def figures(self, now: float) -> AlertFigures:
        """Return the numbers for /metrics."""
        with self.lock:
            (is_open,) = self.read("SELECT count(*) AS number FROM alerts WHERE alert != ''")
            return AlertFigures(
                receivers=[self._receiver_figures(name, now) for name in self.receivers],
                open=is_open["number"],
                silences=len(self.silences(now)),
            )

    def _receiver_figures(self, name: str, now: float) -> ReceiverFigures:
        (row,) = self.read(
            "SELECT count(*) AS pending, min(created) AS oldest FROM deliveries"
            " WHERE receiver = ? AND state = 'pending'",
            name,
        )
        return ReceiverFigures(
            name=name,
            disabled=self.is_disabled(name),
            pending=row["pending"],
            oldest_pending_s=max(0.0, now - row["oldest"]) if row["pending"] else 0.0,
            ended={state: self.ended[name, state] for state in ENDS},
            failed_tries=self.failed_tries[name],
        )

    def _receiver_view(self, receiver: Receiver, now: float) -> ReceiverView:
        (row,) = self.read(
            "SELECT *, (SELECT count(*) FROM deliveries WHERE receiver = name AND state = 'pending') AS pending"
            " FROM receivers WHERE name = ?",
            receiver.name,
        )
        paused = row["paused_until"] if row["paused_until"] > now else None
        return ReceiverView(
            receiver.name, receiver.url.host, row["pending"], _iso_time(paused), _iso_time(row["disabled"])
        )


def _recent_fires(row: sqlite3.Row, now: float) -> list[float]:
    """Return when an alert began to fire (wall seconds), as far back as it counts for flapping."""
    return [at for at in msgspec.json.decode(row["fires"], type=list[float]) if at > now - WINDOW_S]


def _alert_view(row: sqlite3.Row, now: float) -> AlertView:
    alerted = msgspec.json.decode(row["trouble"], type=AlertedFinding)
    return AlertView(
        alerted.id,
        alerted.engine,
        alerted.code,
        alerted.severity,
        alerted.since,
        len(_recent_fires(row, now)) > FIRES,
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
