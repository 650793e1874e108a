"""The parts of the service, and the watchdog: it reports those that do not work, and notifies systemd."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from ..base import limits
from ..base.supervision import LATE_FACTOR, SupervisedThread, WorkerKind
from ..questions.pipeline import Pipeline
from .source_reader import SourceReader

logger = logging.getLogger(__name__)

WATCH_EVERY_S: Final = 0.25
LOOK_WITHIN_S: Final = 10.0


def _nothing() -> None:
    """Do nothing: a part need not start, or stop, or have a problem."""


class Part(NamedTuple):
    """A part of the service, which lists them all in the order in which they start.

    name, kind: under which a problem of it is reported. start, stop: each returns once it has. problem: what the
    watchdog asks it four times a second. It does what is due, and returns why the part does not work, if it does not.
    """

    name: str
    start: Callable[[], None] = _nothing
    stop: Callable[[], object] = _nothing
    problem: Callable[[], str | None] = _nothing
    kind: WorkerKind = "delivery"


def report_problems(pipeline: Pipeline, parts: Iterable[Part]) -> None:
    """Ask each part for its problem, and report those that are new or over. One thread only."""
    reported = {failure.worker: failure.error for failure in pipeline.supervisor.failures()}
    for part in parts:
        problem = part.problem()
        if not problem:
            pipeline.report_recovery(part.name)
        elif reported.get(part.name) != problem:
            pipeline.report_failure(part.name, part.kind, problem)


class LoopWatchdog:
    """Watches the heartbeats of `readers` and the problems of `parts`. `deliver` hands on what it finds."""

    def __init__(
        self,
        pipeline: Pipeline,
        readers: Iterable[SourceReader],
        deliver: Callable[[], None],
        monotonic_s: Callable[[], float] = time.monotonic,
        parts: Sequence[Part] = (),
    ) -> None:
        self._pipeline = pipeline
        self._readers = readers
        self._deliver = deliver
        self._parts = parts
        self._monotonic_s = monotonic_s
        self._gone_s: dict[str, float] = {}
        """Since when no source has an engine."""
        self._thread = SupervisedThread(
            "the watchdog", "delivery", self._turn, pipeline.supervisor, within_s=LOOK_WITHIN_S
        )
        self.stop = self._thread.stop

    def start(self) -> None:
        """Begin to look, and tell systemd that the service is ready."""
        notify_systemd("READY=1")
        self._thread.start()

    def _turn(self) -> float:
        self.look()
        return WATCH_EVERY_S

    def look(self) -> None:
        """Look once."""
        self._pipeline.supervisor.check()
        self._pipeline.judge_health()
        report_problems(self._pipeline, self._parts)
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
