"""A recording published again, as if its engine spoke now: whatever reads a stream can attach to it.

Times are moved to now, and an epoch too, so that it is an epoch of its own. With a speed other than 1 the wall clock
runs that much faster than the engine's own did. Records that the recording's source had added are left out: each reader
adds its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec
import zmq

from kvscope.monitor.events import limits
from kvscope.monitor.events.wire import ADDED_BY_SOURCE, Batch, ContractError, Frame, encode
from kvscope.monitor.history.keyframe_cutter import keyframe_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.publishing.publisher import replay_endpoint_for, require_private
from kvscope.monitor.publishing.replay_protocol import Replay
from kvscope.monitor.publishing.replay_server import ReplayAnswer, ReplayServer

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
            moved = _moved(frame, due_ns, frame.epoch + epoch_ns)
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


def _moved(frame: Frame, wall_ns: int, epoch: int) -> Frame:
    return msgspec.structs.replace(frame, wall_ns=wall_ns, epoch=epoch)
