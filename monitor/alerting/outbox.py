"""What is to be told, what was told, and which alerts are open: one SQLite database, a file if the service keeps data.

A message is a row for each receiver, written before it is sent and kept as the delivery log afterwards. A transition,
what follows from it and the rows that tell it are one transaction: a process that is killed at any moment has told, or
will tell, each transition at least once, with one id. All `now` are wall seconds.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.alerting import flapping
from kvscope.monitor.alerting.alert_schema import (
    ENDS,
    AlertFigures,
    AlertsView,
    AlertView,
    DeliveryState,
    DeliveryView,
    ReceiverFigures,
    ReceiverView,
)
from kvscope.monitor.alerting.message import Kind, Message, Trouble, message_id, trouble_of
from kvscope.monitor.alerting.receivers.receiver import Receiver
from kvscope.monitor.alerting.silences import Silence
from kvscope.monitor.findings import Place, Transition, severity_at_least
from kvscope.monitor.schema import NotificationsView
from kvscope.monitor.text import timestamp

KEPT: Final = 10_000
"""Messages of the delivery log that are over."""
SHOWN: Final = 200

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS alerts (
    engine TEXT NOT NULL,
    code TEXT NOT NULL,
    key TEXT NOT NULL,
    alert TEXT NOT NULL,
    finding TEXT NOT NULL,
    first_seen_ns INTEGER NOT NULL,
    trouble BLOB NOT NULL,
    fires BLOB NOT NULL,
    held_until REAL,
    unseen_since REAL,
    PRIMARY KEY (engine, code, key)
);
CREATE TABLE IF NOT EXISTS deliveries (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    receiver TEXT NOT NULL,
    alert TEXT NOT NULL,
    kind TEXT NOT NULL,
    repeat INTEGER NOT NULL,
    message BLOB NOT NULL,
    state TEXT NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    due REAL NOT NULL,
    ended REAL,
    answer TEXT NOT NULL DEFAULT '',
    UNIQUE (id, receiver)
);
CREATE INDEX IF NOT EXISTS deliveries_to_do ON deliveries (receiver, state, alert, sequence);
CREATE INDEX IF NOT EXISTS deliveries_of ON deliveries (alert, receiver);
CREATE TABLE IF NOT EXISTS receivers (name TEXT PRIMARY KEY, paused_until REAL NOT NULL DEFAULT 0, disabled REAL);
CREATE TABLE IF NOT EXISTS silences (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    silence BLOB NOT NULL,
    until REAL NOT NULL
);
"""
# alerts.alert is '' once it is closed: the row stays for `fires`, when it began to fire of late.


class Delivery(NamedTuple):
    """A message that is due at one receiver, and how often it was tried."""

    number: int
    message: Message
    tries: int


