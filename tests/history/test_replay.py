"""A recording published again is the stream that it was, for who listens from its start and for who joins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, Run, batch_of
from kvscope.monitor.history.recorder import Replayer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main
from tests.history.recorded import folded, state_of, worked, write

FAST = 20.0


@contextmanager
def replayed(directory: Path, folder: Path, speed: float) -> Iterator[tuple[Replayer, threading.Event]]:
    """The recording, being published; the event ends it early, or tells that it has ended."""
    replayer = Replayer(Recording(directory), f"ipc://{folder}/events", speed=speed)
    ended, over = threading.Event(), threading.Event()

    def run() -> None:
        for _ in replayer.run():
            if ended.is_set():
                break
        over.set()
        while not ended.is_set():  # who is behind may still ask
            replayer.answer(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield replayer, over
    finally:
        ended.set()
        thread.join()
        replayer.close()


def listen(events: str, lab: Lab, until: int) -> tuple[EngineLedger, list[Batch]]:
    """What somebody who attaches hears, up to that batch."""
    ledger, received_before = EngineLedger(lab.packer.engine), []
    with closing(LiveStream(events)) as stream:
        while ledger.sequence < until:
            for received in stream.receive(0.05):
                ledger.apply(received.frame)
                if isinstance(received.frame, Batch) and received.frame.sequence >= 0:
                    received_before.append(received.frame)
    return ledger, received_before


def test_who_attaches_has_the_engines_books(tmp_path: Path) -> None:
    lab = worked(300)
    observed = batch_of(lab.packer.engine, lab.packer.epoch, [Run(Kind.OBSERVED, 0, -1, [1 << 60], [])])
    write(tmp_path / "run", [lab.frames[0], observed, *lab.frames[1:]])
    last = lab.frames[-1]
    with replayed(tmp_path / "run", tmp_path, FAST) as (replayer, over):
        ledger, received_before = listen(replayer.events_endpoint, lab, last.sequence)
        assert over.wait(20)
        late, _ = listen(replayer.events_endpoint, lab, last.sequence)
    expected = state_of(folded(list(lab.frames), last.wall_ns))
    assert state_of(ledger) == state_of(late) == expected
    assert not ledger.losses
    assert replayer.published == len(lab.frames)
    # It is as if it were now, and as fast as was asked for.
    moved_ns = received_before[0].epoch - lab.packer.epoch
    before = {frame.sequence: frame for frame in lab.frames}
    for batch in received_before:
        assert batch.epoch == received_before[0].epoch
        since_start_ns = before[batch.sequence].wall_ns - lab.frames[0].wall_ns
        assert batch.wall_ns - lab.frames[0].wall_ns - moved_ns == round(since_start_ns / FAST)


def test_batches_that_the_recording_lacks_are_lost_to_who_listens(tmp_path: Path) -> None:
    lab = worked(200)
    write(tmp_path / "run", [*lab.frames[:80], *lab.frames[83:]])
    with replayed(tmp_path / "run", tmp_path, FAST) as (replayer, over):
        ledger, _ = listen(replayer.events_endpoint, lab, lab.frames[-1].sequence)
        assert over.wait(20)
    assert sum(loss.batches for loss in ledger.losses) >= 3


def test_a_bundle_is_replayed_as_the_recording_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = worked(40)
    write(tmp_path / "run", list(lab.frames))
    assert main(["bundle", str(tmp_path / "run"), str(tmp_path / "run.zip")]) == 0
    arguments = ["--events", f"ipc://{tmp_path}/events", "--speed", "100000"]
    printed = []
    for recording in ("run", "run.zip"):
        capsys.readouterr()
        assert main(["replay", str(tmp_path / recording), *arguments]) == 0
        printed.append(capsys.readouterr().err.splitlines()[-1].partition(" batches of ")[0])
    assert printed[0] == printed[1] != "0"


def test_what_cannot_be_replayed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", list(worked(5).frames))
    for arguments, says in (
        ([str(tmp_path / "nothing")], "no such file"),
        (["tests/data/seed-000.log"], "is not a recording"),
        ([str(tmp_path)], "is not a recording"),
        ([str(tmp_path / "run"), "--events", "tcp://0.0.0.0:5757"], "other machines"),
        ([str(tmp_path / "run"), "--events", f"ipc://{tmp_path}/no/such"], "cannot bind"),
    ):
        assert main(["replay", *arguments]) == 2
        assert says in capsys.readouterr().err
    for speed in ("0", "slowly"):
        with pytest.raises(SystemExit, match="2"):
            main(["replay", str(tmp_path / "run"), "--speed", speed])
        assert f"{speed} is not a speed" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "run"), "--events", f"ipc://{tmp_path}/events", "--speed", "100"]) == 0
    assert "the recording is over" in capsys.readouterr().err
