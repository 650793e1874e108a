"""An SQLite database that a service keeps under --data, or in memory without one: private, and made again if deleted.

Thread-safe. All of it raises sqlite3.Error.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class KeptDatabase:
    """The database at `path` (None: in memory) with these `tables`, a script of CREATE … IF NOT EXISTS."""

    def __init__(self, path: Path | None, tables: str) -> None:
        self.lock = threading.RLock()
        self._path = path
        self.database = _opened_database(path)
        self._inode = _inode_of(path)
        self.database.executescript(tables)

    def close(self) -> None:
        """Close the database. Unsent data stays in it."""
        with self.lock:
            self.database.close()

    def is_deleted(self) -> bool:
        """Return whether the file was deleted or moved, so that a restart would lose what is in it."""
        return self._path is not None and _inode_of(self._path) != self._inode

    def write_again(self) -> None:
        """Make the file again, with its full contents. Raises OSError, too."""
        assert self._path is not None
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.lock:
            new = _opened_database(self._path)
            self.database.backup(new)
            self.database.close()
            self.database, self._inode = new, _inode_of(self._path)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it, or nothing."""
        with self.lock:
            self.database.execute("BEGIN IMMEDIATE")
            try:
                yield self.database
                self.database.commit()
            except BaseException:
                self.database.rollback()
                raise

    def read(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self.lock:
            return self.database.execute(sql, values).fetchall()


def _opened_database(path: Path | None) -> sqlite3.Connection:
    """Open the database at `path` (None: in memory). Its files are its owner's alone. Raises OSError, too."""
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)  # SQLite gives its -wal and -shm the same
    database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
    database.row_factory = sqlite3.Row
    database.execute("PRAGMA journal_mode=WAL")
    return database


def _inode_of(path: Path | None) -> int:
    """Return the number of the file at a path, or 0 if there is none."""
    try:
        return path.stat().st_ino if path is not None else 0
    except FileNotFoundError:
        return 0
