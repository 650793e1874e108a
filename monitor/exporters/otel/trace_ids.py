"""Which trace a request is part of: its caller's, or one of its own.

Ids are derived from the request, and not drawn. So a finding and an exemplar can name the trace of a request that has
not ended yet, and a trace that is sent twice is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from opentelemetry.trace import SpanContext, TraceFlags

from kvscope.monitor.pipeline import EndedRequest
from kvscope.monitor.state.records import RequestState

SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def root_of(engine: str, record: RequestState) -> SpanContext:
    """Return the root span of a request, in its caller's trace if it has come with one."""
    made = _digest(f"{engine}\n{record.id}\n{record.number}\n{record.arrived_ns or record.received_ns}")
    trace_id = record.trace.trace_id if record.trace is not None else int.from_bytes(made[:16])
    return SpanContext(trace_id, int.from_bytes(made[16:]), is_remote=False, trace_flags=SAMPLED)


def parent_of(record: RequestState) -> SpanContext | None:
    """Return the caller's span, or None without one."""
    if record.trace is None:
        return None
    return SpanContext(
        record.trace.trace_id, record.trace.span_id, is_remote=True, trace_flags=TraceFlags(record.trace.flags)
    )


def callers_of(ended: Iterable[EndedRequest]) -> list[tuple[EndedRequest, SpanContext]]:
    """Return the requests whose callers record their traces, and the callers' spans."""
    parents = ((one, parent_of(one.request)) for one in ended)
    return [(one, parent) for one, parent in parents if parent is not None and parent.trace_flags.sampled]


def child_of(parent: SpanContext, index: int) -> SpanContext:
    """Return the `index`-th span under a root."""
    made = _digest(f"{parent.trace_id:x}\n{parent.span_id:x}\n{index}")
    return SpanContext(parent.trace_id, int.from_bytes(made[16:]), is_remote=False, trace_flags=SAMPLED)


def _digest(text: str) -> bytes:
    """24 bytes: of a trace's id, and of a span's."""
    return hashlib.blake2b(text.encode(), digest_size=24).digest()
