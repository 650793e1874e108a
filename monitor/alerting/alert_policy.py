"""Which messages a finding's transitions and the clock cause: new alerts, ends, flapping, reminders.

A transition, what follows from it and the rows that report it are one transaction: a process that is killed at any
moment has sent, or will send, each transition at least once, with one id. All `now` are wall seconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvscope.monitor.alerting import flapping
from kvscope.monitor.alerting.alert_schema import DeliveryState
from kvscope.monitor.alerting.alert_store import AlertStore
from kvscope.monitor.alerting.message import AlertedFinding, Message, MessageKind, alerted_finding, message_id
from kvscope.monitor.alerting.receivers.receiver import Receiver
from kvscope.monitor.findings import Transition, severity_at_least
from kvscope.monitor.text import timestamp

DELIVERY_LOG_LENGTH: Final = 10_000
"""Messages of the delivery log that are over."""


class AlertPolicy:
    """Opens and closes the alerts of `store`, and queues messages for its receivers.

    `repeat_s`: how often an alert that still fires is sent again (0: never). `look_again_s`: how long after a start an
    open alert of an earlier run may be unseen before it is sent as resolved.
    """

    def __init__(self, store: AlertStore, repeat_s: float, look_again_s: float) -> None:
        self._store = store
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
        with self._store.writing() as database:
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
        fires = flapping.recent(msgspec.json.decode(row["fires"], type=list[float]), now) if row is not None else []
        if row is not None and row["alert"]:
            alerted = alerted_finding(finding.report(), row["alert"], row["key"], "firing")
            if row["finding"] != finding.id:
                self._log_damped(identity, "firing", transition.at_ns, alerted, now)
                fires.append(now)
            self._store.database.execute(
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
        if self._store.database.execute("SELECT 1 FROM deliveries WHERE id = ?", (identity,)).fetchone():
            return  # sent before, and over
        fires.append(now)
        alerted = alerted_finding(finding.report(), finding.id, finding.judgement.key, "firing")
        self._store.database.execute(
            "INSERT OR REPLACE INTO alerts (engine, code, key, alert, finding, first_seen_ns, trouble, fires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *finding.place,
                finding.id,
                finding.id,
                finding.first_seen_ns,
                msgspec.json.encode(alerted),
                msgspec.json.encode(fires),
            ),
        )
        flaps = flapping.is_flapping(fires, now)
        message = self._message(identity, "firing", transition.at_ns, alerted, flapping=flaps)
        for name in self._store.receivers:
            self._enqueue(message, name, now)

    def _ends(self, transition: Transition, row: sqlite3.Row, now: float) -> None:
        alerted = alerted_finding(transition.finding.report(), row["alert"], row["key"], "resolved")
        identity = message_id(row["finding"], "resolved", transition.at_ns)
        if flapping.is_flapping(msgspec.json.decode(row["fires"], type=list[float]), now):
            self._log_damped(identity, "resolved", transition.at_ns, alerted, now)
            self._store.database.execute(
                "UPDATE alerts SET held_until = ?, trouble = ?, finding = '' WHERE engine = ? AND code = ? AND key = ?",
                (now + flapping.CALM_S, msgspec.json.encode(alerted), *transition.finding.place),
            )
        else:
            self._close_alert(row, alerted, identity, transition.at_ns, now)

    def _close_alert(self, row: sqlite3.Row, alerted: AlertedFinding, identity: str, at_ns: int, now: float) -> None:
        self._store.database.execute(
            "UPDATE alerts SET alert = '', held_until = NULL, unseen_since = NULL"
            " WHERE engine = ? AND code = ? AND key = ?",
            (row["engine"], row["code"], row["key"]),
        )
        message = self._message(identity, "resolved", at_ns, alerted)
        for name in self._store.receivers:
            begun = self._store.database.execute(
                "SELECT state FROM deliveries WHERE alert = ? AND receiver = ? AND kind = 'firing' ORDER BY sequence",
                (row["alert"], name),
            ).fetchall()
            if begun:
                sent = any(one["state"] != "silenced" for one in begun)
                self._enqueue(message, name, now, silenced=not sent)

    def _log_damped(self, identity: str, kind: MessageKind, at_ns: int, alerted: AlertedFinding, now: float) -> None:
        message = self._message(identity, kind, at_ns, alerted, flapping=True)
        for name in self._store.receivers:
            self._store.insert(message, name, "damped", now)
            self._store.ended[name, "damped"] += 1

    def _message(
        self,
        identity: str,
        kind: MessageKind,
        at_ns: int,
        alerted: AlertedFinding,
        repeat: int = 0,
        flapping: bool = False,
    ) -> Message:
        firing = self._store.database.execute(
            "SELECT DISTINCT code FROM alerts WHERE engine = ? AND alert != '' ORDER BY code", (alerted.engine,)
        ).fetchall()
        codes = [row["code"] for row in firing]
        return Message(identity, kind, timestamp(at_ns) or "", alerted, codes, repeat, flapping)

    def _enqueue(self, message: Message, receiver: str, now: float, silenced: bool | None = None) -> None:
        if silenced is None:
            silenced = message.kind == "firing" and self._store.is_silenced(message.finding, now)
        state: DeliveryState = (
            "silenced" if silenced else "disabled" if self._store.is_disabled(receiver) else "pending"
        )
        self._store.insert(message, receiver, state, now)

    def stop_watching(self, engines: Iterable[str], now: float) -> None:
        """Expect no more of these engines: an alert not seen again for `look_again_s` closes and gives the reason."""
        with self._store.writing() as database:
            database.executemany(
                "UPDATE alerts SET unseen_since = ? WHERE engine = ? AND alert != '' AND held_until IS NULL"
                " AND unseen_since IS NULL",
                [(now, engine) for engine in engines],
            )

    def hand_over(self, engines: Iterable[str]) -> None:
        """Close the alerts of these engines without a message: another agent watches them, and alerts for them."""
        with self._store.writing() as database:
            database.executemany(
                "UPDATE alerts SET alert = '', held_until = NULL, unseen_since = NULL WHERE engine = ?",
                [(engine,) for engine in engines],
            )

    def tick(self, now: float) -> None:
        """Send the notifications that are due by the clock alone: ends that were held back, alerts not seen again, the
        ends of silences, and reminders. At most once a second, however often it is called.
        """
        with self._store.lock:
            if abs(now - self._ticked) < 1.0:
                return
            self._ticked = now
        with self._store.writing() as database:
            self._end_what_is_over(database, now)
            database.execute("DELETE FROM silences WHERE until <= ?", (now,))
            for row in database.execute("SELECT * FROM alerts WHERE alert != ''").fetchall():
                alerted = msgspec.json.decode(row["trouble"], type=AlertedFinding)
                if not self._store.is_silenced(alerted, now):
                    database.execute(
                        "UPDATE deliveries SET state = 'pending', due = ? WHERE alert = ? AND kind = 'firing'"
                        " AND state = 'silenced'",
                        (now, row["alert"]),
                    )
                if row["held_until"] is None and row["unseen_since"] is None:
                    for receiver in self._store.receivers.values():
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
        every_s = receiver.renew_s or self._repeat_s
        if self._store.is_disabled(receiver.name):
            return
        sent = self._store.database.execute(
            "SELECT state, created, repeat FROM deliveries WHERE alert = ? AND receiver = ? AND kind = 'firing'"
            " AND state != 'damped' ORDER BY sequence DESC LIMIT 1",
            (alert, receiver.name),
        ).fetchone()
        repeat = 0
        if sent is not None and sent["state"] != "disabled":  # else it is new or back, and was not sent
            if not every_s or sent["state"] in ("pending", "silenced") or now < sent["created"] + every_s:
                return
            repeat = sent["repeat"] + 1
        if receiver.renew_s:
            self._store.database.execute(
                "DELETE FROM deliveries WHERE alert = ? AND receiver = ? AND repeat > 0 AND state = 'delivered'",
                (alert, receiver.name),
            )
        at_ns = round(now * 1e9)
        identity = message_id(alert, f"firing again {repeat} {receiver.name}", at_ns)
        self._enqueue(self._message(identity, "firing", at_ns, alerted, repeat), receiver.name, now)
