"""Records what a source brings as a journal, and publishes a recording again."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import zmq
from rich.console import Console
from rich.status import Status

from ..base import limits
from ..base.errors import BadTarget
from ..base.text import escaped
from ..contract.journal import JournalWriter, journal_segments
from ..contract.samples import Record, encode_observed
from ..contract.wire import ADDED_BY_SOURCE, Batch, ContractError, Frame, Keyframe, encode
from ..ledger.engine_ledger import EngineLedger
from ..probes.publisher import replay_endpoint_for, require_private
from ..probes.replay_server import Replay, ReplayAnswer, ReplayServer
from ..sources.source import POLL_WAIT_S, Source, SourceError, SourceOptions
from ..sources.source_registry import is_service, open_source
from ..sources.targets import is_folder
from .segment_files import keyframe_of


class JournalRecorder:
    """Writes records into `directory`, each epoch of an engine into a segment of its own. Raises BadTarget if the
    directory cannot be written.

    It counts `batches`, `bytes` of all, and `others`: samples, facts and KV events. `engine` is the first one's name.
    """

    def __init__(self, directory: Path) -> None:
        self.batches = self.others = self.bytes = 0
        self.engine = ""
        self._directory = directory
        self._writer: JournalWriter | None = None

    def write(self, source: Source, records: Sequence[Record]) -> None:
        """Write records that `source` has just brought."""
        for record in records:
            is_frame = isinstance(record, Batch | Keyframe)
            payload = source.payload_of(record) if isinstance(record, Batch | Keyframe) else encode_observed(record)
            sequence = record.sequence if isinstance(record, Batch | Keyframe) else 0
            epoch = record.epoch if isinstance(record, Batch | Keyframe) else 0
            if self._writer is None or epoch > self._writer.epoch:
                self.close()
                self._writer = self._open(epoch or time.time_ns())
            self._writer.append(payload, sequence)
            self.engine = self.engine or record.engine
            self.batches += isinstance(record, Batch)
            self.others += not is_frame
            self.bytes += len(payload)

    def close(self) -> None:
        """Finish the open segment."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, epoch: int) -> JournalWriter:
        try:
            return JournalWriter(self._directory, epoch)
        except OSError as error:
            raise BadTarget(f"{self._directory} cannot be written: {error.strerror}. Name another directory") from error

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self._writer is not None


def record(
    target: str, directory: Path, *, seconds: float | None, timeout_s: float, console: Console
) -> JournalRecorder:
    """Record what `target` brings into `directory` for `seconds` from its first record, or until Ctrl-C.

    A restart of the engine begins a new segment. Raises BadTarget if the target cannot be recorded or the directory
    holds a recording already or cannot be written, and SourceError or ContractError if nothing comes in `timeout_s`.
    """
    if is_service(target):
        raise BadTarget(f"{target} is a kvscope service: record what it reads (its page Sources lists it)")
    source = open_source(target, SourceOptions(timeout_s=timeout_s, follow=True, look_back_s=None))
    recorder = JournalRecorder(directory)
    with closing(source), closing(recorder):
        if not source.grows:
            raise BadTarget(f"{target} is over, and is kept already: copy it. A source that goes on can be recorded")
        if is_folder(directory) and journal_segments(directory):
            raise BadTarget(f"{directory} holds a recording already: name a new directory, so that two are not mixed")
        with contextlib.suppress(KeyboardInterrupt), console.status("") as status:
            _record_until(source, recorder, seconds, timeout_s, status)
    return recorder


def _record_until(
    source: Source, recorder: JournalRecorder, seconds: float | None, timeout_s: float, status: Status
) -> None:
    source.open()
    started = time.monotonic()
    while seconds is None or not recorder.has_begun or time.monotonic() - started < seconds:
        had_begun = recorder.has_begun
        recorder.write(source, source.poll(POLL_WAIT_S))
        if recorder.has_begun and not had_begun:
            started = time.monotonic()
        elif not recorder.has_begun and (source.status().error or time.monotonic() - started > timeout_s):
            raise SourceError(source.status().error or source.explain_silence(timeout_s))
        kept = f"{recorder.batches:,} batches, {recorder.others:,} samples and facts, {recorder.bytes:,} bytes"
        status.update(f"{escaped(recorder.engine) or source.status().target}: {kept}; Ctrl-C ends it")


