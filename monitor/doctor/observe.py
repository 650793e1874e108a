"""Opens a target and looks at it: whatever it is, what comes out answers monitor.query's questions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from monitor.detectors.thresholds import Settings
from monitor.events.wire import ContractError
from monitor.query import Query, RemoteQuery, Unreachable
from monitor.sources.live import LiveStream
from monitor.sources.recording import Recording
from monitor.sources.target import BadTarget, Kind, kind_of, read_log
from monitor.watch import Watch

WATCH_S = 3.0
"""How long a live stream is watched: two heartbeats, so that what moves can be told from what does not."""


class CannotTell(Exception):
    """The target could not be reached, or has not what is needed; the message names what is missing."""


@dataclass
class Observation:
    """A target that was looked at. `is_past`: its end is in the past, so what was resolved by then counts too."""

    target: str
    kind: Kind
    query: Query
    is_past: bool
    notes: list[str] = field(default_factory=list)

    def close(self) -> None:
        """Let go of a service's connection."""
        if isinstance(self.query, RemoteQuery):
            self.query.close()


def observe(
    target: str, settings: Settings, *, timeout_s: float = 10.0, watch_s: float = WATCH_S, token: str = ""
) -> Observation:
    """Look at `target`. Raises BadTarget for what is none, and CannotTell."""
    kind = kind_of(target)
    try:
        match kind:
            case Kind.STREAM:
                return _watch_stream(target, settings, timeout_s, watch_s)
            case Kind.SERVICE:
                return _ask_service(target, token, timeout_s)
            case Kind.RECORDING:
                return _read_recording(target, settings)
            case Kind.LOG:
                return _read_log(target, settings)
            case Kind.METRICS:
                raise BadTarget(
                    f"{target}: a metrics page has no blocks to look at. Give the engine's event stream"
                    " (tcp://127.0.0.1:5757), its log, or a kvscope service (http://127.0.0.1:8765)"
                )
    except (ContractError, Unreachable) as error:
        raise CannotTell(str(error)) from error


def _watch_stream(target: str, settings: Settings, timeout_s: float, watch_s: float) -> Observation:
    watch = Watch(settings)
    stream = LiveStream(target)
    started = time.monotonic()
    in_step_at: float | None = None
    try:
        while in_step_at is None or time.monotonic() - in_step_at < watch_s:
            watch.feed(received.frame for received in stream.poll(0.1))
            if in_step_at is None and stream.in_step:
                in_step_at = time.monotonic()
            if in_step_at is None and time.monotonic() - started > timeout_s:
                heard = "it publishes, but its replay socket does not answer" if stream.engine else "nothing was heard"
                raise CannotTell(
                    f"{target}: {heard} for {timeout_s:.0f} s. Is the engine running, with its event stream at that"
                    f" address (--events {target})? A frozen process looks the same: ps -o stat= -p PID tells"
                )
    finally:
        stream.close()
    watch.settle()
    notes = [f"{stream.bad_frames} messages were not of the contract and were left out"] if stream.bad_frames else []
    return Observation(target, Kind.STREAM, watch, is_past=False, notes=notes)


def _ask_service(target: str, token: str, timeout_s: float) -> Observation:
    query = RemoteQuery(target, token, timeout_s)
    try:
        engines = query.engines()
    except Unreachable:
        query.close()
        raise
    notes = [] if engines else ["the service knows no engine yet: see its --events"]
    if not engines:
        query.close()
        raise CannotTell(f"{target}: {notes[0]}")
    return Observation(target, Kind.SERVICE, query, is_past=False, notes=notes)


def _read_recording(target: str, settings: Settings) -> Observation:
    watch = Watch(settings)
    recording = Recording(Path(target))
    watch.feed(recording)
    watch.settle()
    notes = []
    if recording.bad_frames:
        notes.append(f"{recording.bad_frames} records were not of the contract and were left out")
    if recording.bytes_lost:
        notes.append(f"its last {recording.bytes_lost} bytes are no whole record: the writer was stopped in mid-write")
    if not any(engine.attached == "stream" for engine in watch.engines()):
        raise CannotTell(f"{target}: the recording has neither an engine's start nor a keyframe, so no state is known")
    return Observation(target, Kind.RECORDING, watch, is_past=True, notes=notes)


def _read_log(target: str, settings: Settings) -> Observation:
    watch = Watch(settings)
    log, records = read_log(Path(target))
    if not log.stats_lines:
        raise CannotTell(
            f"{target}: no line has an engine's figures (Avg prompt throughput: …, Running: …, KV cache usage: …)."
            " They are logged every 10 s while requests run, unless --disable-log-stats is given"
        )
    watch.feed(records)
    watch.settle()
    return Observation(target, Kind.LOG, watch, is_past=True, notes=log.notes)
