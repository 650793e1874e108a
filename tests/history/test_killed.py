"""A service is killed at random moments and started again: what it has shown is kept, and kept once."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.journal import NotAJournal
from kvscope.monitor.contract.kinds import Kind, Stage
from kvscope.monitor.contract.wire import ADDED_BY_SOURCE, Batch, Frame
from kvscope.monitor.history.archiver import MARKER_FILE
from kvscope.monitor.history.history import History
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.history.sql_query import SqlSource
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.service import resumption
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.live_stream import EARLY_BATCHES, OBSERVE_NS, LiveStream
from kvscope.monitor.sources.recording import Recording
from tests.history.queried import tuples_of
from tests.history.recorded import ledger_state, worked, write
from tests.waiting import until

ENGINE = "lab@127.0.0.1:0/0"
KILLS = 2
MORE = 40
"""Batches that each life of the service keeps at least."""


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def kept(data: Path) -> list[Batch]:
    """The engine's own batches, as the history has them."""
    try:
        return [b for b in History(data / "history").batches(ENGINE, 0, 1 << 62) if b.sequence >= 0]
    except NotAJournal:
        return []


@pytest.mark.slow
def test_what_a_killed_service_has_heard_is_there(tmp_path: Path) -> None:
    rng = random.Random(7)
    events, journal, data = f"ipc://{tmp_path}/events", tmp_path / "journal", tmp_path / "data"
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", str(journal), "3") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        for _ in range(KILLS):
            before = len(kept(data))
            with process("tests.history.service_process", events, str(data)):
                until(lambda before=before: len(kept(data)) > before + MORE)  # type: ignore[misc]
                time.sleep(rng.random() / 5)
        batches = kept(data)
        service = Service(ServiceConfig(events=(), data=data))
        ledger = service.watch.fleet.engines[ENGINE]
        service.stop()
    # Whatever was missed between two lives of the service, the engine's ring still had.
    first, last = batches[0].sequence, batches[-1].sequence
    assert [batch.sequence for batch in batches] == list(range(first, last + 1))
    theirs = EngineLedger(ENGINE)
    for frame in Recording(journal):
        if frame.sequence <= last:
            theirs.apply(frame)
    history = History(data / "history")
    position = Position(batches[-1].epoch, last, 1 << 30)
    assert ledger_state(history.ledger_at_position(ENGINE, position)) == ledger_state(theirs)
    # A service that starts now has it at once, its points too, and tells and counts none of it again.
    assert ledger_state(ledger) == ledger_state(theirs)
    points = history.points(ENGINE, 0, 1 << 62, 1 << 30)
    assert [point for point in ledger.points if point.at_ns <= points[-1].at_ns] == points
    assert len({point.at_ns for point in points}) == len(points) > 3 * KILLS
    assert service.watch.take_transitions() == []
    assert service.watch.take_ended() == []


