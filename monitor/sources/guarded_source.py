"""A plug-in's source, contained: it runs on a thread of its own, and whatever it raises or however long it takes, the
reader goes on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from kvscope.monitor import plugins
from kvscope.monitor.events.samples import Record
from kvscope.monitor.events.wire import Frame, encode
from kvscope.monitor.sources.source import POLL_WAIT_S, Source, SourceOptions, SourceStatus

PLUGIN_HANG_S: Final = 10.0
"""A call of a plug-in that takes longer is reported as hanging."""
PLUGIN_RETRY_S: Final = 1.0
"""The pause after a call that raised."""
MAX_QUEUED: Final = 100
"""Polls whose records wait for the reader. After them the plug-in waits."""
PLUGIN_CLOSE_S: Final = 2.0


class GuardedSource(Source):
    """The source that `plugin` makes of `target`, made, opened and polled on the plug-in's thread."""

    def __init__(
        self,
        plugin: plugins.Plugin,
        target: str,
        options: SourceOptions,
        hang_s: float = PLUGIN_HANG_S,
        retry_s: float = PLUGIN_RETRY_S,
    ) -> None:
        self._plugin = plugin
        self._target = target
        self._hang_s = hang_s
        self._retry_s = retry_s
        self._queue: queue.Queue[Sequence[Record]] = queue.Queue(MAX_QUEUED)
        self._stopping = threading.Event()
        self._error = ""
        self._call = ""
        self._call_began_s = 0.0
        self._hang_reported = False
        self._records = 0
        self._engines: dict[str, None] = {}
        self._reported = SourceStatus(target=target, kind=plugin.name)
        self._ended = False
        self._options = options
        self._source: Source | None = None
        self.has_past = bool(getattr(plugin.target, "has_past", False))
        self.has_events = bool(getattr(plugin.target, "has_events", False))
        self.grows = bool(getattr(plugin.target, "grows", True))
        self._thread = threading.Thread(target=self._run, name=f"kvscope-plugin {plugin.name}", daemon=True)

    def open(self) -> None:
        """Begin to read."""
        if self._thread.ident is None:
            self._thread.start()

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return the records of one poll of the plug-in, if there are any within the time."""
        try:
            records = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            self._report_hang()
            return []
        self._records += len(records)
        self._engines |= dict.fromkeys(record.engine for record in records)
        return records

    def status(self) -> SourceStatus:
        """Report what the plug-in reports, and what is wrong with the plug-in itself."""
        hangs_s = self._hangs_s()
        error = self._error
        if hangs_s:
            error = f"the plug-in {self._plugin.distribution} has not returned from {self._call} for {hangs_s:.0f} s"
        reported = self._reported
        return msgspec.structs.replace(
            reported,
            target=self._target,
            kind=self._plugin.name,
            engines=tuple(dict.fromkeys((*reported.engines, *self._engines))),
            in_step=not error and (reported.in_step or self._records > 0),
            ended=self._ended and self._queue.empty(),
            error=error or reported.error,
        )

    def close(self) -> None:
        """Stop the plug-in. One that hangs is left behind."""
        self._stopping.set()
        while not self._queue.empty():  # a put that waits goes on
            self._queue.get_nowait()
        if self._thread.ident is not None:
            self._thread.join(PLUGIN_CLOSE_S)

    def payload_of(self, frame: Frame) -> bytes:
        """Return the frame, encoded again."""
        return encode(frame)

    # ---------------------------------------------------------------- the plug-in's thread

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._ended:
            try:
                records = self._poll_plugin()
                self._error = ""
            except Exception as error:
                self._error = f"the plug-in {self._plugin.distribution} failed: {plugins.error_text(error)}"
                plugins.report_failure(self._plugin, error)
                self._begin("")
                self._stopping.wait(self._retry_s)
                continue
            self._begin("")
            self._hand_over(records)
        if self._source is not None:
            self._begin("close")
            try:
                self._source.close()
            except Exception as error:
                plugins.report_failure(self._plugin, error)
        self._begin("")

    def _poll_plugin(self) -> list[Record]:
        if self._source is None:
            self._begin(self._plugin.name)
            source: Source = self._plugin.target(self._target, self._options)
            self._begin("open")
            source.open()
            self._source = source
        self._begin("poll")
        records = list(self._source.poll(POLL_WAIT_S))
        for record in records:
            if not isinstance(record, Record):
                raise TypeError(f"poll returned a {type(record).__name__}, which is not a record")
        self._begin("status")
        reported = self._source.status()
        if not isinstance(reported, SourceStatus):
            raise TypeError(f"status returned a {type(reported).__name__} instead of a SourceStatus")
        self._reported, self._ended = reported, reported.ended
        return records

    def _hand_over(self, records: Sequence[Record]) -> None:
        waits = bool(records)
        while waits and not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(records, timeout=POLL_WAIT_S)
                waits = False

    def _begin(self, call: str) -> None:
        self._call, self._call_began_s = call, time.monotonic()
        self._hang_reported = False

    def _hangs_s(self) -> float:
        seconds = time.monotonic() - self._call_began_s
        return seconds if self._call and seconds > self._hang_s else 0.0

    def _report_hang(self) -> None:
        if self._hangs_s() and not self._hang_reported:
            self._hang_reported = True
            plugins.report_failure(self._plugin, f"has not returned from {self._call} for {self._hang_s:g} s")
