"""A stream recorded is the stream: the same state, to the byte, and the same judgements."""

from __future__ import annotations

import gzip
import io
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, Frame, Keyframe, encode
from kvscope.monitor.history.recorder import record
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.keyframe_codec import dump_state
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.sources.source import SourceError
from kvscope.monitor.terminal.cli import main
from tests.detectors.scenes import ENGINE, finished_held
from tests.state_dump import comparable
from tests.waiting import PATIENCE_S


def quiet() -> Console:
    return Console(file=io.StringIO())


def ledger_of(frames: Recording | list[Frame]) -> EngineLedger:
    ledger = EngineLedger(ENGINE)
    for frame in frames:
        ledger.apply(frame)
    return ledger


def write(directory: Path, lab: Lab) -> None:
    """All that the lab ever sent, as a journal."""
    writer = journal.JournalWriter(directory, lab.packer.epoch)
    for frame in lab.frames:
        writer.append(encode(frame), frame.sequence)
    writer.close()


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background job, which these tests may run in, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(done: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C to the main thread, once it is done."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done() and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_recording_adds_up_to_the_engines_own_state(tmp_path: Path) -> None:
    """The engine has run, and runs while it is recorded; Ctrl-C comes when the recording has caught up with it."""
    lab = Lab(total=120, connector_share=0.5, clock=time, pack=False)
    publisher = Publisher(
        lab.log,
        ENGINE,
        lab.vitals,
        events=f"ipc://{tmp_path}/events",
        replay=f"ipc://{tmp_path}/events-replay",
        interval_s=0.005,
        heartbeat_s=3600,
    )
    directory = tmp_path / "recording"
    steps = 0

    def work_once() -> None:
        for _ in range(3):
            lab.arrive(lab.rng.randint(1, 40), max_tokens=lab.rng.randint(1, 20))
        lab.step()

    def work() -> bool:
        """Goes on until something was recorded, then 50 steps more; whether all of it is on disk."""
        nonlocal steps
        if steps < 50:
            work_once()
            steps += directory.is_dir() and bool(journal.journal_segments(directory))
            return False
        if lab.log.flushed:
            return False
        return ledger_of(Recording(directory)).sequence == publisher.packer.next_sequence - 1

    work_once()
    publisher.start()
    while lab.log.flushed:  # what is published before anybody listens is in the keyframe
        time.sleep(0.001)
    worker = interrupt_when(work)
    try:
        recorded = record(f"ipc://{tmp_path}/events", directory, seconds=None, timeout_s=10, console=quiet())
    finally:
        worker.join()
        publisher.close()
    frames = list(Recording(directory))
    first = next(frame for frame in frames if frame.sequence >= 0)  # after what the reader itself notes
    assert isinstance(first, Keyframe) or first.sequence == 0  # nothing before it is missing
    batches = [frame for frame in frames if isinstance(frame, Batch)]
    assert (recorded.engine, recorded.batches, recorded.others) == (ENGINE, len(batches), 0)
    assert recorded.batches > 10
    ledger = ledger_of(frames)
    assert not ledger.anomalies
    assert not ledger.losses
    theirs = publisher.packer.shadow
    # An audit that was under way when it joined does not count.
    assert theirs.audit_cycles - ledger.state.audit_cycles in (0, 1)
    theirs.audit_cycles = ledger.state.audit_cycles
    assert comparable(ledger.state) == comparable(theirs)
    # Read again, the same fold gives the same bytes.
    assert dump_state(ledger_of(Recording(directory)).state) == dump_state(ledger.state)


def test_a_recording_is_judged_as_the_stream_was(tmp_path: Path) -> None:
    """The same findings at the same moments, whether frames came one by one, all at once, or from a file."""
    scene = finished_held()
    scene.live(15)
    write(tmp_path, scene.lab)
    one_by_one, replayed = Pipeline(), Pipeline()
    for frame in scene.lab.frames:
        one_by_one.feed([frame])
    replayed.feed(Recording(tmp_path))
    reported = [(t.finding.id, t.to, t.at_ns) for t in one_by_one.take_transitions()]
    assert [(t.finding.id, t.to, t.at_ns) for t in replayed.take_transitions()] == reported
    assert "leak.finished-held" in {f.code for f in replayed.findings()}
    assert replayed.findings() == one_by_one.findings()
    assert replayed.engines() == one_by_one.engines()


def test_a_recording_ends_after_the_seconds_it_was_given(tmp_path: Path) -> None:
    lab = Lab(clock=time, pack=False)
    publisher = Publisher(
        lab.log, ENGINE, lab.vitals, events=f"ipc://{tmp_path}/events", replay=f"ipc://{tmp_path}/events-replay"
    )
    publisher.start()
    try:
        target = f"ipc://{tmp_path}/events"
        recorded = record(target, tmp_path / "r", seconds=0.2, timeout_s=10, console=quiet())
        assert recorded.engine == ENGINE
        assert ledger_of(Recording(tmp_path / "r")).ready
        with pytest.raises(BadTarget, match="holds a recording already"):
            record(target, tmp_path / "r", seconds=0.2, timeout_s=10, console=quiet())
        (tmp_path / "file").touch()
        with pytest.raises(BadTarget, match="cannot be written"):
            record(target, tmp_path / "file", seconds=0.2, timeout_s=10, console=quiet())
    finally:
        publisher.close()


def test_nobody_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no message arrived"):
        record(f"ipc://{tmp_path}/nobody", tmp_path / "r", seconds=1, timeout_s=0.2, console=quiet())
    assert main(["record", f"ipc://{tmp_path}/nobody", str(tmp_path / "r"), "--timeout", "0.2"]) == 3
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("target", "says"),
    [("http://127.0.0.1:1", "record what it reads"), ("tests/data/startup.log.gz", "kept already")],
)
def test_what_cannot_be_recorded(tmp_path: Path, target: str, says: str) -> None:
    with pytest.raises(BadTarget, match=says):
        record(target, tmp_path / "r", seconds=1, timeout_s=1, console=quiet())


