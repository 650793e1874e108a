"""Histories of random labs with closed segments, and an archive of them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.history import segment_writer
from kvscope.monitor.history.archive_store import Archive
from kvscope.monitor.history.archiver import Archiver
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import ClosedSegment, closed_segments, directory_of
from tests.history.test_writer import ReceivedRecords


def kept(history: Path, lab: Lab, segment_bytes: int = 15_000, first: int = 0, last: int = 1 << 30) -> list[Path]:
    """The lab's frames from `first` to `last` as a history, all segments closed but the last; the closed ones."""
    usual, segment_writer.SEGMENT_BYTES = segment_writer.SEGMENT_BYTES, segment_bytes  # type: ignore[misc]
    try:
        received = ReceivedRecords(history, lab)
        received.receive(lab.frames[first:last])
        received.writer.stop(received.ledger)
    finally:
        segment_writer.SEGMENT_BYTES = usual  # type: ignore[misc]
    for path in received.ended:
        assert close(path, received.directory) is not None
    return [segment.path for segment in closed_of(history, lab)]


def closed_of(history: Path, lab: Lab) -> list[ClosedSegment]:
    return sorted(closed_segments(directory_of(history, lab.packer.engine)))


def main() -> None:
    """Archive HISTORY to URL, and be killed before the Nth request that writes: `python -m tests.history.archived`."""
    history, url, kill_at = sys.argv[1:]
    archive, requests = Archive(url, make=True), iter(range(1, 1 << 30))

    def killed_before(name: str) -> None:
        real = getattr(archive, name)

        def request(*arguments: object) -> None:
            if next(requests) == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)

        setattr(archive, name, request)

    killed_before("upload")
    killed_before("commit")
    Archiver(Path(history), archive).archive_all()


if __name__ == "__main__":
    main()