class Outbox:
    """The database at `path` (None: in memory) for these receivers. Thread-safe. Raises sqlite3.Error from all of it.

    `repeat_s`: how often it is told again that an alert still fires (0: never). `look_again_s`: how long after a start
    an open alert of an earlier life may be unseen before it is told to be resolved.
    """

    def __init__(
        self, path: Path | None, receivers: Sequence[Receiver], repeat_s: float, look_again_s: float, now: float
    ) -> None:
        self._receivers = {receiver.name: receiver for receiver in receivers}
        self._repeat_s = repeat_s
        self._look_again_s = look_again_s
        self._lock = threading.RLock()
        self._ticked = 0.0
        self._ended: Counter[tuple[str, DeliveryState]] = Counter()
        """How messages ended, by receiver, since the service was started: of the log only the latest are kept."""
        self._failed_tries: Counter[str] = Counter()
        self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.executescript(SCHEMA)
        with self._writing() as database:
            database.executemany(
                "INSERT OR IGNORE INTO receivers (name) VALUES (?)", [(name,) for name in self._receivers]
            )
            database.execute("UPDATE alerts SET unseen_since = ? WHERE alert != '' AND held_until IS NULL", (now,))
            for row in database.execute("SELECT DISTINCT receiver FROM deliveries WHERE state = 'pending'").fetchall():
                if row["receiver"] not in self._receivers:
                    database.execute(
                        "UPDATE deliveries SET state = 'given-up', ended = ?, answer = 'not a receiver any more'"
                        " WHERE receiver = ? AND state = 'pending'",
                        (now, row["receiver"]),
                    )

    def close(self) -> None:
        """Close the database; what is not told stays in it."""
        with self._lock:
            self._database.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.commit()
            except BaseException:
                self._database.rollback()
                raise

    def _read(self, sql: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            return self._database.execute(sql, values).fetchall()

    # ---------------------------------------------------------------- transitions in

    def put(self, transitions: Sequence[Transition], now: float) -> None:
        """Take transitions; those of findings that are warnings or worse are told. To be told twice changes nothing."""
        graver = [one for one in transitions if severity_at_least(one.finding.severity, "warning")]
        if not graver:
            return
        with self._writing() as database:
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
                (KEPT,),
            )

    def _fires(self, transition: Transition, row: sqlite3.Row | None, now: float) -> None:
        finding = transition.finding
        identity = message_id(finding.id, "firing", transition.at_ns)
        fires = flapping.recent(msgspec.json.decode(row["fires"], type=list[float]), now) if row is not None else []
        if row is not None and row["alert"]:
            trouble = trouble_of(finding.report(), row["alert"], row["key"], "firing")
            if row["finding"] != finding.id:
                self._log_damped(identity, "firing", transition.at_ns, trouble, now)
                fires.append(now)
            self._database.execute(
                "UPDATE alerts SET finding = ?, first_seen_ns = ?, trouble = ?, fires = ?, held_until = NULL,"
                " unseen_since = NULL WHERE engine = ? AND code = ? AND key = ?",
                (
                    finding.id,
                    finding.first_seen_ns,
                    msgspec.json.encode(trouble),
                    msgspec.json.encode(fires),
                    *finding.place,
                ),
            )
            return
        if self._database.execute("SELECT 1 FROM deliveries WHERE id = ?", (identity,)).fetchone():
            return  # told before, and over
        fires.append(now)
        trouble = trouble_of(finding.report(), finding.id, finding.judgement.key, "firing")
        self._database.execute(
            "INSERT OR REPLACE INTO alerts (engine, code, key, alert, finding, first_seen_ns, trouble, fires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *finding.place,
                finding.id,
                finding.id,
                finding.first_seen_ns,
                msgspec.json.encode(trouble),
                msgspec.json.encode(fires),
            ),
        )
        flaps = flapping.is_flapping(fires, now)
        message = self._message(identity, "firing", transition.at_ns, trouble, flapping=flaps)
        for name in self._receivers:
            self._enqueue(message, name, now)

    def _ends(self, transition: Transition, row: sqlite3.Row, now: float) -> None:
        trouble = trouble_of(transition.finding.report(), row["alert"], row["key"], "resolved")
        identity = message_id(row["finding"], "resolved", transition.at_ns)
        if flapping.is_flapping(msgspec.json.decode(row["fires"], type=list[float]), now):
            self._log_damped(identity, "resolved", transition.at_ns, trouble, now)
            self._database.execute(
                "UPDATE alerts SET held_until = ?, trouble = ?, finding = '' WHERE engine = ? AND code = ? AND key = ?",
                (now + flapping.CALM_S, msgspec.json.encode(trouble), *transition.finding.place),
            )
        else:
            self._close_alert(row, trouble, identity, transition.at_ns, now)

    def _close_alert(self, row: sqlite3.Row, trouble: Trouble, identity: str, at_ns: int, now: float) -> None:
        self._database.execute(
            "UPDATE alerts SET alert = '', held_until = NULL, unseen_since = NULL"
            " WHERE engine = ? AND code = ? AND key = ?",
            (row["engine"], row["code"], row["key"]),
        )
        message = self._message(identity, "resolved", at_ns, trouble)
        for name in self._receivers:
            begun = self._database.execute(
                "SELECT state FROM deliveries WHERE alert = ? AND receiver = ? AND kind = 'firing' ORDER BY sequence",
                (row["alert"], name),
            ).fetchall()
            if begun:
                told = any(one["state"] != "silenced" for one in begun)
                self._enqueue(message, name, now, silenced=not told)

    def _log_damped(self, identity: str, kind: Kind, at_ns: int, trouble: Trouble, now: float) -> None:
        message = self._message(identity, kind, at_ns, trouble, flapping=True)
        for name in self._receivers:
            self._insert(message, name, "damped", now)
            self._ended[name, "damped"] += 1

    def _message(
        self, identity: str, kind: Kind, at_ns: int, trouble: Trouble, repeat: int = 0, flapping: bool = False
    ) -> Message:
        firing = self._database.execute(
            "SELECT DISTINCT code FROM alerts WHERE engine = ? AND alert != '' ORDER BY code", (trouble.engine,)
        ).fetchall()
        codes = [row["code"] for row in firing]
        return Message(identity, kind, timestamp(at_ns) or "", trouble, codes, repeat, flapping)

    def _enqueue(self, message: Message, receiver: str, now: float, silenced: bool | None = None) -> None:
        if silenced is None:
            silenced = message.kind == "firing" and self._silenced(message.trouble, now)
        state: DeliveryState = "silenced" if silenced else "disabled" if self._is_disabled(receiver) else "pending"
        self._insert(message, receiver, state, now)

    def _insert(self, message: Message, receiver: str, state: DeliveryState, now: float, answer: str = "") -> None:
        self._database.execute(
            "INSERT OR IGNORE INTO deliveries"
            " (id, receiver, alert, kind, repeat, message, state, tries, created, due, ended, answer)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message.id,
                receiver,
                message.trouble.id,
                message.kind,
                message.repeat,
                msgspec.json.encode(message),
                state,
                int(bool(answer)),
                now,
                now,
                None if state in ("pending", "silenced") else now,
                answer,
            ),
        )

    def known(self) -> dict[Place, int]:
        """When each open alert's finding was first seen (wall ns), so that it keeps its id over a restart."""
        rows = self._read("SELECT engine, code, key, first_seen_ns FROM alerts WHERE alert != '' AND finding != ''")
        return {(row["engine"], row["code"], row["key"]): row["first_seen_ns"] for row in rows}

    # ---------------------------------------------------------------- what time brings

    def tick(self, now: float) -> None:
        """Tell what is due by the clock alone: ends that were held back, what was not seen again, the ends of silences,
        and what still fires. At most once a second, however often it is called.
        """
        with self._lock:
            if abs(now - self._ticked) < 1.0:
                return
            self._ticked = now
        with self._writing() as database:
            self._end_what_is_over(database, now)
            database.execute("DELETE FROM silences WHERE until <= ?", (now,))
            for row in database.execute("SELECT * FROM alerts WHERE alert != ''").fetchall():
                trouble = msgspec.json.decode(row["trouble"], type=Trouble)
                if not self._silenced(trouble, now):
                    database.execute(
                        "UPDATE deliveries SET state = 'pending', due = ? WHERE alert = ? AND kind = 'firing'"
                        " AND state = 'silenced'",
                        (now, row["alert"]),
                    )
                if row["held_until"] is None and row["unseen_since"] is None:
                    for receiver in self._receivers.values():
                        self._remind(receiver, row["alert"], trouble, now)

    def _end_what_is_over(self, database: sqlite3.Connection, now: float) -> None:
        over = database.execute(
            "SELECT * FROM alerts WHERE alert != '' AND (held_until <= ? OR unseen_since <= ?)",
            (now, now - self._look_again_s),
        ).fetchall()
        at_ns = round(now * 1e9)
        for row in over:
            trouble = msgspec.json.decode(row["trouble"], type=Trouble)
            if trouble.state != "resolved":
                explanation = f"Not seen again since kvscope was started anew. Before that: {trouble.explanation}"
                trouble = msgspec.structs.replace(
                    trouble, state="resolved", resolved_at=timestamp(at_ns), explanation=explanation
                )
            self._close_alert(row, trouble, message_id(row["alert"], "over", at_ns), at_ns, now)

    def _remind(self, receiver: Receiver, alert: str, trouble: Trouble, now: float) -> None:
        every_s = receiver.renew_s or self._repeat_s
        if self._is_disabled(receiver.name):
            return
        told = self._database.execute(
            "SELECT state, created, repeat FROM deliveries WHERE alert = ? AND receiver = ? AND kind = 'firing'"
            " AND state != 'damped' ORDER BY sequence DESC LIMIT 1",
            (alert, receiver.name),
        ).fetchone()
        repeat = 0
        if told is not None and told["state"] != "disabled":  # else it is new, or there again: it has not been told
            if not every_s or told["state"] in ("pending", "silenced") or now < told["created"] + every_s:
                return
            repeat = told["repeat"] + 1
        if receiver.renew_s:
            self._database.execute(
                "DELETE FROM deliveries WHERE alert = ? AND receiver = ? AND repeat > 0 AND state = 'delivered'",
                (alert, receiver.name),
            )
        at_ns = round(now * 1e9)
        identity = message_id(alert, f"firing again {repeat} {receiver.name}", at_ns)
        self._enqueue(self._message(identity, "firing", at_ns, trouble, repeat), receiver.name, now)

    # ---------------------------------------------------------------- deliveries out

    def due(self, receiver: str, now: float) -> list[Delivery]:
        """What to try now, in order; of each alert the first message that is not told yet, and none after it."""
        rows = self._read(
            "SELECT sequence, message, tries FROM deliveries AS one"
            " WHERE receiver = ? AND state = 'pending' AND due <= ?"
            " AND NOT EXISTS (SELECT 1 FROM deliveries WHERE receiver = one.receiver AND state = 'pending'"
            " AND alert = one.alert AND sequence < one.sequence)"
            " AND ? >= (SELECT paused_until FROM receivers WHERE name = one.receiver) ORDER BY sequence LIMIT 100",
            receiver,
            now,
            now,
        )
        return [
            Delivery(row["sequence"], msgspec.json.decode(row["message"], type=Message), row["tries"]) for row in rows
        ]

    def next_due(self, receiver: str) -> float | None:
        """When something may be due there (wall seconds); None while nothing is to be told."""
        (row,) = self._read(
            "SELECT max(min(due), (SELECT paused_until FROM receivers WHERE name = ?)) AS at FROM deliveries"
            " WHERE receiver = ? AND state = 'pending'",
            receiver,
            receiver,
        )
        at: float | None = row["at"]
        return at

    def delivered(self, number: int, now: float, answer: str) -> None:
        """It was told."""
        self._end(number, "delivered", now, answer)

    def give_up(self, number: int, now: float, answer: str) -> None:
        """It will not be tried again; the log keeps it, and `replay` tries it anew."""
        self._end(number, "given-up", now, answer)

    def _end(self, number: int, state: DeliveryState, now: float, answer: str) -> None:
        with self._writing() as database:
            database.execute(
                "UPDATE deliveries SET state = ?, tries = tries + 1, ended = ?, answer = ? WHERE sequence = ?",
                (state, now, answer, number),
            )
            (row,) = self._read("SELECT receiver FROM deliveries WHERE sequence = ?", number)
            self._ended[row["receiver"], state] += 1

    def try_again(self, number: int, due: float, answer: str) -> None:
        """It is tried again at `due`."""
        with self._writing() as database:
            database.execute(
                "UPDATE deliveries SET tries = tries + 1, due = ?, answer = ? WHERE sequence = ?", (due, answer, number)
            )
            (row,) = self._read("SELECT receiver FROM deliveries WHERE sequence = ?", number)
            self._failed_tries[row["receiver"]] += 1

    def pause(self, receiver: str, until: float) -> None:
        """Send it nothing until then: it asked for that."""
        with self._writing() as database:
            database.execute("UPDATE receivers SET paused_until = ? WHERE name = ?", (until, receiver))

    def disable(self, receiver: str, now: float, answer: str) -> None:
        """Send it nothing any more: it said that it is gone."""
        with self._writing() as database:
            database.execute("UPDATE receivers SET disabled = ? WHERE name = ?", (now, receiver))
            ended = database.execute(
                "UPDATE deliveries SET state = 'disabled', ended = ?, answer = ?"
                " WHERE receiver = ? AND state = 'pending'",
                (now, answer, receiver),
            )
            self._ended[receiver, "disabled"] += ended.rowcount

    def _is_disabled(self, receiver: str) -> bool:
        (row,) = self._read("SELECT disabled FROM receivers WHERE name = ?", receiver)
        return row["disabled"] is not None

    def enable(self, receiver: str) -> None:
        """It is there again. What was not sent in between stays in the log, for `replay`."""
        with self._writing() as database:
            database.execute("UPDATE receivers SET disabled = NULL, paused_until = 0 WHERE name = ?", (receiver,))

    def log_test(self, message: Message, receiver: str, now: float, delivered: bool, answer: str) -> None:
        """A test, which was tried once, at once."""
        with self._writing():
            self._insert(message, receiver, "delivered" if delivered else "given-up", now, answer)

    def replay(self, number: int, now: float) -> bool:
        """Send a message of the log again, with its id; whether there is one, of a receiver that is there."""
        with self._writing() as database:
            row = database.execute(
                "SELECT receiver FROM deliveries JOIN receivers ON name = receiver"
                " WHERE sequence = ? AND kind != 'test' AND disabled IS NULL",
                (number,),
            ).fetchone()
            if row is None or row["receiver"] not in self._receivers:
                return False
            database.execute(
                "UPDATE deliveries SET state = 'pending', tries = 0, due = ?, ended = NULL WHERE sequence = ?",
                (now, number),
            )
            return True

    def pending(self) -> int:
        """Messages that are still to be told."""
        (row,) = self._read("SELECT count(*) AS number FROM deliveries WHERE state = 'pending'")
        count: int = row["number"]
        return count

    # ---------------------------------------------------------------- silences

    def silence(self, silence: Silence) -> int:
        """Keep a silence; its number."""
        with self._writing() as database:
            added = database.execute(
                "INSERT INTO silences (silence, until) VALUES (?, ?)", (msgspec.json.encode(silence), silence.until)
            )
            assert added.lastrowid is not None
            return added.lastrowid

    def unsilence(self, number: int) -> bool:
        """End a silence; whether there was one."""
        with self._writing() as database:
            return database.execute("DELETE FROM silences WHERE number = ?", (number,)).rowcount > 0

    def _silences(self, now: float) -> dict[int, Silence]:
        rows = self._read("SELECT number, silence FROM silences WHERE until > ? ORDER BY number", now)
        return {row["number"]: msgspec.json.decode(row["silence"], type=Silence) for row in rows}

    def _silenced(self, trouble: Trouble, now: float) -> bool:
        return any(silence.matches(trouble) for silence in self._silences(now).values())

    # ---------------------------------------------------------------- all of it

    def view(self, now: float) -> AlertsView:
        """As the API says it."""
        with self._lock:
            return AlertsView(
                receivers=[self._receiver_view(receiver, now) for receiver in self._receivers.values()],
                open=[_alert_view(row, now) for row in self._read("SELECT * FROM alerts WHERE alert != ''")],
                silences=[silence.view(number) for number, silence in self._silences(now).items()],
                deliveries=[
                    _delivery_view(row)
                    for row in self._read("SELECT * FROM deliveries ORDER BY sequence DESC LIMIT ?", SHOWN)
                ],
            )

    def about(self, finding: str, now: float) -> NotificationsView:
        """What was told of one finding. It may be told of under the id of one before it, which it goes on from."""
        with self._lock:
            rows = self._read("SELECT * FROM alerts WHERE finding = ?", finding)
            alert = rows[0]["alert"] or finding if rows else finding
            told = self._read("SELECT * FROM deliveries WHERE alert = ? ORDER BY sequence DESC LIMIT ?", alert, SHOWN)
            trouble = msgspec.json.decode(rows[0]["trouble"], type=Trouble) if rows else None
            return NotificationsView(
                receivers=list(self._receivers),
                deliveries=[_delivery_view(row) for row in told],
                silences=[
                    silence.view(number)
                    for number, silence in self._silences(now).items()
                    if trouble is not None and silence.matches(trouble)
                ],
            )

    def figures(self, now: float) -> AlertFigures:
        """As /metrics says it."""
        with self._lock:
            (is_open,) = self._read("SELECT count(*) AS number FROM alerts WHERE alert != ''")
            return AlertFigures(
                receivers=[self._receiver_figures(name, now) for name in self._receivers],
                open=is_open["number"],
                silences=len(self._silences(now)),
            )

    def _receiver_figures(self, name: str, now: float) -> ReceiverFigures:
        (row,) = self._read(
            "SELECT count(*) AS pending, min(created) AS oldest FROM deliveries"
            " WHERE receiver = ? AND state = 'pending'",
            name,
        )
        return ReceiverFigures(
            name=name,
            disabled=self._is_disabled(name),
            pending=row["pending"],
            oldest_pending_s=max(0.0, now - row["oldest"]) if row["pending"] else 0.0,
            ended={state: self._ended[name, state] for state in ENDS},
            failed_tries=self._failed_tries[name],
        )

    def _receiver_view(self, receiver: Receiver, now: float) -> ReceiverView:
        (row,) = self._read(
            "SELECT *, (SELECT count(*) FROM deliveries WHERE receiver = name AND state = 'pending') AS pending"
            " FROM receivers WHERE name = ?",
            receiver.name,
        )
        paused = row["paused_until"] if row["paused_until"] > now else None
        return ReceiverView(receiver.name, receiver.url.host, row["pending"], _at(paused), _at(row["disabled"]))


def _alert_view(row: sqlite3.Row, now: float) -> AlertView:
    trouble = msgspec.json.decode(row["trouble"], type=Trouble)
    flaps = flapping.is_flapping(msgspec.json.decode(row["fires"], type=list[float]), now)
    return AlertView(
        trouble.id, trouble.engine, trouble.code, trouble.severity, trouble.since, flaps, trouble.explanation
    )


def _delivery_view(row: sqlite3.Row) -> DeliveryView:
    trouble = msgspec.json.decode(row["message"], type=Message).trouble
    due = row["due"] if row["state"] == "pending" else None
    return DeliveryView(
        row["sequence"],
        row["id"],
        row["receiver"],
        row["kind"],
        row["alert"],
        trouble.engine,
        trouble.code,
        row["state"],
        row["tries"],
        _at(row["created"]) or "",
        _at(due),
        _at(row["ended"]),
        row["answer"],
    )


def _at(seconds: float | None) -> str | None:
    return timestamp(round((seconds or 0) * 1e9))
