"""What an engine said, frame by frame: all of a recording, a part of it, or what a stream says for a while."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from kvscope.monitor.doctor.observe import nothing_heard
from kvscope.monitor.doctor.time_window import ALWAYS, Span, Window, at_of
from kvscope.monitor.events.wire import Frame, Keyframe
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.sources.targets import BadTarget, Kind, kind_of
from kvscope.monitor.state import keyframe_codec


def frames_of(target: str, window: Window, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    """The frames of a recording, or of a part of it, or what a stream says for `watch_s`.

    Raises BadTarget for what does not tell every event; as they are read, ContractError, and CannotTell if nothing is
    heard for `timeout_s`.
    """
    match kind_of(target):
        case Kind.RECORDING if window == ALWAYS:
            return iter(Recording(Path(target)))
        case Kind.RECORDING:
            end_ns = max(map(at_of, Recording(Path(target))), default=0)
            return _within(Recording(Path(target)), window.span(end_ns))
        case Kind.STREAM if window == ALWAYS:
            return _live(target, watch_s, timeout_s)
        case Kind.STREAM:
            raise BadTarget(f"{target} is live and has no past: --since and --until are for a recording")
        case _:
            raise BadTarget(
                f"{target} can be looked at, but does not tell every event: name an engine's event stream"
                " (tcp://127.0.0.1:5757) or a recording (`monitor record` makes one)"
            )


def _live(target: str, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    stream = LiveStream(target)
    started = time.monotonic()
    in_step_at = 0.0
    try:
        while not in_step_at or time.monotonic() - in_step_at < watch_s:
            yield from (received.frame for received in stream.poll(0.1))
            if not in_step_at and stream.in_step:
                in_step_at = time.monotonic()
            if not in_step_at and time.monotonic() - started > timeout_s:
                raise nothing_heard(target, bool(stream.engine), timeout_s)
    finally:
        stream.close()


def _within(frames: Iterable[Frame], span: Span) -> Iterator[Frame]:
    """Those of that time, after a keyframe of what was so before."""
    ledger: EngineLedger | None = None
    frames = iter(frames)
    for frame in frames:
        if at_of(frame) >= span.since_ns:
            frames = chain([frame], frames)
            break
        ledger = ledger or EngineLedger(frame.engine)
        ledger.apply(frame)
    if ledger is not None and ledger.ready:
        state = ledger.state
        now_ns = ledger.wall(state.now_ns)
        yield Keyframe(
            ledger.engine,
            ledger.epoch,
            ledger.sequence,
            state.last_step,
            now_ns,
            state.now_ns,
            state.damaged,
            keyframe_codec.dump_state(state),
        )
    yield from (frame for frame in frames if at_of(frame) <= span.until_ns)
