"""A Perfetto trace of an engine's stream: the engine a process, each request a track, with pool, queue and findings.

A request's slices are its phases (kvscope.monitor.ledger.event_history): a state for one reason, with its cost. One
that has ended and still holds blocks is drawn until it frees them.

The packets of one trace need not be in order of time: the trace processor sorts them. On one track they are. Source:
https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import BinaryIO, Final, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    CounterDescriptor,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from ..contract.kinds import FIRST_FINISHED, Kind
from ..contract.wire import ADDED_BY_SOURCE, NO_REQUEST, Batch, Frame, Keyframe, Run
from ..detectors.detector import Settings
from ..detectors.findings import Transition
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.event_history import Phase, RequestPhases, phase_names, scan_events
from ..questions.pipeline import Pipeline

_SEQUENCE: Final = 1
"""The packet sequence of this writer, the only one. Only we do."""

Arguments = Mapping[str, str | int]


class Packets:
    """Writes the packets of a trace to `out` as they are made. All times are wall ns. Tracks are named by number."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = StreamingTraceProtoBuilder(out)
        self._tracks = count(1)
        self._is_first = True

    def process(self, name: str, at_ns: int) -> int:
        """Add a process's own track. The first states that the trace's clock, which began at boot, is the wall's."""
        if self._is_first:
            clocks = self._packet(at_ns)
            for clock in (BUILTIN_CLOCK_BOOTTIME, BUILTIN_CLOCK_REALTIME):
                clocks.clock_snapshot.clocks.add(clock_id=clock, timestamp=at_ns)
            self._out.write_packet(clocks)
        track = next(self._tracks)
        described = TrackDescriptor(uuid=track, child_ordering=TrackDescriptor.EXPLICIT)
        described.process.pid = track
        described.process.process_name = name
        return self._describe(described)

    def group(self, parent: int, name: str, rank: int) -> int:
        """Add a track under a process, in the place `rank`: those under it are in order of their first event."""
        return self._describe(
            TrackDescriptor(
                uuid=next(self._tracks),
                parent_uuid=parent,
                name=name,
                sibling_order_rank=rank,
                child_ordering=TrackDescriptor.CHRONOLOGICAL,
            )
        )

    def track(self, parent: int, name: str) -> int:
        """Add a track under a group, which is its own even where another has its name."""
        return self._describe(
            TrackDescriptor(
                uuid=next(self._tracks),
                parent_uuid=parent,
                name=name,
                sibling_merge_behavior=TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE,
            )
        )

    def counter(self, parent: int, name: str, unit: str) -> int:
        """Add a counter under a group. Counters with the same unit share their scale."""
        described = TrackDescriptor(uuid=next(self._tracks), parent_uuid=parent, name=name)
        described.counter.CopyFrom(CounterDescriptor(unit_name=unit, y_axis_share_key=unit))
        return self._describe(described)

    def slice(self, track: int, name: str, since_ns: int, until_ns: int, arguments: Arguments) -> None:
        """Add an event with a duration, with its arguments."""
        self._event(track, TrackEvent.TYPE_SLICE_BEGIN, since_ns, name, arguments)
        self._event(track, TrackEvent.TYPE_SLICE_END, until_ns)

    def instant(self, track: int, name: str, at_ns: int, arguments: Arguments) -> None:
        """Add an event without a duration, with its arguments."""
        self._event(track, TrackEvent.TYPE_INSTANT, at_ns, name, arguments)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """Add the value of a counter from then on."""
        self._event(track, TrackEvent.TYPE_COUNTER, at_ns, value=value)

    def _event(
        self, track: int, kind: int, at_ns: int, name: str = "", arguments: Arguments | None = None, value: int = 0
    ) -> None:
        packet = self._packet(at_ns)
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        if name:
            event.name = name
        if kind == TrackEvent.TYPE_COUNTER:
            event.counter_value = value
        for argument, annotation in (arguments or {}).items():
            if isinstance(annotation, int):
                event.debug_annotations.add(name=argument, int_value=annotation)
            elif annotation:
                event.debug_annotations.add(name=argument, string_value=annotation)
        self._out.write_packet(packet)

    def _describe(self, described: TrackDescriptor) -> int:
        packet = self._packet()
        packet.track_descriptor.CopyFrom(described)
        self._out.write_packet(packet)
        track: int = described.uuid
        return track

    def _packet(self, at_ns: int = 0) -> TracePacket:
        packet = TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        if at_ns:
            packet.timestamp = at_ns
        if self._is_first:
            packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            self._is_first = False
        return packet


