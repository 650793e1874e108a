"""A reader whose source raises or hangs: reported, and at work again once that is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvscope.monitor.events.samples import Record
from kvscope.monitor.events.wire import NewerVersion
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.publishing.publisher import Publisher
from kvscope.monitor.service.loop_watchdog import LoopWatchdog
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.source import POLL_WAIT_S
from tests.lab import Lab
from tests.publishing.test_stream import published

ENGINE = "lab@127.0.0.1:0/0"
WITHIN_S = 5.0
BACK_WITHIN_S = 10.0


class Ailing(LiveStream):
    """A real stream whose polls go wrong while `ailment` is set; what they had read is lost."""

    ailment: Callable[[], None] | None = None

    def poll(self, timeout_s: float = POLL_WAIT_S) -> list[Record]:  # type: ignore[override]
        records: list[Record] = [*super().poll(timeout_s)]
        if self.ailment is not None:
            self.ailment()
        return records


def raising(error: BaseException) -> Callable[[], None]:
    def ail() -> None:
        raise error

    return ail


AILMENTS: dict[str, Callable[[], None]] = {
    "division": raising(ZeroDivisionError("integer division or modulo by zero")),
    "recursion": raising(RecursionError("maximum recursion depth exceeded")),
    "overflow": raising(OverflowError("int too large to convert to float")),
    "value": raising(ValueError("99 is not a valid Stage")),
    "index": raising(IndexError("list index out of range")),
    "memory": raising(MemoryError()),
    "disk": raising(OSError(28, "No space left on device")),
    "socket": raising(zmq.ZMQError(11)),
    "version": raising(NewerVersion("version 9.0")),
    "decoding": raising(msgspec.DecodeError("damaged")),
}


def until(done: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


class Followed:
    def __init__(self, publisher: Publisher, lab: Lab) -> None:
        self.pipeline = Pipeline()
        self.source = Ailing(publisher.events_endpoint, publisher.replay_endpoint, known=self._next_of)
        self.reader = SourceReader(self.source, self.pipeline)
        self.watchdog = LoopWatchdog(self.pipeline, [self.reader], lambda: None)
        self.lab = lab

    def _next_of(self, engine: str, epoch: int) -> int:
        ledger = self.pipeline.fleet.engines.get(engine)
        return ledger.sequence + 1 if ledger is not None and ledger.ready and ledger.epoch == epoch else -1

    def work(self) -> None:
        self.lab.arrive(9)
        self.lab.step()

    def reported(self) -> bool:
        self.work()
        firing = {found.code for found in self.pipeline.findings("firing")}
        return bool("blind.reader-failed" in firing and self.reader.view().error and not self.reader.view().in_step)

    def healthy(self) -> bool:
        self.work()
        ledger = self.pipeline.fleet.engines.get(ENGINE)
        view = self.reader.view()
        in_step = ledger is not None and ledger.ready and view.in_step and not view.error
        return in_step and not self.pipeline.supervisor.failures()

    def resolved(self) -> bool:
        self.work()
        return "blind.reader-failed" not in {found.code for found in self.pipeline.findings("firing")}


@contextmanager
def followed(path: Path) -> Iterator[Followed]:
    lab = Lab(total=200, clock=time, pack=False)
    with published(lab, path, heartbeat_s=0.2) as publisher:
        each = Followed(publisher, lab)
        each.reader.start()
        each.watchdog.start()
        try:
            until(each.healthy, 10)
            yield each
        finally:
            each.source.ailment = None
            each.watchdog.stop()
            each.reader.stop()


@pytest.mark.parametrize("ailment", AILMENTS)
def test_a_reader_that_is_killed_is_reported_and_comes_back(tmp_path: Path, ailment: str) -> None:
    with followed(tmp_path) as each:
        each.source.ailment = AILMENTS[ailment]
        until(each.reported, WITHIN_S)
        each.source.ailment = None
        until(each.healthy, BACK_WITHIN_S)
        ledger = each.pipeline.fleet.engines[ENGINE]
        assert not ledger.anomalies
        assert ledger.state.counts_match(*each.lab.pool.counts()[:3]) or not ledger.uncertain_since_ns


def test_a_reader_that_hangs_is_reported_and_comes_back(tmp_path: Path) -> None:
    with followed(tmp_path) as each:
        hangs = [True]

        def hang() -> None:
            while hangs[0]:
                time.sleep(0.05)

        each.source.ailment = hang
        until(each.reported, WITHIN_S)
        hangs[0] = False
        each.source.ailment = None
        until(each.healthy, BACK_WITHIN_S)
        until(each.resolved, 20)


def test_what_follows_the_reading_may_fail_while_it_goes_on(tmp_path: Path) -> None:
    """A delivery that raises: the ledger goes on, and the finding names it."""
    lab = Lab(total=200, clock=time, pack=False)
    with published(lab, tmp_path, heartbeat_s=0.2) as publisher:
        pipeline = Pipeline()
        source = LiveStream(publisher.events_endpoint, publisher.replay_endpoint)
        reader = SourceReader(source, pipeline, after=raising(sqlite_is_full()))
        reader.start()
        try:
            until(lambda: ENGINE in pipeline.fleet.engines and pipeline.fleet.engines[ENGINE].ready, 10)
            until(lambda: pipeline.supervisor.failures(ENGINE), 10)
            before = pipeline.fleet.engines[ENGINE].sequence
            until(lambda: pipeline.fleet.engines[ENGINE].sequence > before + 3, 10)
            assert {failure.kind for failure in pipeline.supervisor.failures()} == {"delivery"}
            assert not reader.view().error
        finally:
            reader.stop()


def sqlite_is_full() -> Exception:
    return RuntimeError("database or disk is full")
