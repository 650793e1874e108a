"""Frames that an engine emitted: all of a recording, a part of it, or those of a stream for a while."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import chain

from ..base.errors import BadTarget
from ..contract.samples import Record
from ..contract.wire import Batch, Frame, Keyframe
from ..ledger import keyframe_codec
from ..ledger.engine_ledger import EngineLedger
from ..questions.availability import need_of
from ..questions.observe import ALWAYS, Span, Window
from ..sources.recording import record_ns
from ..sources.source import Source, SourceOptions, read_to_end, until_in_step
from ..sources.source_registry import is_service, open_source


def frames_of(target: str, window: Window, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    """Return the frames of a recording, or of a part of it, or what a stream brings for `watch_s`.

    Raises BadTarget for a source that does not bring every event. Reading raises ContractError, and SourceError if
    nothing is received for `timeout_s`.
    """
    no_events = BadTarget(
        f"{target}: {need_of('trace')} (tcp://127.0.0.1:5757) or a recording of it (`monitor record` makes one)"
    )
    if is_service(target):
        raise no_events
    with ExitStack() as on_error:
        source = on_error.enter_context(closing(open_source(target, SourceOptions(timeout_s=timeout_s))))
        if not source.has_events:
            raise no_events
        if window != ALWAYS and not source.has_past:
            raise BadTarget(f"{target} is live and has no past: use --since and --until with a recording")
        span = None if window == ALWAYS else window.span(source.bounds()[1])
        on_error.pop_all()  # from here on, the frames close it
    if not source.has_past:
        return _live_frames(source, watch_s, timeout_s)
    return _past_frames(source) if span is None else _frames_within(_past_frames(source), span)


def _frames_among(records: Iterable[Record]) -> Iterator[Frame]:
    return (record for record in records if isinstance(record, Batch | Keyframe))


def _past_frames(source: Source) -> Iterator[Frame]:
    with closing(source):
        for records in read_to_end(source):
            yield from _frames_among(records)


def _live_frames(source: Source, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    with closing(source):
        for records in until_in_step(source, timeout_s):
            yield from _frames_among(records)
        until = time.monotonic() + watch_s
        while time.monotonic() < until:
            yield from _frames_among(source.poll())


def _frames_within(frames: Iterator[Frame], span: Span) -> Iterator[Frame]:
    """Yield those of that time, after a keyframe of the state before it."""
    ledger: EngineLedger | None = None
    for frame in frames:
        if record_ns(frame) >= span.since_ns:
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
    yield from (frame for frame in frames if record_ns(frame) <= span.until_ns)