TRACE_HOLDERS: Final = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")


class Exported(NamedTuple):
    """The contents of a trace: its engine (empty: none), and the numbers of requests, points of the counters, and
    findings.
    """

    engine: str
    requests: int
    points: int
    findings: int


def export(frames: Iterable[Frame], out: BinaryIO, settings: Settings) -> Exported:
    """Write the trace of one engine's `frames`, which are read and judged as a live stream is, to `out`."""
    exporter = _Exporter(out, settings)
    exporter.read(frames)
    return Exported(exporter.engine, exporter.requests, exporter.points, exporter.findings)


class _Request:
    """A request that is not over: its phases so far, its name, whether its end was announced to free no blocks, and how
    many it had then.
    """

    def __init__(self, life: RequestPhases, name: str) -> None:
        self.life = life
        self.name = name
        self.deferred = False
        self.kept = 0

    def apply(self, event: Run, at_ns: int) -> None:
        """Fold in an event about it."""
        self.life.apply(event, at_ns)
        self.deferred |= event.kind == Kind.FREE_DEFERRED
        if self.life.phases and self.life.phases[-1].status >= FIRST_FINISHED:
            self.kept = max(self.kept, self.life.phases[-1].blocks)

    @property
    def is_over(self) -> bool:
        """Whether it has ended and holds nothing."""
        last = self.life.phases[-1]
        return last.status >= FIRST_FINISHED and not last.blocks


