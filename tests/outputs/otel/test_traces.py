"""A request is a trace: its spans are its story, in its caller's trace."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kvscope.monitor.contract.kinds import FIRST_FINISHED, Load
from kvscope.monitor.contract.kinds import Status as RequestStatus
from kvscope.monitor.ledger.event_history import phase_names, phases, request_history, request_names, scan_events
from kvscope.monitor.ledger.records import RequestState
from kvscope.monitor.questions.pipeline import EndedRequest
from tests.detectors.scenes import Spoken, Watched
from tests.outputs.otel.receiver import Receiver, attributes
from tests.outputs.otel.sent import TRACE, busy, long_prefill, roots, sending, times, under


def test_a_trace_for_each_request_that_ended(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=kv")
    scene = Watched(total=33)
    with sending(receiver.url, scene) as outlet:
        busy(scene)
        outlet.send(scene.watch.take_ended())
        outlet.send(scene.watch.take_ended())  # told once
    assert receiver.services == {"kvscope"}
    assert {headers["x-tenant"] for headers in receiver.headers} == {"kv"}
    spans = roots(receiver)
    assert len(spans) == 6
    offset = scene.now_ns - scene.lab.clock.monotonic_ns()
    for record in scene.ledger.ended:
        span = spans[record.id]
        stated = attributes(span.attributes)
        assert (span.name, span.kind) == ("text_completion lab", Span.SPAN_KIND_SERVER)
        assert span.start_time_unix_nano == record.arrived_ns + offset
        assert span.end_time_unix_nano == record.finished_ns + offset
        assert stated["gen_ai.request.model"] == "lab"
        assert stated["gen_ai.provider.name"] == "kvscope"
        assert stated["gen_ai.usage.input_tokens"] == record.prompt_tokens > 0
        assert stated["gen_ai.usage.output_tokens"] == record.output_tokens
        assert stated["gen_ai.request.max_tokens"] == 30
        assert stated["server.address"] == "127.0.0.1"
        assert stated["kvscope.engine"] == scene.ledger.engine
        assert stated["kvscope.kv.peak_blocks"] == record.peak_blocks > 0
        assert stated["kvscope.preemptions"] == record.preemptions
        assert stated["kvscope.preempted_tokens"] == record.tokens_lost
        assert stated["kvscope.story_is_whole"]
        waited = [float(value) for name, value in stated.items() if name.startswith("kvscope.waited.")]
        assert sum(waited) == pytest.approx(sum(record.waited_ns.values()) / 1e9)
    assert max(record.preemptions for record in scene.ledger.ended) > 0
    aborted, served = attributes(spans["r-2"].attributes), attributes(spans["r-1"].attributes)
    assert aborted["gen_ai.response.finish_reasons"] == ["abort"]
    assert aborted["error.type"] == "FINISHED_ABORTED"
    assert spans["r-2"].status.code == Status.STATUS_CODE_ERROR
    assert served["gen_ai.response.finish_reasons"] == ["length"]
    assert "error.type" not in served
    assert spans["r-1"].status.code == Status.STATUS_CODE_UNSET


def test_the_spans_of_a_preempted_request_are_its_story(over_http: Receiver) -> None:
    scene = Watched(total=33)
    with sending(over_http.url, scene) as outlet:
        busy(scene)
        outlet.send(scene.watch.take_ended())
    preempted = [record for record in scene.ledger.ended if record.preemptions]
    assert preempted
    for record in preempted:
        about = list(scan_events(scene.ledger.recent, record.number))
        root = roots(over_http)[record.id]
        children = under(over_http, root)
        # The spans, side by side, are the phases of its life: prefill and decode make one of RUNNING.
        life = [p for p in phases(about, record.number, scene.now_ns) if p.status < FIRST_FINISHED and p.seconds]
        assert [times(span) for span in joined(over_http, children)] == [(p.since_ns, p.until_ns) for p in life]
        waits = [p for p in life if p.status != RequestStatus.RUNNING]
        assert [span.name for span in waiting(over_http, children)] == [f"wait {phase_names(p)[1]}" for p in waits]
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        assert children[-1].end_time_unix_nano == root.end_time_unix_nano
        # What happened in each, line by line, but for the steps and blocks that they are made of.
        lines = [
            (line.at_ns, line.what, line.text)
            for line in request_history(about, record.number, request_names(scene.ledger))
            if line.what not in ("progressed", "allocated", "reused", "released")
        ]
        reported = [
            (event.time_unix_nano, event.name, attributes(event.attributes)["kvscope.text"])
            for span in (root, *children, *(inside for child in children for inside in under(over_http, child)))
            for event in span.events
        ]
        assert sorted(reported) == sorted(lines)
        # Each preemption, with what it cost.
        losses = [attributes(s.attributes)["kvscope.tokens_lost"] for s in children if s.name == "preempted"]
        assert len(losses) == record.preemptions
        assert sum(losses) == record.tokens_lost
        recomputed = [attributes(s.attributes)["kvscope.recomputed_tokens"] for s in children if s.name == "prefill"]
        assert sum(recomputed) == sum(p.recomputed for p in life) > 0
        decoded = [attributes(s.attributes)["kvscope.tokens"] for s in children if s.name == "decode"]
        prefills = [s for s in children if s.name == "prefill"]
        assert sum(decoded) + len(prefills) == record.output_tokens  # the last step of a prefill gives a token too


def waiting(receiver: Receiver, children: list[Span]) -> list[Span]:
    """The waits under a root, those of a preemption in its place."""
    return [
        wait
        for span in children
        if span.name not in ("prefill", "decode")
        for wait in (under(receiver, span) if span.name == "preempted" else [span])
    ]


def joined(receiver: Receiver, children: list[Span]) -> list[Span]:
    """The phases as spans: prefill and the decode after it as one."""
    spans: list[Span] = []
    for span in children:
        if span.name == "preempted":
            spans += under(receiver, span)
        elif span.name == "decode" and spans and spans[-1].name == "prefill":
            both = Span()
            both.CopyFrom(spans.pop())
            both.end_time_unix_nano = span.end_time_unix_nano
            spans.append(both)
        else:
            spans.append(span)
    return spans


def test_a_prefill_in_chunks_has_a_span_for_each(over_http: Receiver) -> None:
    scene = Watched(max_num_batched_tokens=16)
    with sending(over_http.url, scene) as outlet:
        scene.lab.arrive(70, max_tokens=5)
        scene.run_until_idle()
        outlet.send(scene.watch.take_ended())
    (root,) = roots(over_http).values()
    prefill, decode = [span for span in under(over_http, root) if span.name in ("prefill", "decode")]
    chunks = under(over_http, prefill)
    assert [span.name for span in chunks] == ["chunk"] * -(-70 // 16)
    assert sum(attributes(span.attributes)["kvscope.tokens"] for span in chunks) == 70
    assert attributes(prefill.attributes)["kvscope.tokens"] == 70
    assert [before.end_time_unix_nano for before in chunks[:-1]] == [s.start_time_unix_nano for s in chunks[1:]]
    assert (chunks[0].start_time_unix_nano, chunks[-1].end_time_unix_nano) == times(prefill)
    assert decode.start_time_unix_nano == prefill.end_time_unix_nano
    assert attributes(decode.attributes)["kvscope.tokens"] == 5 - 1


def test_remote_loads_and_waits_outside_the_scheduler_are_spans(over_http: Receiver) -> None:
    scene = Spoken()
    log = scene.log
    with sending(over_http.url, scene) as outlet:
        log.received(1, "chatcmpl-1", 8)
        scene.wait(0.5)
        log.arrived(1, "chatcmpl-1", 8, 4, 0, 2, 3)
        log.waiting_on(1, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
        scene.wait(1)
        log.ready(1)
        log.waiting_on(1, RequestStatus.WAITING_FOR_REMOTE_KVS)
        scene.wait(2)
        log.remote_load(1, Load.DELIVERED, 8)
        log.ready(1)
        scene.wait(0.25)
        log.admitted(1, 7)
        scene.wait(0.125)
        log.progressed([1], [8], [1])
        log.first_token(1)
        scene.wait(0.125)
        log.progressed([1], [9], [2])
        log.finished(1, RequestStatus.FINISHED_STOPPED)
        scene.say()
        outlet.send(scene.watch.take_ended())
    (root,) = roots(over_http).values()
    assert root.name == "chat lab"
    reported = [
        (span.name, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9) for span in under(over_http, root)
    ]
    assert reported == [
        ("front end", 0.5),
        ("wait STRUCTURED_OUTPUT_GRAMMAR", 1.0),
        ("remote load", 2.0),
        ("wait NEW", 0.25),
        ("prefill", 0.125),
        ("decode", 0.125),
    ]
    load = next(span for span in under(over_http, root) if span.name == "remote load")
    assert attributes(load.attributes) == {"kvscope.outcome": "delivered", "kvscope.tokens": 8}
    assert attributes(root.attributes)["gen_ai.latency.time_to_first_token"] == 0.5 + 1 + 2 + 0.25 + 0.125


def test_a_request_is_in_its_callers_trace(over_http: Receiver) -> None:
    assert TRACE is not None
    scene = Spoken()
    with sending(over_http.url, scene) as outlet:
        for number, trace in ((1, TRACE), (2, None)):
            scene.log.received(number, f"r-{number}", 4, trace)
            scene.say()
            scene.arrive(number, [number])
            scene.wait(1)
            scene.log.finished(number, RequestStatus.FINISHED_STOPPED)
            scene.say()
        outlet.send(scene.watch.take_ended())
    joined_, own = roots(over_http)["r-1"], roots(over_http)["r-2"]
    assert int.from_bytes(joined_.trace_id) == TRACE.trace_id
    assert int.from_bytes(joined_.parent_span_id) == TRACE.span_id
    assert {span.trace_id for span in under(over_http, joined_)} == {joined_.trace_id}
    assert own.trace_id != joined_.trace_id
    assert not own.parent_span_id


def test_a_request_that_leaks_its_blocks_has_its_trace_when_it_ends(over_http: Receiver) -> None:
    scene = Watched(total=33, connector_share=1.0, faults=["leak.finished-held"])
    with sending(over_http.url, scene) as outlet:
        scene.lab.arrive(8, max_tokens=3)
        scene.run_until_idle()
        outlet.send(scene.watch.take_ended())
    (root,) = roots(over_http).values()
    assert attributes(root.attributes)["kvscope.kv.peak_blocks"] == len(scene.lab.blocks_of(1))


def test_of_a_request_that_was_there_before_us_is_told_what_was_seen(over_http: Receiver) -> None:
    scene = Watched()
    scene.lab.arrive(8, max_tokens=20)
    scene.steps(5)
    with sending(over_http.url, scene) as outlet:
        scene.run_until_idle()
        outlet.send(scene.watch.take_ended())
    (root,) = roots(over_http).values()
    (record,) = scene.ledger.ended
    offset = scene.now_ns - scene.lab.clock.monotonic_ns()
    assert times(root) == (record.arrived_ns + offset, record.finished_ns + offset)
    assert not attributes(root.attributes)["kvscope.story_is_whole"]


def test_a_story_with_a_gap_or_cut_short_says_so(over_http: Receiver) -> None:
    scene = Watched(max_num_batched_tokens=16, total=257)
    with sending(over_http.url, scene) as outlet:
        scene.lab.arrive(8, max_tokens=50, name="with a gap")
        scene.steps(5)
        for _ in range(5):
            scene.lab.step(0.01)
        scene.skip()
        scene.lab.arrive(8, max_tokens=5, name="after it")
        scene.run_until_idle()
        outlet.send(scene.watch.take_ended())
        outlet.follow([long_prefill(1, steps=3_000)])
        record = RequestState(1, "too long", RequestStatus.FINISHED_STOPPED, arrived_ns=1, finished_ns=2)
        outlet.send([EndedRequest("gone@127.0.0.1:0/0", record, 0)])
    whole = {name: attributes(span.attributes)["kvscope.story_is_whole"] for name, span in roots(over_http).items()}
    assert whole == {"with a gap": False, "after it": True, "too long": False}
    assert len(over_http.spans) < 3_000


def test_a_request_whose_beginning_is_not_known_has_no_trace(over_http: Receiver) -> None:
    """Joined late, in the middle of a request that only an audit named: a span from nowhere would be a lie."""
    scene = busy(Watched(total=33))
    for record in scene.ledger.ended:
        record.arrived_ns = 0
    with sending(over_http.url, scene) as outlet:
        outlet.send(scene.watch.take_ended())
    assert not over_http.spans
