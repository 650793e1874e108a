"""The caller's trace on the stream: read from its header, carried by an event and a keyframe, told in the story."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.monitor.contract.trace_context import TraceContext, parse_traceparent
from kvscope.monitor.ledger import keyframe_codec
from tests.detectors.scenes import Spoken

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@settings(deadline=None)
@given(
    trace_id=st.integers(1, (1 << 128) - 1),
    span_id=st.integers(1, (1 << 64) - 1),
    flags=st.integers(0, 255),
)
def test_what_a_header_names_is_what_the_event_carries(trace_id: int, span_id: int, flags: int) -> None:
    context = parse_traceparent(f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}")
    assert context is not None
    assert (context.trace_id, context.span_id, context.flags) == (trace_id, span_id, flags)
    assert all(-(1 << 63) <= arg < 1 << 63 for arg in context)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "no trace",
        HEADER.upper(),
        HEADER.removesuffix("-01"),
        f"{HEADER}-more",  # version 00 ends with its flags
        f"ff{HEADER[2:]}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    ],
)
def test_what_is_no_header_is_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent(f"01{HEADER[2:]}-more") == parse_traceparent(HEADER)


@pytest.mark.parametrize("at_the_front_end", [True, False])
def test_a_request_keeps_its_callers_trace(at_the_front_end: bool) -> None:
    context = parse_traceparent(HEADER)
    assert isinstance(context, TraceContext)
    scene = Spoken()
    if at_the_front_end:
        scene.log.received(1, "r-1", 12, context)
        scene.say()
    scene.arrive(1, [1, 2, 3])
    if not at_the_front_end:
        scene.log.traced(1, context)
    scene.arrive(2, [4])
    scene.say()
    requests = scene.ledger.state.requests
    assert (requests[1].trace, requests[2].trace) == (context, None)
    assert keyframe_codec.load_state(keyframe_codec.dump_state(scene.ledger.state)).requests[1].trace == context
    reported = [line.text for line in scene.watch.request(scene.ledger.engine, "r-1").event_history]
    assert f"is part of its caller's trace {context.trace_id:032x}" in reported


def test_a_trace_of_nobody_known_changes_nothing() -> None:
    context = parse_traceparent(HEADER)
    assert context is not None
    scene = Spoken()
    scene.log.traced(7, context)
    scene.say()
    assert not scene.ledger.state.requests
    assert not scene.ledger.anomalies