class _Exporter:
    def __init__(self, out: BinaryIO, settings: Settings) -> None:
        self.engine = ""
        self.requests = self.points = self.findings = 0
        self._watch = Pipeline(settings)
        self._packets = Packets(out)
        self._alive: dict[int, _Request] = {}
        self._epoch = 0
        self._texts: dict[int, str] = {}
        self._counted: dict[int, int] = {}
        """The last value of each counter."""
        self._point_ns = 0

    def read(self, frames: Iterable[Frame]) -> None:
        for _, at_ns, event in scan_events(self._fed(frames), None):
            if event.kind == Kind.PROGRESSED:
                for number in event.ids:
                    self._apply(number, event, at_ns)
            elif event.request != NO_REQUEST:
                self._apply(event.request, event, at_ns)
        self._watch.settle()
        self._judged(self._watch.take_transitions())
        self._end_all()

    def _fed(self, frames: Iterable[Frame]) -> Iterator[Batch]:
        """Yield the batches with events of the engine's own, each once everything until its end is judged."""
        for frame in frames:
            if not self.engine:
                if not frame.wall_ns:
                    continue  # a time without events, before the first one
                self._begin(frame)
            if self._epoch not in (0, frame.epoch):
                self._end_all()
            self._epoch = frame.epoch
            self._watch.feed([frame])
            self._judged(self._watch.take_transitions())
            ledger = self._ledger
            if ledger.points and ledger.points[-1].at_ns > self._point_ns:
                self._count(ledger.points[-1])
            if isinstance(frame, Keyframe):
                self._join(ledger)
            elif frame.sequence != ADDED_BY_SOURCE:
                self._texts = frame.texts
                yield frame

    @property
    def _ledger(self) -> EngineLedger:
        return self._watch.fleet.engines[self.engine]

    def _begin(self, frame: Frame) -> None:
        self.engine, packets = frame.engine, self._packets
        process = packets.process(frame.engine, frame.wall_ns)
        self._findings = packets.group(process, "Findings", 0)
        blocks, queue = packets.group(process, "KV blocks", 1), packets.group(process, "Queue", 2)
        self._blocks = {holder: packets.counter(blocks, holder, "blocks") for holder in TRACE_HOLDERS}
        self._running, self._waiting = (packets.counter(queue, name, "requests") for name in ("running", "waiting"))
        self._requests = packets.group(process, "Requests", 3)

    def _join(self, ledger: EngineLedger) -> None:
        """Take over the requests of a keyframe. Requests that are missing from it ended in a gap."""
        state = ledger.state
        for number in [n for n in self._alive if n not in state.requests and n not in state.deferrals]:
            self._end(number, ledger.now_ns)
        for number, record in state.requests.items():
            if number not in self._alive:
                self._alive[number] = _Request(RequestPhases.joined(record, ledger.wall(record.since_ns)), record.id)

    def _apply(self, number: int, event: Run, at_ns: int) -> None:
        request = self._alive.get(number)
        if request is None:
            request = _Request(RequestPhases(number), self._texts.get(number, f"#{number}"))
        request.apply(event, at_ns)
        if not request.life.phases:
            return  # of one that was over already
        self._alive[number] = request
        if request.is_over:
            self._end(number, at_ns)

    def _end_all(self) -> None:
        for number in list(self._alive):
            self._end(number, self._ledger.now_ns)

    def _end(self, number: int, at_ns: int) -> None:
        """Draw all of its phases. The last lasts until then."""
        request = self._alive.pop(number)
        track = self._packets.track(self._requests, request.name)
        self.requests += 1
        request.life.phases[-1].until_ns = at_ns
        drawn_ns = 0
        for phase in request.life.phases:
            since_ns = max(phase.since_ns, drawn_ns)  # wall times are as good as the engine's wall clock
            drawn_ns = max(phase.until_ns, since_ns)
            state, reason = phase_names(phase)
            if phase.status < FIRST_FINISHED:
                self._packets.slice(track, state, since_ns, drawn_ns, {"reason": reason, **_costs(phase)})
            elif drawn_ns > since_ns:
                why = "FREE_DEFERRED" if request.deferred else "UNACCOUNTED"
                arguments: Arguments = {"reason": why, **_costs(phase), "blocks": request.kept}
                self._packets.slice(track, state, since_ns, drawn_ns, arguments)
            else:
                self._packets.instant(track, state, since_ns, _costs(phase))

    def _count(self, point: Point) -> None:
        self.points += 1
        self._point_ns = point.at_ns
        counts = {track: getattr(point.balance, holder) for holder, track in self._blocks.items()}
        counts |= {self._running: point.running, self._waiting: point.waiting}
        for track, value in counts.items():
            if self._counted.get(track) != value:
                self._packets.count(track, point.at_ns, value)
                self._counted[track] = value

    def _judged(self, transitions: Iterable[Transition]) -> None:
        for finding, to, at_ns in transitions:
            report = finding.report()
            self.findings += to == "firing"
            self._packets.instant(
                self._findings,
                report.code if to == "firing" else f"{report.code} resolved",
                at_ns,
                {
                    "severity": report.severity,
                    "verdict": report.verdict,
                    "title": report.title,
                    "explanation": report.explanation,
                    "requests": ", ".join(report.culprits.requests),
                    "blocks": len(report.culprits.blocks),
                    "since": report.since or "",
                    "position": report.position,
                    "runbook": report.runbook,
                },
            )


def _costs(phase: Phase) -> dict[str, int]:
    return {
        "blocks": phase.blocks,
        "computed_tokens": phase.computed_tokens,
        "output_tokens": phase.output_tokens,
        "computed": phase.computed,
        "recomputed": phase.recomputed,
    }
