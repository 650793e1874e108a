"""Messages that wait on this machine until a stream has acknowledged them: a file under --data, or memory without it.

A message is written here before it is sent, in the transaction that records which findings are open on the bus, and
deleted once the stream has it. So a killed service sends each transition at least once, with one id, and the stream
takes each id once.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from kvscope.monitor.bus.bus_messages import (
    AnnotationMessage,
    BusMessage,
    FindingMessage,
    PointMessage,
    TooLong,
    encode_message,
)
from kvscope.monitor.bus.bus_subjects import BusKind, subject_of
from kvscope.monitor.events import limits
from kvscope.monitor.kept_database import KeptDatabase

logger = logging.getLogger(__name__)

SPOOL_TABLES: Final = """
CREATE TABLE IF NOT EXISTS spool (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    engine TEXT NOT NULL,
    subject TEXT NOT NULL,
    body BLOB NOT NULL,
    is_sure INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS spool_to_send ON spool (is_sure, sequence);
CREATE INDEX IF NOT EXISTS spool_engines ON spool (engine, is_sure);
CREATE TABLE IF NOT EXISTS open_findings (finding TEXT PRIMARY KEY, engine TEXT NOT NULL);
"""
# spool.is_sure is 0 for what was found while this agent could not know whether it still held the engine's lease.


class Spooled(NamedTuple):
    """A message that is to be sent."""

    number: int
    id: str
    kind: BusKind
    engine: str
    subject: str
    body: bytes


class BusSpool(KeptDatabase):
    """The spool at `path` (None: in memory) of a tenant. Thread-safe. All of it raises sqlite3.Error."""

    def __init__(self, path: Path | None, tenant: str, most_bytes: int = limits.BUS_SPOOL_BYTES) -> None:
        super().__init__(path, SPOOL_TABLES)
        self.dropped: Counter[str] = Counter()
        """Messages given up, by kind."""
        self._tenant = tenant
        self._most_bytes = most_bytes
        self.messages = self.bytes = 0
        self._count()

    def _count(self) -> None:
        (row,) = self.read("SELECT count(*) AS messages, total(length(body)) AS bytes FROM spool")
        self.messages, self.bytes = row["messages"], round(row["bytes"])

    def put(self, messages: Sequence[BusMessage], *, is_sure: bool = True) -> None:
        """Keep messages to send, in order. A message that is there already changes nothing. Beyond the bound the oldest
        points go first, then what else is oldest. A finding that is open on the bus does not fire there again.
        """
        try:
            with self.writing():
                for message in messages:
                    if not isinstance(message, FindingMessage) or self._is_new(message):
                        self._insert(message, is_sure)
                while self.bytes > self._most_bytes and self.messages:
                    self._drop_oldest()
        except sqlite3.Error:
            self._count()  # nothing of it was kept
            raise

    def _is_new(self, message: FindingMessage) -> bool:
        transition = message.transition
        if transition.to == "resolved":
            self.database.execute("DELETE FROM open_findings WHERE finding = ?", (transition.id,))
            return True
        added = self.database.execute(
            "INSERT OR IGNORE INTO open_findings (finding, engine) VALUES (?, ?)",
            (transition.id, transition.judgement.engine),
        )
        return added.rowcount > 0

    def _insert(self, message: BusMessage, is_sure: bool) -> None:
        kind, engine, each = _place_of(message)
        try:
            body = encode_message(message)
        except TooLong as error:
            self.dropped[kind] += 1
            logger.error("a %s of %s is not sent: %s", kind, engine, error)
            return
        subject = subject_of(self._tenant, kind, engine, message.id if each else "")
        added = self.database.execute(
            "INSERT OR IGNORE INTO spool (id, kind, engine, subject, body, is_sure) VALUES (?, ?, ?, ?, ?, ?)",
            (message.id, kind, engine, subject, body, int(is_sure)),
        )
        if added.rowcount > 0:
            self.messages += 1
            self.bytes += len(body)

    def _drop_oldest(self) -> None:
        row = self.database.execute(
            "SELECT sequence, kind FROM spool ORDER BY kind != 'point', sequence LIMIT 1"
        ).fetchone()
        self._delete(row["sequence"])
        self.dropped[row["kind"]] += 1

    def _delete(self, number: int) -> None:
        row = self.database.execute(
            "DELETE FROM spool WHERE sequence = ? RETURNING length(body) AS bytes", (number,)
        ).fetchone()
        if row is not None:
            self.messages -= 1
            self.bytes -= row["bytes"]

    def adopt(self, finding: str, engine: str) -> None:
        """Record that a finding is open on the bus, by another agent's word."""
        with self.writing() as database:
            database.execute("INSERT OR IGNORE INTO open_findings (finding, engine) VALUES (?, ?)", (finding, engine))

    def batch(self, most: int) -> list[Spooled]:
        """Return the oldest messages that may be sent."""
        if not self.messages:
            return []
        rows = self.read("SELECT * FROM spool WHERE is_sure = 1 ORDER BY sequence LIMIT ?", most)
        return [
            Spooled(
                row["sequence"],
                row["id"],
                cast(BusKind, row["kind"]),
                row["engine"],
                row["subject"],
                row["body"],
            )
            for row in rows
        ]

    def sent(self, numbers: Sequence[int]) -> None:
        """Delete what the stream has acknowledged."""
        with self.writing():
            for number in numbers:
                self._delete(number)

    def holds_findings(self, engines: Sequence[str]) -> bool:
        """Return whether transitions of any of these engines wait to be sent."""
        marks = ", ".join("?" * len(engines))
        sql = f"SELECT 1 FROM spool WHERE kind = 'finding' AND is_sure = 1 AND engine IN ({marks}) LIMIT 1"
        return bool(self.read(sql, *engines))

    def holds_back(self) -> bool:
        """Return whether any message waits until it is known who held its engine's lease."""
        return bool(self.read("SELECT 1 FROM spool WHERE is_sure = 0 LIMIT 1"))

    def confirm(self, engine: str) -> None:
        """Let what was found about an engine be sent: no other agent held its lease meanwhile."""
        with self.writing() as database:
            database.execute("UPDATE spool SET is_sure = 1 WHERE engine = ? AND is_sure = 0", (engine,))

    def doubt(self, engines: Iterable[str]) -> None:
        """Hold back what was found about engines: their leases ended before it could be sent."""
        with self.writing() as database:
            database.executemany(
                "UPDATE spool SET is_sure = 0 WHERE kind = 'finding' AND engine = ?", [(each,) for each in engines]
            )

    def discard(self, engine: str) -> int:
        """Drop the findings about an engine from a time when another agent held its lease. Return the number of
        messages.
        """
        with self.writing() as database:
            rows = database.execute(
                "SELECT sequence, kind FROM spool WHERE engine = ? AND is_sure = 0", (engine,)
            ).fetchall()
            for row in rows:
                self._delete(row["sequence"])
                self.dropped[row["kind"]] += 1
            database.execute("DELETE FROM open_findings WHERE engine = ?", (engine,))
            return len(rows)


def _place_of(message: BusMessage) -> tuple[BusKind, str, bool]:
    """Return the kind of a message, its engine, and whether the stream keeps each one under a subject of its own."""
    match message:
        case PointMessage():
            return "point", message.engine.engine, False
        case FindingMessage():
            return "finding", message.transition.judgement.engine, True
        case AnnotationMessage():
            return "annotation", message.engine, True
