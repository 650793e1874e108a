"""Several texts as one target, or one that is not a file: standard input, a directory of logs, a zip of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events.samples import Fact, Record, Sample
from kvscope.monitor.sources.log_file import NO_STATISTICS, read_log, read_prose
from kvscope.monitor.sources.log_inputs import MOST_TEXTS, LogInput
from kvscope.monitor.sources.source import POLL_WAIT_S, Source, SourceError, SourceStatus
from kvscope.monitor.sources.targets import TargetKind
from kvscope.monitor.text import counted

NAMED: Final = 5
"""How many of the texts the notes name."""


class LogTexts(Source):
    """The texts that `inputs` returns, each read by itself: their engines and line numbers stay apart."""

    has_past = True

    def __init__(self, target: str, inputs: Callable[[], Sequence[LogInput]]) -> None:
        self._target = target
        self._inputs = inputs
        self._past: list[Record] | None = None
        self._ended = False
        self._is_log = False
        self._notes: list[str] = []
        self._engines: tuple[str, ...] = ()
        self._last_ns = 0

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what the texts report, all of it at once. Raises BadTarget if none can be read."""
        if self._ended:
            return []
        records = self._read()
        self._ended = True
        return records

    def status(self) -> SourceStatus:
        """Report how the texts are. The kind is known once they were read."""
        return SourceStatus(
            target=self._target,
            kind=TargetKind.PROSE if self._ended and not self._is_log else TargetKind.LOG,
            engines=self._engines,
            in_step=self._ended,
            ended=self._ended,
            last_seen_ns=self._last_ns,
            notes=tuple(self._notes),
        )

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last time that a line has. Raises SourceError if none has one."""
        times = [record.at_ns for record in self._read() if isinstance(record, Sample | Fact) and record.at_ns]
        if not times:
            raise SourceError(
                f"{self._target}: no line has a time, so that what was between --since and --until is not known"
            )
        return min(times), max(times)

    def explain_silence(self, seconds: float) -> str:
        """Explain what a log must have."""
        return f"{self._target}: {NO_STATISTICS}"

    def close(self) -> None:
        """Drop what was read."""
        self._past = None

    def _read(self) -> list[Record]:
        if self._past is not None:
            return self._past
        inputs = self._inputs()
        if not inputs:
            raise BadTarget(f"{self._target} has no text in it")
        records: list[Record] = []
        unread: list[str] = []
        for text in inputs[:MOST_TEXTS]:
            try:
                log, found = read_log(text)
            except BadTarget as error:
                unread.append(str(error))
                continue
            self._is_log = self._is_log or bool(log.stats_lines or log.described_states)
            records += found if log.stats_lines else read_prose(text, log, found)
            self._notes += log.notes if len(inputs) == 1 else [f"{text.name}: {note}" for note in log.notes]
        if len(unread) == len(inputs[:MOST_TEXTS]):
            raise BadTarget(f"{self._target}: {unread[0]}")
        self._notes += unread
        if len(inputs) > 1:
            names = ", ".join(text.name for text in inputs[:NAMED]) + (", …" if len(inputs) > NAMED else "")
            left_out = f"; {len(inputs) - MOST_TEXTS} more are left out" if len(inputs) > MOST_TEXTS else ""
            self._notes.insert(0, f"{counted(min(len(inputs), MOST_TEXTS), 'text')} were read: {names}{left_out}")
        self._past = records
        self._engines = tuple(dict.fromkeys(record.engine for record in records))
        self._last_ns = max((record.at_ns or 0 for record in records if isinstance(record, Sample)), default=0)
        return records
