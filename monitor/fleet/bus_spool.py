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

from ..base import limits
from ..base.kept_database import KeptDatabase
from .bus_messages import MESSAGE_KINDS, BusMessage, FindingMessage, TooLong, encode_message, engine_named_by
from .bus_subjects import BusKind, subject_of

logger = logging.getLogger(__name__)

SPOOL_TABLES: Final = """
CREATE TABLE IF NOT EXISTS waiting (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    engine TEXT NOT NULL,
    body BLOB NOT NULL,
    is_sure INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS waiting_to_send ON waiting (is_sure, sequence);
CREATE INDEX IF NOT EXISTS waiting_engines ON waiting (engine, is_sure);
CREATE INDEX IF NOT EXISTS waiting_in_order ON waiting (engine, sequence);
CREATE TABLE IF NOT EXISTS open_findings (finding TEXT PRIMARY KEY, engine TEXT NOT NULL);
"""
# waiting.is_sure is 0 for what was found while this agent could not know whether it still held the engine's lease.
# Messages about one engine reach the streams in their order.


class Spooled(NamedTuple):
    """A message that is to be sent."""

    number: int
    id: str
    kind: BusKind
    engine: str
    subject: str
    body: bytes


class BusSpool(KeptDatabase):
    """The spool at `path` (None: in memory) of an agent of a tenant. Thread-safe. All of it raises sqlite3.Error."""

    def __init__(self, path: Path | None, tenant: str, agent: str, most_bytes: int = limits.BUS_SPOOL_BYTES) -> None:
        super().__init__(path, SPOOL_TABLES)
        self.dropped: Counter[str] = Counter()
        """Messages given up, by kind."""
        self._tenant = tenant
        self._grades: dict[str, str] = {}
        """Severity and verdict of each open finding, as last put by this process."""
        self._agent = agent
        self._most_bytes = most_bytes
        self.messages = self.bytes = 0
        self._count()

    def _count(self) -> None:
        (row,) = self.read("SELECT count(*) AS messages, total(length(body)) AS bytes FROM waiting")
        self.messages, self.bytes = row["messages"], round(row["bytes"])

    def put(self, messages: Sequence[BusMessage], *, is_sure: bool = True) -> None:
        """Keep messages to send, in order. A message that is there already changes nothing. Beyond the bound the oldest
        points go first, then what else is oldest. A finding that is open on the bus fires there again only with another
        severity or verdict.
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
        grade = f"{transition.severity} {transition.judgement.verdict}"
        before = self._grades.pop(transition.id, grade)
        if transition.to == "resolved":
            self.database.execute("DELETE FROM open_findings WHERE finding = ?", (transition.id,))
            return True
        added = self.database.execute(
            "INSERT OR IGNORE INTO open_findings (finding, engine) VALUES (?, ?)",
            (transition.id, transition.judgement.engine),
        )
        self._grades[transition.id] = grade
        return added.rowcount > 0 or grade != before

    def _insert(self, message: BusMessage, is_sure: bool) -> None:
        kind, engine = MESSAGE_KINDS[type(message)], engine_named_by(message)
        try:
            body = encode_message(message)
        except TooLong as error:
            self.dropped[kind] += 1
            logger.error("a %s of %s is not sent: %s", kind, engine, error)
            return
        added = self.database.execute(
            "INSERT OR IGNORE INTO waiting (id, kind, engine, body, is_sure) VALUES (?, ?, ?, ?, ?)",
            (message.id, kind, engine, body, int(is_sure)),
        )
        if added.rowcount > 0:
            self.messages += 1
            self.bytes += len(body)

    def _drop_oldest(self) -> None:
        row = self.database.execute(
            "SELECT sequence, kind FROM waiting ORDER BY kind != 'point', sequence LIMIT 1"
        ).fetchone()
        self._delete(row["sequence"])
        self.dropped[row["kind"]] += 1

    def _delete(self, number: int) -> None:
        row = self.database.execute(
            "DELETE FROM waiting WHERE sequence = ? RETURNING length(body) AS bytes", (number,)
        ).fetchone()
        if row is not None:
            self.messages -= 1
            self.bytes -= row["bytes"]

    def adopt(self, finding: str, engine: str) -> None:
        """Record that a finding is open on the bus, by another agent's word."""
        with self.writing() as database:
            database.execute("INSERT OR IGNORE INTO open_findings (finding, engine) VALUES (?, ?)", (finding, engine))

    def batch(self, most: int) -> list[Spooled]:
        """Return the oldest messages that may be sent, one of each engine: a second one could overtake the first."""
        if not self.messages:
            return []
        rows = self.read(
            "SELECT * FROM waiting AS one WHERE is_sure = 1 AND NOT EXISTS (SELECT 1 FROM waiting WHERE"
            " engine = one.engine AND sequence < one.sequence) ORDER BY sequence LIMIT ?",
            most,
        )
        return [
            Spooled(
                row["sequence"],
                row["id"],
                cast(BusKind, row["kind"]),
                row["engine"],
                subject_of(
                    self._tenant, row["kind"], self._agent, row["engine"], "" if row["kind"] == "point" else row["id"]
                ),
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
        sql = f"SELECT 1 FROM waiting WHERE kind = 'finding' AND is_sure = 1 AND engine IN ({marks}) LIMIT 1"
        return bool(self.read(sql, *engines))

    def holds_back(self) -> bool:
        """Return whether any message waits until it is known who held its engine's lease."""
        return bool(self.read("SELECT 1 FROM waiting WHERE is_sure = 0 LIMIT 1"))

    def confirm(self, engine: str) -> None:
        """Release the findings held back about an engine: no other agent held its lease in the meantime."""
        with self.writing() as database:
            database.execute("UPDATE waiting SET is_sure = 1 WHERE engine = ? AND is_sure = 0", (engine,))

    def doubt(self, engines: Iterable[str]) -> None:
        """Hold back what was found about engines: their leases ended before it could be sent."""
        with self.writing() as database:
            database.executemany(
                "UPDATE waiting SET is_sure = 0 WHERE kind = 'finding' AND engine = ?", [(each,) for each in engines]
            )

    def discard(self, engine: str) -> int:
        """Drop the findings about an engine from a time when another agent held its lease. Return the number of
        messages.
        """
        with self.writing() as database:
            rows = database.execute(
                "SELECT sequence, kind FROM waiting WHERE engine = ? AND is_sure = 0", (engine,)
            ).fetchall()
            for row in rows:
                self._delete(row["sequence"])
                self.dropped[row["kind"]] += 1
            database.execute("DELETE FROM open_findings WHERE engine = ?", (engine,))
            return len(rows)
