"""Watches the loops of the service: reports a reader that hangs, and notifies systemd that the service is alive."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvscope.monitor.events import limits
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.supervision import LATE_FACTOR

logger = logging.getLogger(__name__)

WATCH_EVERY_S: Final = 0.25


class LoopWatchdog(threading.Thread):
    """Watches the heartbeats of `readers` four times a second, and calls `checks`. `deliver` hands on what it finds."""

    def __init__(
        self,
        pipeline: Pipeline,
        readers: Iterable[SourceReader],
        deliver: Callable[[], None],
        monotonic_s: Callable[[], float] = time.monotonic,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(name="kvscope-watchdog", daemon=True)
        self._pipeline = pipeline
        self._readers = readers
        self._deliver = deliver
        self._checks = checks
        self._monotonic_s = monotonic_s
        self._gone_s: dict[str, float] = {}
        """Since when no source has an engine."""
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look until stopped."""
        notify_systemd("READY=1")
        while not self._stopping.wait(WATCH_EVERY_S):
            try:
                self.look()
            except Exception:
                logger.exception("the watchdog of the service goes on after an error")

    def look(self) -> None:
        """Look once."""
        for reader in self._readers:
            reader.report_if_late()
        for check in self._checks:
            check()
        if not self._pipeline.supervisor.late(LATE_FACTOR):
            notify_systemd("WATCHDOG=1")
        self._forget_gone()
        if self._pipeline.supervisor.failures():  # no reader may be left to hand it on
            self._deliver()

    def _forget_gone(self) -> None:
        """Let engines that no source has any more leave the ledger."""
        now_s = self._monotonic_s()
        named = {engine for reader in self._readers for engine in reader.engines()}
        for engine, ledger in list(self._pipeline.fleet.engines.items()):
            if engine in named:
                self._gone_s.pop(engine, None)
                continue
            allowed_s = limits.GONE_STREAM_S if ledger.has_stream else limits.GONE_S
            if now_s - self._gone_s.setdefault(engine, now_s) > allowed_s:
                del self._gone_s[engine]
                self._pipeline.forget(engine)
                logger.info("%s is gone: no source has had it for %d s", engine, allowed_s)

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping.set()
        if self.ident is not None:
            self.join()


def notify_systemd(state: str) -> None:
    """Send a state to systemd, where it runs the service as Type=notify."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("systemd cannot be notified: %s", error)
