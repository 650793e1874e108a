"""A recording: a journal directory, or one segment of it. Brings the records that were kept, in order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ..contract import journal
from ..contract.samples import Record, decode_observed
from ..contract.wire import Batch, Frame, Keyframe, NewerVersion, NotAFrame, decode
from .source import POLL_WAIT_S, Source, SourceOptions, SourceStatus
from .support_bundle import EVENTS_FOLDER, NotABundle, unpack_events
from .targets import TargetKind

Answer = TypeVar("Answer")
AT_ONCE: Final = 200
"""Records that one poll brings, so that others have a turn."""


def _makes_superfluous(record: Record, keyframe: Keyframe, last: tuple[int, int] | None) -> bool:
    """Whether the record after a keyframe begins its epoch, or follows the last batch (epoch and sequence)."""
    if not isinstance(record, Batch) or record.epoch != keyframe.epoch:
        return False
    return record.sequence == 0 or (record.epoch, record.sequence - 1) == last


def record_ns(record: Record) -> int:
    """Return the wall time of a record in ns, 0 if it has none."""
    return (record.wall_ns if isinstance(record, Batch | Keyframe) else record.at_ns) or 0


class Recording(Source):
    """The records under `path`. Iterated, it yields the frames alone. Polled, it yields samples, facts and KV events
    too.

    `bad_frames` and `bytes_lost` count what could not be read. `engine` is the name to give the engine, empty for its
    own. Raises journal.NotAJournal if there is no recording at `path`.
    """

    has_past = True
    has_events = True
    grows = False

    def __init__(self, path: Path, engine: str = "") -> None:
        self.path = path
        self.bad_frames = 0
        self.bytes_lost = 0
        self.damage: list[str] = []
        """File and byte of each damaged record, behind which nothing in its file is read."""
        self.segments = journal.journal_segments(path) if path.is_dir() else []
        self._files = [segment.path for segment in self.segments] or [path]
        if path.is_dir() and not self.segments:
            raise journal.NotAJournal(
                f"{path} holds no recording: no file in it is named EPOCH-SEQUENCE{journal.SUFFIX}"
            )
        self._engine = engine
        self._engines: dict[str, None] = {}
        self._records: Iterator[Record] | None = None
        self._ended = False
        self._last_ns = 0

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return the next records. Raises NewerVersion and journal.NotAJournal."""
        if self._records is None:
            self._records = self.records()
        records = list(islice(self._records, AT_ONCE))
        self._ended = len(records) < AT_ONCE
        if self._engine:
            records = [msgspec.structs.replace(record, engine=self._engine) for record in records]
        self._engines |= dict.fromkeys(record.engine for record in records)
        self._last_ns = max([self._last_ns, *map(record_ns, records)])
        return records

    def status(self) -> SourceStatus:
        """Report how far it was read and what of it is damaged."""
        notes = []
        if self.bad_frames:
            notes.append(f"{self.bad_frames} records were not of the contract and were left out")
        notes += [f"it is damaged: {where}, and nothing behind that was read" for where in self.damage]
        if self.bytes_lost:
            notes.append(
                f"its last {self.bytes_lost} bytes are no whole record: the writer was stopped in mid-write, or the"
                " machine lost power"
            )
        return SourceStatus(
            target=str(self.path),
            kind=TargetKind.RECORDING,
            engines=tuple(self._engines) or ((self._engine,) if self._engine else ()),
            in_step=self._ended,
            ended=self._ended,
            skipped=self.bad_frames,
            last_seen_ns=self._last_ns,
            notes=tuple(notes),
        )

    def bounds(self) -> tuple[int, int]:
        """Return when its records begin and end. Reads all of it."""
        times = [at_ns for at_ns in map(record_ns, Recording(self.path).records()) if at_ns]
        return min(times, default=0), max(times, default=0)

    def records(self) -> Iterator[Record]:
        """Yield every record, in order, but for the keyframes that iteration leaves out, too."""
        held: Keyframe | None = None
        last: tuple[int, int] | None = None
        for record in self._decoded():
            if held is not None and not _makes_superfluous(record, held, last):
                yield held
            held = record if isinstance(record, Keyframe) else None
            if held is None:
                yield record
            if isinstance(record, Batch):
                last = record.epoch, record.sequence
        if held is not None:
            yield held

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames, but for a keyframe before the beginning of the epoch that it belongs to, or between two
        batches of which none is missing, as at the beginning of a segment: the batches report all that it does, and
        how it came about. Raises NewerVersion if this release cannot read the recording.
        """
        return (record for record in self.records() if isinstance(record, Batch | Keyframe))

    def _decoded(self) -> Iterator[Record]:
        for file in self._files:
            for payload in journal.read_segment(file):
                try:
                    record: Record | None = decode(payload) or decode_observed(payload)
                except NewerVersion as error:
                    raise NewerVersion(f"{file}: {error}") from error
                except NotAFrame:
                    self.bad_frames += 1
                    continue
                if record is not None:
                    yield record
            if lost := journal.tail_lost(file):
                self._note_loss(file, lost)

    def _note_loss(self, file: Path, lost: int) -> None:
        damaged_at = journal.damaged_at(file)
        if damaged_at is None:
            self.bytes_lost += lost
        else:
            self.damage.append(f"{file}, the record at byte {damaged_at}")


class Bundle(Source):
    """The recording in the support bundle at `path`, unpacked while it is open."""

    has_past = True
    has_events = True
    grows = False

    def __init__(self, path: Path, _options: SourceOptions) -> None:
        self._path = path
        self._recording: Recording | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Unpack it. Raises NotABundle."""
        self._read(lambda _recording: None)

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return the next records. Raises NewerVersion and NotABundle."""
        return self._read(lambda recording: recording.poll(timeout_s))

    def status(self) -> SourceStatus:
        """Report how far it was read and what of it is damaged."""
        if self._recording is None:
            return SourceStatus(target=str(self._path), kind=TargetKind.BUNDLE)
        return msgspec.structs.replace(self._recording.status(), target=str(self._path), kind=TargetKind.BUNDLE)

    def bounds(self) -> tuple[int, int]:
        """Return when its records begin and end. Raises NewerVersion and NotABundle."""
        return self._read(Recording.bounds)

    def close(self) -> None:
        """Remove what was unpacked."""
        self._recording = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _read(self, read: Callable[[Recording], Answer]) -> Answer:
        """Read what is unpacked. An error names the bundle: the folder is gone when a person reads it."""
        try:
            if self._recording is None:
                self._recording = self._unpacked()
            return read(self._recording)
        except NewerVersion as error:
            raise NewerVersion(f"{self._path}: {str(error).rpartition(f'{journal.SUFFIX}: ')[2]}") from error
        except journal.NotAJournal as error:
            raise NotABundle(
                f"{self._path}: a file in its {EVENTS_FOLDER} is not a segment of a kvscope journal"
            ) from error

    def _unpacked(self) -> Recording:
        self._folder = tempfile.TemporaryDirectory(prefix="kvscope-bundle-")
        try:
            unpack_events(self._path, Path(self._folder.name))
            return Recording(Path(self._folder.name))
        except BaseException:
            self.close()
            raise
