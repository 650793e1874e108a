"""A reader whose source raises or hangs: reported, and at work again once that is over."""

from __future__ import annotations

import lzma
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.contract.wire import NewerVersion
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service import source_reader
from kvscope.monitor.service.loop_watchdog import LoopWatchdog
from kvscope.monitor.service.service import SCRAPE_TIMEOUT_S
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.sources.source import POLL_WAIT_S
from tests.probes.published import published
from tests.test_bounded_http import OK, server
from tests.waiting import until

ENGINE = "lab@127.0.0.1:0/0"


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
    "text": raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")),
    "deflate": raising(zlib.error("Error -3 while decompressing data")),
    "lzma": raising(lzma.LZMAError("Corrupt input data")),
}


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
            until(each.healthy)
            yield each
        finally:
            each.source.ailment = None
            each.watchdog.stop()
            each.reader.stop()


@pytest.mark.slow
@pytest.mark.parametrize("ailment", AILMENTS)
def test_a_reader_that_is_killed_is_reported_and_comes_back(tmp_path: Path, ailment: str) -> None:
    with followed(tmp_path) as each:
        each.source.ailment = AILMENTS[ailment]
        until(each.reported)
        each.source.ailment = None
        until(each.healthy)
        ledger = each.pipeline.fleet.engines[ENGINE]
        assert not ledger.anomalies
        assert ledger.state.counts_match(*each.lab.pool.counts()[:3]) or not ledger.uncertain_since_ns


@pytest.mark.slow
def test_a_reader_that_hangs_is_reported_and_comes_back(tmp_path: Path) -> None:
    with followed(tmp_path) as each:
        hangs = [True]

        def hang() -> None:
            while hangs[0]:
                time.sleep(0.05)

        each.source.ailment = hang
        until(each.reported)
        hangs[0] = False
        each.source.ailment = None
        until(each.healthy)
        until(each.resolved)


class Page:
    """A server's metrics page: an engine's, or a header that trickles for as long as `trickles` is set."""

    def __init__(self) -> None:
        self.body = page(rows("never-freed")[30]).encode()
        self.trickles = False
        self.began_s = 0.0

    def __call__(self, connection: socket.socket) -> None:
        if not self.trickles:
            connection.sendall(OK + f"Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body)
            return
        self.began_s = self.began_s or time.monotonic()
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while self.trickles:
            connection.sendall(b"x")
            time.sleep(0.1)


@pytest.mark.slow
def test_a_page_whose_header_trickles_is_reported_and_comes_back() -> None:
    """With the times of the service. The engine is not shown as serving meanwhile."""
    answer = Page()
    with server(answer) as url:
        pipeline = Pipeline()
        reader = SourceReader(MetricsPage(url, timeout_s=SCRAPE_TIMEOUT_S), pipeline)
        watchdog = LoopWatchdog(pipeline, [reader], lambda: None)
        reader.start()
        watchdog.start()

        def statuses() -> set[str]:
            return {view.status for view in pipeline.engines()}

        def is_reported() -> bool:
            firing = {found.code for found in pipeline.findings("firing")}
            return "blind.reader-failed" in firing and not reader.view().in_step and statuses() == {"unknown"}

        try:
            until(lambda: statuses() and "unknown" not in statuses())
            answer.trickles = True
            until(lambda: answer.began_s)
            until(is_reported)
            assert "did not answer within" in reader.view().error
            assert sum(pipeline.supervisor.totals().values()) <= 2
            answer.trickles = False
            until(lambda: reader.view().in_step and "unknown" not in statuses())
            assert not pipeline.supervisor.failures()
        finally:
            answer.trickles = False
            watchdog.stop()
            reader.stop()


def test_a_page_that_fails_again_and_again_is_counted_each_time_and_reported_once() -> None:
    with served(page(rows("never-freed")[30])) as running:
        pipeline = Pipeline()
        reader = SourceReader(MetricsPage(running.url, timeout_s=1.0, every_s=0.1), pipeline)
        reader.start()
        try:
            until(pipeline.engines)
            running.answer = 503
            until(lambda: sum(pipeline.supervisor.totals().values()) >= 3)
            firing = [found for found in pipeline.findings("firing") if found.code == "blind.reader-failed"]
            assert len(firing) == len(pipeline.engines())
            assert "503" in firing[0].explanation
            until(lambda: all(view.last_seen_s_ago > 0.3 for view in pipeline.engines()))
            running.answer = page(rows("never-freed")[31])
            until(lambda: all(not view.last_seen_s_ago for view in pipeline.engines()))
            assert 3 <= sum(pipeline.supervisor.totals().values()) <= reader.view().bad_frames
        finally:
            reader.stop()


def test_what_follows_the_reading_may_fail_while_it_goes_on(tmp_path: Path) -> None:
    """A delivery that raises: the ledger goes on, and the finding names it."""
    lab = Lab(total=200, clock=time, pack=False)
    with published(lab, tmp_path, heartbeat_s=0.2) as publisher:
        pipeline = Pipeline()
        source = LiveStream(publisher.events_endpoint, publisher.replay_endpoint)
        reader = SourceReader(source, pipeline, after=raising(sqlite_is_full()))
        reader.start()
        try:
            until(lambda: ENGINE in pipeline.fleet.engines and pipeline.fleet.engines[ENGINE].ready)
            until(lambda: pipeline.supervisor.failures(ENGINE))
            before = pipeline.fleet.engines[ENGINE].sequence
            until(lambda: pipeline.fleet.engines[ENGINE].sequence > before + 3)
            assert {failure.kind for failure in pipeline.supervisor.failures()} == {"delivery"}
            assert not reader.view().error
        finally:
            reader.stop()


def sqlite_is_full() -> Exception:
    return RuntimeError("database or disk is full")


@pytest.mark.parametrize(("empty_turn_s", "deliveries"), [(3_600.0, 1), (0.0, 3)])
def test_a_turn_without_records_delivers_again_only_after_a_while(
    empty_turn_s: float, deliveries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "EMPTY_TURN_S", empty_turn_s)
    delivered: list[int] = []
    quiet = LiveStream("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    reader = SourceReader(quiet, Pipeline(), after=lambda: delivered.append(1))
    for _ in range(3):
        reader._read_once()
    quiet.close()
    assert len(delivered) == deliveries


def test_a_record_is_delivered_in_the_turn_in_which_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_reader, "EMPTY_TURN_S", 3_600.0)
    with served(page(rows("never-freed")[0])) as server:
        delivered: list[int] = []
        source = MetricsPage(server.url, every_s=0.01)
        reader = SourceReader(source, Pipeline(), after=lambda: delivered.append(1))
        for _ in range(50):
            reader._read_once()
        source.close()
        assert source.scrapes > 1
        assert len(delivered) == source.scrapes