@contextmanager
def publishing(path: Path, **settings: int) -> Iterator[Publisher]:
    """An idle engine."""
    lab = Lab(total=120, clock=time, pack=False, engine=ENGINE)
    publisher = Publisher(
        lab.log,
        ENGINE,
        lab.vitals,
        events=f"ipc://{path}/events",
        replay=f"ipc://{path}/events-replay",
        interval_s=0.005,
        heartbeat_s=0.01,
        **settings,
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.mark.slow
@pytest.mark.parametrize("ring_bytes", [64 << 20, 1])
def test_an_engine_that_began_again_before_its_service_did_is_kept_from_its_beginning(
    tmp_path: Path, ring_bytes: int
) -> None:
    """What the engine's ring has no more is kept as lost."""
    history = tmp_path / "data" / "history"
    for _ in range(2):
        with publishing(tmp_path, ring_bytes=ring_bytes) as publisher:
            packer = publisher.packer
            until(lambda packer=packer: packer.next_sequence > 3 * EARLY_BATCHES)  # type: ignore[misc]
            began = packer.next_sequence
            service = Service(ServiceConfig(events=(publisher.events_endpoint,), data=tmp_path / "data"))
            service.start()
            until(lambda packer=packer, began=began: _is_kept(tmp_path / "data", packer.epoch, began))  # type: ignore[misc]
            service.stop()
    batches = [batch for batch in History(history).batches(ENGINE, 0, 1 << 62) if batch.epoch == packer.epoch]
    lost = [event.args for batch in batches for event in batch.events() if event.kind == Kind.LOST]
    sequences = [batch.sequence for batch in batches if batch.sequence >= 0]
    assert sequences == list(range(sequences[0], sequences[-1] + 1))
    if ring_bytes == 1:
        assert lost == [[0, sequences[0] - 1, Stage.TRANSPORT]]
    else:
        assert (lost, sequences[0]) == ([], 0)


def _is_kept(data: Path, epoch: int, sequence: int) -> bool:
    return any(batch.epoch == epoch and batch.sequence > sequence for batch in kept(data))


def test_time_does_not_pass_before_what_was_missed_has_come(tmp_path: Path) -> None:
    """Else an engine that worked on while nobody listened would seem to have stood still."""
    with publishing(tmp_path) as publisher:
        until(lambda: publisher.packer.next_sequence > 30)
        known = 5
        with closing(LiveStream(publisher.events_endpoint, known=lambda _engine, _epoch: known)) as stream:
            time.sleep(OBSERVE_NS / 1e9)  # so that it is time to say what time it is
            missed = publisher.packer.next_sequence
            frames: list[Frame] = []

            def told_the_time() -> bool:
                frames.extend(received.frame for received in stream.receive())
                return bool(_observed(frames))

            until(told_the_time)
    seen_before = [frame.sequence for frame in frames[: frames.index(_observed(frames)[0])]]
    assert seen_before == list(range(known, seen_before[-1] + 1))
    assert seen_before[-1] >= missed - 1


def _observed(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.sequence == ADDED_BY_SOURCE]


def test_an_engine_that_does_not_come_back_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "COME_BACK_NS", 0)
    monkeypatch.setattr(resumption, "SILENCE_EVERY_NS", 0)
    lab = worked(50, clock=time)
    write(directory_of(tmp_path / "history", lab.packer.engine), list(lab.frames))
    service = Service(ServiceConfig(events=(f"ipc://{tmp_path}/nobody",), data=tmp_path))
    (left,) = service.watch.engines()
    service.start()
    try:
        until(lambda: service.watch.engines()[0].last_seen_s_ago > left.last_seen_s_ago + 0.5)
    finally:
        service.stop()
    (seen,) = service.watch.engines()
    assert seen.step == left.step


@pytest.mark.slow
@pytest.mark.usefixtures("archive_runtime")
def test_a_killed_service_archives_each_batch_once(tmp_path: Path) -> None:
    """After each life what is archived may go from the local disk, but for the latest: disk and archive have it all."""
    rng = random.Random(11)
    events, journal, data = f"ipc://{tmp_path}/events", tmp_path / "journal", tmp_path / "data"
    target = tmp_path / "archive"
    seen = 0
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", str(journal), "3") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        for _ in range(3):
            with process("tests.history.archiving_process", events, str(data), str(target)):
                until(lambda seen=seen: len(list(target.glob("manifests/*/*/*.json"))) > seen + 2)  # type: ignore[misc]
                time.sleep(rng.random() / 5)
            # The latest stays: a service that has nothing of an engine does not know what it missed of it.
            for marker in sorted(data.glob(f"history/*/*/*/{MARKER_FILE}"))[:-1]:
                shutil.rmtree(marker.parent)
            seen = len(list(target.glob("manifests/*/*/*.json")))
    query = "SELECT sequence, count(*) AS events, max(event) + 1 AS last FROM events WHERE sequence >= 0 GROUP BY ALL"
    rows = sorted(tuples_of(query, SqlSource(data / "history", str(target))))
    stated = {frame.sequence: len(frame.runs) // 20 for frame in Recording(journal) if isinstance(frame, Batch)}
    assert [row[0] for row in rows] == list(range(rows[0][0], rows[-1][0] + 1))
    assert all(count == last == stated[sequence] for sequence, count, last in rows)
    assert len(rows) > 50