# -------------------------------------------------------------------- replay


REPLAY_RING_BYTES: Final = 64 << 20
POLL_S: Final = 0.02


class Replayer:
    """Publishes `frames` at `events`, and answers beside it who joins. A port of `*` picks a free one.

    Raises NotPrivate for an address beyond this machine, ContractError if it cannot be bound.
    """

    def __init__(self, frames: Iterable[Frame], events: str, replay: str = "", speed: float = 1.0) -> None:
        replay = replay or replay_endpoint_for(events)
        for endpoint in (events, replay):
            require_private(endpoint)
        self.published = 0
        """Batches so far."""
        self._frames = frames
        self._speed = speed
        self._ledger: EngineLedger | None = None
        self._ring: deque[tuple[int, int, bytes]] = deque()
        """Epoch, sequence and bytes of the last batches."""
        self._ring_bytes = 0
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.bind(events)
            self._replay = ReplayServer(self._context, replay, self._since, self._now)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ContractError(f"cannot bind {events} and {replay}: {error.strerror}") from error
        self.events_endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.endpoint

    def run(self) -> Iterator[Frame]:
        """Publish one frame after another, each when it is due, and yield it, to the recording's end."""
        first_ns = epoch_ns = 0
        began_ns = time.time_ns()
        for frame in self._frames:
            if frame.sequence == ADDED_BY_SOURCE:
                continue
            first_ns = first_ns or frame.wall_ns
            epoch_ns = epoch_ns or began_ns - first_ns
            due_ns = began_ns + max(0, round((frame.wall_ns - first_ns) / self._speed))
            while time.time_ns() < due_ns:
                self.answer(min(POLL_S, (due_ns - time.time_ns()) / 1e9))
            moved = msgspec.structs.replace(frame, wall_ns=due_ns, epoch=frame.epoch + epoch_ns)
            self._publish(moved)
            yield moved

    def answer(self, timeout_s: float) -> None:
        """ReplayAnswer clients that ask within the time."""
        self._replay.serve(max(0.001, timeout_s))

    def close(self) -> None:
        """Disconnect, when what was published is sent."""
        self._context.destroy(linger=500)

    def _publish(self, frame: Frame) -> None:
        if self._ledger is None:
            self._ledger = EngineLedger(frame.engine)
        self._ledger.apply(frame)
        payload = encode(frame)
        if isinstance(frame, Batch):
            self.published += 1
            self._ring.append((frame.epoch, frame.sequence, payload))
            self._ring_bytes += len(payload)
            while self._ring_bytes > REPLAY_RING_BYTES and len(self._ring) > 1:
                self._ring_bytes -= len(self._ring.popleft()[2])
        self._pub.send_multipart([frame.engine.encode(), payload])

    def _since(self, epoch: int, sequence: int) -> ReplayAnswer | None:
        found = [each for each in self._ring if each[0] == epoch and each[1] >= sequence]
        if not found or found[0][1] != sequence:
            return None
        kept: list[bytes] = []
        last = size = 0
        for _, number, payload in found:
            if kept and (size > limits.REPLY_BYTES or number != last + 1):
                break
            kept.append(payload)
            last, size = number, size + len(payload)
        return ReplayAnswer(Replay("since", "ring", sequence, last, len(kept) < len(found), epoch), kept)

    def _now(self) -> ReplayAnswer | None:
        """Return the state now, or None before there is one, and the client asks again."""
        keyframe = keyframe_of(self._ledger) if self._ledger is not None else None
        if keyframe is None:
            return None
        header = Replay("keyframe", "keyframe", keyframe.sequence, keyframe.sequence, False, keyframe.epoch)
        return ReplayAnswer(header, [encode(keyframe)])
