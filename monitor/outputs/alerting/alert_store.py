"""The database of alerts: open alerts, messages for each receiver, silences. A file if the service keeps data.

A message is a row for each receiver, written before it is sent and kept as the delivery log afterwards. All `now` are
wall seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ...base.kept_database import KeptDatabase
from ...detectors.findings import Place
from ...questions.schema import DeliveryState
from .message import AlertedFinding, Message, Silence
from .receivers import Receiver

ALERT_TABLES: Final = """
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
# alerts.alert is '' once it is closed: the row stays for `fires`, when it began to fire recently.


class Delivery(NamedTuple):
    """A message that is due at one receiver, and how often it was tried."""

    number: int
    message: Message
    tries: int


class AlertStore(KeptDatabase):
    """The database at `path` (None: in memory) for these receivers. Thread-safe. All of it raises sqlite3.Error."""

    def __init__(self, path: Path | None, receivers: Sequence[Receiver], now: float) -> None:
        super().__init__(path, ALERT_TABLES)
        self.receivers: dict[str, Receiver] = {}
        self.ended: Counter[tuple[str, DeliveryState]] = Counter()
        """How messages ended, by receiver, since the service was started: of the log only the latest are kept."""
        self.failed_tries: Counter[str] = Counter()
        with self.writing() as database:
            database.execute("UPDATE alerts SET unseen_since = ? WHERE alert != '' AND held_until IS NULL", (now,))
        self.replace_receivers(receivers, now)

    def replace_receivers(self, receivers: Sequence[Receiver], now: float) -> None:
        """Keep messages for these from now on, and give up what waits for others. New ones get what still fires."""
        with self.writing() as database:
            self.receivers = {receiver.name: receiver for receiver in receivers}
            database.executemany(
                "INSERT OR IGNORE INTO receivers (name) VALUES (?)", [(name,) for name in self.receivers]
            )
            for row in database.execute("SELECT DISTINCT receiver FROM deliveries WHERE state = 'pending'").fetchall():
                if row["receiver"] not in self.receivers:
                    database.execute(
                        "UPDATE deliveries SET state = 'given-up', ended = ?, answer = 'not a receiver any more'"
                        " WHERE receiver = ? AND state = 'pending'",
                        (now, row["receiver"]),
                    )

    def insert(self, message: Message, receiver: str, state: DeliveryState, now: float, answer: str = "") -> None:
        """Keep a message for a receiver, unless it has that message already."""
        self.database.execute(
            "INSERT OR IGNORE INTO deliveries"
            " (id, receiver, alert, kind, repeat, message, state, tries, created, due, ended, answer)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                message.id,
                receiver,
                message.finding.id,
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
        rows = self.read("SELECT engine, code, key, first_seen_ns FROM alerts WHERE alert != '' AND finding != ''")
        return {(row["engine"], row["code"], row["key"]): row["first_seen_ns"] for row in rows}

    # ---------------------------------------------------------------- deliveries out

    def due(self, receiver: str, now: float) -> list[Delivery]:
        """Return the deliveries to try now, in order. An alert's messages go one by one, the oldest first."""
        rows = self.read(
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
        """Return when something may be due there (wall seconds), or None while nothing is."""
        (row,) = self.read(
            "SELECT max(min(due), (SELECT paused_until FROM receivers WHERE name = ?)) AS at FROM deliveries"
            " WHERE receiver = ? AND state = 'pending'",
            receiver,
            receiver,
        )
        at: float | None = row["at"]
        return at

    def delivered(self, number: int, now: float, answer: str) -> None:
        """Record a successful delivery."""
        self._end(number, "delivered", now, answer)

    def give_up(self, number: int, now: float, answer: str) -> None:
        """Stop trying it. The log keeps it, and `replay` tries it again."""
        self._end(number, "given-up", now, answer)

    def _end(self, number: int, state: DeliveryState, now: float, answer: str) -> None:
        with self.writing() as database:
            database.execute(
                "UPDATE deliveries SET state = ?, tries = tries + 1, ended = ?, answer = ? WHERE sequence = ?",
                (state, now, answer, number),
            )
            (row,) = self.read("SELECT receiver FROM deliveries WHERE sequence = ?", number)
            self.ended[row["receiver"], state] += 1

    def try_again(self, number: int, due: float, answer: str) -> None:
        """Schedule another attempt at `due`."""
        with self.writing() as database:
            database.execute(
                "UPDATE deliveries SET tries = tries + 1, due = ?, answer = ? WHERE sequence = ?", (due, answer, number)
            )
            (row,) = self.read("SELECT receiver FROM deliveries WHERE sequence = ?", number)
            self.failed_tries[row["receiver"]] += 1

    def pause(self, receiver: str, until: float) -> None:
        """Send it nothing until then: it asked for that."""
        with self.writing() as database:
            database.execute("UPDATE receivers SET paused_until = ? WHERE name = ?", (until, receiver))

    def disable(self, receiver: str, now: float, answer: str) -> None:
        """Stop sending to a receiver that answered that it is gone."""
        with self.writing() as database:
            database.execute("UPDATE receivers SET disabled = ? WHERE name = ?", (now, receiver))
            ended = database.execute(
                "UPDATE deliveries SET state = 'disabled', ended = ?, answer = ?"
                " WHERE receiver = ? AND state = 'pending'",
                (now, answer, receiver),
            )
            self.ended[receiver, "disabled"] += ended.rowcount

    def is_disabled(self, receiver: str) -> bool:
        """Whether a receiver has answered that it is gone."""
        (row,) = self.read("SELECT disabled FROM receivers WHERE name = ?", receiver)
        return row["disabled"] is not None

    def enable(self, receiver: str) -> None:
        """Send to a receiver again. Messages of the time in between remain in the log, for `replay`."""
        with self.writing() as database:
            database.execute("UPDATE receivers SET disabled = NULL, paused_until = 0 WHERE name = ?", (receiver,))

    def log_test(self, message: Message, receiver: str, now: float, delivered: bool, answer: str) -> None:
        """Log a test, which was tried once, immediately."""
        with self.writing():
            self.insert(message, receiver, "delivered" if delivered else "given-up", now, answer)

    def replay(self, number: int, now: float) -> bool:
        """Send a message of the log again, with its id. Return whether such a message of an existing receiver was
        found.
        """
        with self.writing() as database:
            row = database.execute(
                "SELECT receiver FROM deliveries JOIN receivers ON name = receiver"
                " WHERE sequence = ? AND kind != 'test' AND disabled IS NULL",
                (number,),
            ).fetchone()
            if row is None or row["receiver"] not in self.receivers:
                return False
            database.execute(
                "UPDATE deliveries SET state = 'pending', tries = 0, due = ?, ended = NULL WHERE sequence = ?",
                (now, number),
            )
            return True

    def assume_delivered(self, receiver: str, ids: Sequence[str], now: float) -> None:
        """Take messages as delivered just now: another service has sent them, and their reminders until now."""
        with self.writing() as database:
            database.executemany(
                "UPDATE deliveries SET state = 'delivered', created = ?, ended = ?, answer = 'sent by another hub'"
                " WHERE receiver = ? AND id = ? AND state = 'pending'",
                [(now, now, receiver, id) for id in ids],
            )

    def pending_ids(self, receiver: str) -> list[str]:
        """Return the ids of the messages that are still to be sent to a receiver."""
        rows = self.read("SELECT id FROM deliveries WHERE receiver = ? AND state IN ('pending', 'silenced')", receiver)
        return [row["id"] for row in rows]

    def pending(self) -> int:
        """Return the number of messages still to be sent."""
        (row,) = self.read("SELECT count(*) AS number FROM deliveries WHERE state = 'pending'")
        count: int = row["number"]
        return count

    # ---------------------------------------------------------------- silences

    def silence(self, silence: Silence) -> int:
        """Keep a silence and return its number."""
        with self.writing() as database:
            added = database.execute(
                "INSERT INTO silences (silence, until) VALUES (?, ?)", (msgspec.json.encode(silence), silence.until)
            )
            assert added.lastrowid is not None
            return added.lastrowid

    def unsilence(self, number: int) -> bool:
        """End a silence. Return whether it existed."""
        with self.writing() as database:
            return database.execute("DELETE FROM silences WHERE number = ?", (number,)).rowcount > 0

    def silences(self, now: float) -> dict[int, Silence]:
        """Return the silences in force, by number."""
        rows = self.read("SELECT number, silence FROM silences WHERE until > ? ORDER BY number", now)
        return {row["number"]: msgspec.json.decode(row["silence"], type=Silence) for row in rows}

    def is_silenced(self, alerted: AlertedFinding, now: float) -> bool:
        """Whether a silence in force matches."""
        return any(silence.matches(alerted) for silence in self.silences(now).values())
