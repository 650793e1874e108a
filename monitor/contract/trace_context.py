"""The caller's trace, as a W3C `traceparent` header names it and the event TRACED carries it.

    00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
       trace id                         parent span id   flags (1: the caller records this trace)

https://www.w3.org/TR/trace-context/. It names a trace and reveals nothing of the prompt.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_64_BITS: Final = (1 << 64) - 1


class TraceContext(NamedTuple):
    """Which trace a request is part of, and under which of its spans: the event's arguments, 64 bits read as signed."""

    trace_id_high: int
    trace_id_low: int
    parent_span_id: int
    flags: int

    @property
    def trace_id(self) -> int:
        """The 128-bit trace id, as OpenTelemetry expects it."""
        return (self.trace_id_high & _64_BITS) << 64 | self.trace_id_low & _64_BITS

    @property
    def span_id(self) -> int:
        """The caller's span id, as OpenTelemetry expects it."""
        return self.parent_span_id & _64_BITS


def parse_traceparent(header: str | None) -> TraceContext | None:
    """Return the trace context of a `traceparent` header, or None without a valid one, which the specification says to
    ignore.
    """
    found = _TRACEPARENT.fullmatch(header.strip()) if header else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(_signed(trace_id >> 64), _signed(trace_id & _64_BITS), _signed(span_id), int(found[4], 16))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