def test_a_metrics_page_and_a_log_are_recorded_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples and facts are kept; doctor reads the recording and finds in it what it finds in the log."""
    with served(page(rows("never-freed")[-1])) as server:
        recorded = record(server.url, tmp_path / "page", seconds=0.3, timeout_s=10, console=quiet())
    assert (recorded.batches, recorded.others) == (0, len(list(Recording(tmp_path / "page").records())))
    (tmp_path / "server.log").write_bytes(gzip.decompress(Path("tests/data/never-freed.log.gz").read_bytes()))
    recorded = record(str(tmp_path / "server.log"), tmp_path / "log", seconds=0.3, timeout_s=10, console=quiet())
    assert recorded.others == len(list(Recording(tmp_path / "log").records()))
    codes = []
    for target in (tmp_path / "server.log", tmp_path / "log"):
        assert main(["doctor", str(target), "--format", "json"]) == 1
        report = json.loads(capsys.readouterr().out)
        codes.append({finding["code"] for finding in report["findings"]})
    assert codes[0] == codes[1]
    assert "leak.finished-held" in codes[0]


def test_a_directory_without_segments_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(journal.NotAJournal, match="holds no recording"):
        Recording(tmp_path)


def test_a_recording_cut_short_says_how_much_is_lost(tmp_path: Path) -> None:
    scene = finished_held()
    write(tmp_path, scene.lab)
    (segment,) = journal.journal_segments(tmp_path)
    last = len(encode(scene.lab.frames[-1])) + journal.RECORD.size
    data = segment.path.read_bytes()
    segment.path.write_bytes(data[:-7])
    recording = Recording(tmp_path)
    assert len(list(recording)) == len(scene.lab.frames) - 1
    assert recording.bytes_lost == last - 7
    assert recording.bad_frames == 0
