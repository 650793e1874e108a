"""Several recordings together. Two of them may be of one engine, so each is under a name of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvscope.monitor.history.history import History
from kvscope.monitor.history.segment_files import HistorySegment, history_segments

BETWEEN: Final = ": "
"""A recording's name and its engine's. Ranks of one server are known by the engine's, so it stands last."""


class Recordings(History):
    """The recordings in `directories`, at least one: the engine of each is here `DIRECTORY: ENGINE`.

    Raises NotAJournal where one is not a directory.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        super().__init__(directories[0])
        alike = len({directory.name for directory in directories}) < len(directories)
        self.named: dict[str, Path] = {}
        """The directories by the names of their engines here, in order."""
        for directory in directories:
            engine = next(iter(History(directory).engines()), "")
            self.named[f"{directory if alike else directory.name}{BETWEEN}{engine}"] = directory

    def engines(self) -> list[str]:
        """Whose past is kept, by name."""
        return sorted(self.named)

    def _segments(self, engine: str) -> list[HistorySegment]:
        return history_segments(self.named[engine]) if engine in self.named else []
