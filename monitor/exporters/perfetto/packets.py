"""Writes tracks, slices, counters and instants, as packets of a Perfetto trace.

Source: https://perfetto.dev/docs/reference/synthetic-track-event

The packets of one trace need not be in order of time: the trace processor sorts them. On one track they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import BinaryIO, Final

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    CounterDescriptor,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

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
