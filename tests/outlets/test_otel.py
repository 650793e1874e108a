"""What is sent by OpenTelemetry, to a real receiver over HTTP and over gRPC: traces, findings as logs, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from monitor.api import create_app
from monitor.events.kinds import FIRST_FINISHED, Kind, Load
from monitor.events.kinds import Status as RequestStatus
from monitor.events.records import RequestState
from monitor.events.trace_context import parse
from monitor.events.wire import Batch, Run, batch_of
from monitor.ledger.ledger import Record
from monitor.ledger.life import in_words, phases
from monitor.ledger.story import events, names_in, story_of_request
from monitor.outlets.otel.exporters import BadEndpoint
from monitor.outlets.otel.ids import root_of
from monitor.outlets.otel.outlet import OtelConfig, OtelOutlet
from monitor.outlets.otel.sender import Pace, Reasons, Sender
from monitor.outlets.prometheus import WatchCollector
from monitor.outlets.prometheus.otlp import Exemplars
from monitor.watch import Ended
from tests.detectors.scenes import ENGINE, Observer, Spoken, Watched, finished_held
from tests.outlets.otlp_receiver import GrpcReceiver, HttpReceiver, Receiver, attributes, receiving

QUICK = Pace(retry_s=0.02, most_retry_s=0.05, give_up_s=60)
PATIENCE_S = 30
TRACE = parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@pytest.fixture(scope="module", autouse=True)
def what_grpc_keeps_open() -> Iterator[None]:
    """The poller that it has for the process as long as it is used, and closes some time after."""
    with receiving(GrpcReceiver):
        yield


@pytest.fixture(params=[HttpReceiver, GrpcReceiver])
def receiver(request: pytest.FixtureRequest) -> Iterator[Receiver]:
    with receiving(request.param) as running:
        yield running


@pytest.fixture
def over_http() -> Iterator[Receiver]:
    with receiving(HttpReceiver) as running:
        yield running


@contextmanager
def sending(url: str, scene: Observer, sample: float = 1.0, pace: Pace = QUICK) -> Iterator[OtelOutlet]:
    """An outlet that follows what is fed to the scene from now on; at its end all has been sent."""
    outlet = OtelOutlet(OtelConfig(url, sample, 3600, pace), scene.watch, WatchCollector(scene.watch).collect)
    feed = scene.watch.feed

    def followed(records: Iterable[Record]) -> None:
        told = list(records)
        outlet.follow(told)
        feed(told)

    scene.watch.feed = followed  # type: ignore[method-assign]
    try:
        yield outlet
    finally:
        scene.watch.feed = feed  # type: ignore[method-assign]
        outlet.close()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def busy(scene: Watched) -> Watched:
    """Requests that end by length, one that is aborted, preemptions, prefix hits, prefill in chunks."""
    for n in range(6):
        scene.lab.arrive([*range(60), 100 + n], max_tokens=30)
    scene.steps(3)
    scene.lab.abort(scene.lab.scheduler.running[1])
    scene.run_until_idle()
    return scene


def roots(receiver: Receiver) -> dict[str, Span]:
    found = {str(attributes(span.attributes).get("gen_ai.response.id")): span for span in receiver.spans}
    found.pop("None", None)
    return found


def under(receiver: Receiver, parent: Span) -> list[Span]:
    found = [s for s in receiver.spans if s.parent_span_id == parent.span_id and s.trace_id == parent.trace_id]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


# -------------------------------------------------------------------- traces


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
        said = attributes(span.attributes)
        assert (span.name, span.kind) == ("text_completion lab", Span.SPAN_KIND_SERVER)
        assert span.start_time_unix_nano == record.arrived_ns + offset
        assert span.end_time_unix_nano == record.finished_ns + offset
        assert said["gen_ai.request.model"] == "lab"
        assert said["gen_ai.provider.name"] == "kvscope"
        assert said["gen_ai.usage.input_tokens"] == record.prompt_tokens > 0
        assert said["gen_ai.usage.output_tokens"] == record.output_tokens
        assert said["gen_ai.request.max_tokens"] == 30
        assert said["server.address"] == "127.0.0.1"
        assert said["kvscope.engine"] == scene.ledger.engine
        assert said["kvscope.kv.peak_blocks"] == record.peak_blocks > 0
        assert said["kvscope.preemptions"] == record.preemptions
        assert said["kvscope.preempted_tokens"] == record.tokens_lost
        assert said["kvscope.story_is_whole"]
        waited = [float(value) for name, value in said.items() if name.startswith("kvscope.waited.")]
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
        about = list(events(scene.ledger.recent, record.number))
        root = roots(over_http)[record.id]
        children = under(over_http, root)
        # The spans, side by side, are the phases of its life: prefill and decode make one of RUNNING.
        life = [p for p in phases(about, record.number, scene.now_ns) if p.status < FIRST_FINISHED and p.seconds]
        assert [times(span) for span in joined(over_http, children)] == [(p.since_ns, p.until_ns) for p in life]
        waits = [p for p in life if p.status != RequestStatus.RUNNING]
        assert [span.name for span in waiting(over_http, children)] == [f"wait {in_words(p)[1]}" for p in waits]
        assert children[0].start_time_unix_nano == root.start_time_unix_nano
        assert children[-1].end_time_unix_nano == root.end_time_unix_nano
        # What happened in each, line by line, but for the steps and blocks that they are made of.
        lines = [
            (line.at_ns, line.what, line.text)
            for line in story_of_request(about, record.number, names_in(scene.ledger))
            if line.what not in ("progressed", "allocated", "reused", "released")
        ]
        told = [
            (event.time_unix_nano, event.name, attributes(event.attributes)["kvscope.text"])
            for span in (root, *children, *(inside for child in children for inside in under(over_http, child)))
            for event in span.events
        ]
        assert sorted(told) == sorted(lines)
        # Each preemption, with what it cost.
        losses = [attributes(s.attributes)["kvscope.tokens_lost"] for s in children if s.name == "preempted"]
        assert len(losses) == record.preemptions
        assert sum(losses) == record.tokens_lost
        recomputed = [attributes(s.attributes)["kvscope.recomputed_tokens"] for s in children if s.name == "prefill"]
        assert sum(recomputed) == sum(p.recomputed for p in life) > 0
        decoded = [attributes(s.attributes)["kvscope.tokens"] for s in children if s.name == "decode"]
        prefills = [s for s in children if s.name == "prefill"]
        assert sum(decoded) + len(prefills) == record.output_tokens  # the last step of a prefill gives a token too


def times(span: Span) -> tuple[int, int]:
    return span.start_time_unix_nano, span.end_time_unix_nano


def waiting(receiver: Receiver, children: list[Span]) -> list[Span]:
    """The waits under a root, those of a preemption in its place."""
    return [
        wait
        for span in children if span.name not in ("prefill", "decode")
        for wait in (under(receiver, span) if span.name == "preempted" else [span])
    ]  # fmt: skip


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
    told = [(span.name, (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9) for span in under(over_http, root)]
    assert told == [
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
        outlet.send([Ended("gone@127.0.0.1:0/0", record, 0)])
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


# -------------------------------------------------------------------- sampling


def test_what_somebody_may_look_for_is_kept_whatever_the_share(over_http: Receiver) -> None:
    scene = Watched(total=33)
    with sending(over_http.url, scene, sample=0) as outlet:
        busy(scene)
        outlet.send(scene.watch.take_ended())
        slow = scene.lab.arrive(8, max_tokens=3)
        scene.run_until_idle(seconds=3)
        outlet.send(scene.watch.take_ended())
    why = {name: attributes(span.attributes)["kvscope.sampled_because"] for name, span in roots(over_http).items()}
    reasons = {record.id: "preempted" for record in scene.ledger.ended if record.preemptions}
    assert why == {"r-2": "failed", **reasons, slow.id: "slow"}
    assert len(why) < len(scene.ledger.ended)


def test_what_a_finding_names_is_kept_and_what_the_watchdog_named(over_http: Receiver) -> None:
    scene = finished_held()
    with sending(over_http.url, scene, sample=0) as outlet:
        scene.watch.take_ended()
        scene.live(400)
        (held,) = [t for t in scene.watch.take_transitions() if t.finding.judgement.code == "leak.finished-held"]
        named = held.finding.judgement.requests[0]
        outlet.tell([held])
        stalled = scene.lab.arrive(8, max_tokens=3, name="stalled")
        again = scene.lab.arrive(8, max_tokens=3, name=named)
        scene.steps(1)
        scene.lab.log.stalled(stalled.number, RequestStatus.RUNNING, 1, 0)
        scene.run_until_idle()
        outlet.send(scene.watch.take_ended())
    why = {name: attributes(span.attributes)["kvscope.sampled_because"] for name, span in roots(over_http).items()}
    assert why == {again.id: "finding leak.finished-held", stalled.id: "stuck"}


def test_the_share_is_opentelemetrys_own_so_that_services_agree(over_http: Receiver) -> None:
    scene = Watched()
    with sending(over_http.url, scene, sample=0.3) as outlet:
        for _ in range(40):
            scene.lab.arrive(4, max_tokens=1)
        scene.run_until_idle()
        ended = scene.watch.take_ended()
        outlet.send(ended)
    sampler = TraceIdRatioBased(0.3)
    expected = {
        one.request.id
        for one in ended
        if sampler.should_sample(None, root_of(ENGINE, one.request).trace_id, "").decision == Decision.RECORD_AND_SAMPLE
    }
    assert set(roots(over_http)) == expected
    assert 0 < len(expected) < 40


# -------------------------------------------------------------------- findings


def test_a_finding_is_a_log_record_when_it_fires_and_when_it_is_resolved(receiver: Receiver) -> None:
    scene = finished_held()
    with sending(receiver.url, scene) as outlet:
        scene.live(400)
        fired = [t for t in scene.watch.take_transitions() if t.finding.judgement.code == "leak.finished-held"]
        outlet.tell(fired)
        report = scene.only("leak.finished-held")
        culprit = scene.ledger.request(report.culprits.requests[0])
        assert culprit is not None
        connector = scene.lab.connector
        assert connector is not None
        outlet.tell([fired[0]._replace(to="resolved")])
    firing, resolved = receiver.logs
    told = attributes(firing.attributes)
    assert firing.event_name == "kvscope.finding"
    assert firing.body.string_value == report.explanation
    assert firing.time_unix_nano == fired[0].at_ns
    assert told["kvscope.finding.id"] == report.id
    assert told["kvscope.finding.code"] == "leak.finished-held"
    assert told["kvscope.finding.state"] == "firing"
    assert told["kvscope.finding.severity"] == report.severity
    assert told["kvscope.finding.verdict"] == report.verdict
    assert told["kvscope.finding.runbook"] == report.runbook
    assert told["kvscope.culprits.requests"] == report.culprits.requests
    assert told["kvscope.culprits.blocks"] == len(report.culprits.blocks)
    assert told["kvscope.engine"] == ENGINE
    root = root_of(ENGINE, culprit)
    assert (int.from_bytes(firing.trace_id), int.from_bytes(firing.span_id)) == (root.trace_id, root.span_id)
    assert (firing.severity_text, resolved.severity_text) == ("ERROR", "INFO")
    assert attributes(resolved.attributes)["kvscope.finding.state"] == "resolved"


# -------------------------------------------------------------------- metrics


def test_the_metrics_are_those_of_the_page(receiver: Receiver) -> None:
    scene = busy(Watched(total=33))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch))
    page = generate_latest(registry).decode()
    with sending(receiver.url, scene):
        pass  # the last snapshot is sent at the end
    (snapshot,) = receiver.snapshots
    on_page = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if family.name.startswith("kvscope_") and not family.name.startswith("kvscope_gpu_")
    }
    sent = dict(as_samples(m for m in snapshot if m.name.startswith("kvscope_") and "_gpu_" not in m.name))
    assert sent == on_page
    units = {metric.name: metric.unit for metric in snapshot}
    assert (units["kvscope_block_lifetime_seconds"], units["kvscope_blocks"]) == ("s", "")


def as_samples(metrics: Iterable[Metric]) -> Iterator[tuple[tuple[object, ...], float]]:
    """As Prometheus writes them."""
    for metric in metrics:
        kind = metric.WhichOneof("data")
        if kind == "histogram":
            assert metric.histogram.aggregation_temporality == 2
            for point in metric.histogram.data_points:
                labels, count = attributes(point.attributes), 0
                for bound, more in zip([*map(str, point.explicit_bounds), "+Inf"], point.bucket_counts, strict=True):
                    count += more
                    yield (f"{metric.name}_bucket", *sorted({**labels, "le": bound}.items())), count
                yield (f"{metric.name}_count", *sorted(labels.items())), point.count
                yield (f"{metric.name}_sum", *sorted(labels.items())), point.sum
            continue
        assert kind == "gauge" or (metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2)
        for number in metric.gauge.data_points if kind == "gauge" else metric.sum.data_points:
            labels, value = attributes(number.attributes), number.WhichOneof("value")
            name = metric.name if kind == "gauge" else f"{metric.name}_total"
            yield (name, *sorted(labels.items())), getattr(number, str(value))


def test_a_bucket_of_the_page_names_a_trace(over_http: Receiver) -> None:
    scene = Watched(total=33)
    exemplars = Exemplars()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch, exemplars=exemplars))
    with sending(over_http.url, scene) as outlet:
        busy(scene)
        for (engine, record, offset), span in outlet.send(scene.watch.take_ended()):
            exemplars.note(engine, record, (record.finished_ns + offset) / 1e9, span.trace_id, span.span_id)
    known = {span.trace_id.hex() for span in roots(over_http).values()}
    counted, with_trace = 0, 0
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        below = 0.0
        for sample in family.samples:
            if "_bucket" not in sample.name or not family.name.startswith("kvscope_request_"):
                assert sample.exemplar is None
                continue
            if family.name == "kvscope_request_waiting_seconds":
                continue
            counted += sample.value > below
            below = sample.value if sample.labels["le"] != "+Inf" else 0.0
            if sample.exemplar is not None:
                with_trace += 1
                assert sample.exemplar.labels["trace_id"] in known
                assert sample.exemplar.value <= float(sample.labels["le"])
    assert with_trace == counted > 0


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4"])
def test_the_page_has_exemplars_for_who_asks_for_openmetrics_and_the_same_figures_for_all(accept: str) -> None:
    scene = busy(Watched(total=33))
    exemplars = Exemplars()
    for engine, record, offset in scene.watch.take_ended():
        exemplars.note(engine, record, (record.finished_ns + offset) / 1e9, 1, 2)
    collector = WatchCollector(scene.watch, exemplars=exemplars)
    with TestClient(create_app(scene.watch, list, None, collector), base_url="http://localhost") as client:
        answer = client.get("/metrics", headers={"accept": accept})
    is_open = accept.startswith("application/openmetrics-text")
    assert answer.headers["content-type"].startswith("application/openmetrics-text" if is_open else "text/plain")
    exemplar = f'# {{span_id="{2:016x}",trace_id="{1:032x}"}}'
    assert (exemplar in answer.text) == is_open
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch))
    kvscopes = lambda page: {  # noqa: E731
        line.partition(" # ")[0]
        for line in page.splitlines() if line.startswith("kvscope_") and not line.startswith("kvscope_gpu_")
    }  # fmt: skip
    assert kvscopes(answer.text) == kvscopes(generate_latest(registry).decode())


# -------------------------------------------------------------------- a receiver that is not there


def test_what_a_receiver_misses_while_it_is_down_arrives_when_it_is_back(
    receiver: Receiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # of one try
    scene = Watched(total=33)
    with sending(receiver.url, scene) as outlet:
        receiver.down()
        busy(scene)
        ended = scene.watch.take_ended()
        outlet.send(ended)
        assert not scene.alarms()
        until(lambda: outlet.figures()[0].waiting)
        assert [figures.sent for figures in outlet.figures()] == [0, 0, 0]
        until(lambda: not_arriving(caplog))
        receiver.up()
        until(lambda: outlet.figures()[0].sent == len(ended))
        assert {figures.dropped for figures in outlet.figures()} == {0}
        assert outlet.figures()[0].waiting == 0
    assert set(roots(receiver)) == {one.request.id for one in ended}
    (said,) = not_arriving(caplog)
    assert "Failed to export" in said  # why, as the exporter says it


def not_arriving(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("OpenTelemetry traces do not arrive")]


@pytest.fixture
def reasons() -> Iterator[Reasons]:
    made = Reasons()
    yield made
    made.close()


class Deaf:
    """An exporter whose receiver never answers."""

    def __init__(self) -> None:
        self.tries = 0

    def export(self, batch: list[int], /) -> Load:
        self.tries += 1
        return Load.FAILED

    def shutdown(self) -> None:
        pass


def test_too_much_is_dropped_from_its_old_end_and_counted(reasons: Reasons) -> None:
    deaf = Deaf()
    sender = Sender[int]("traces", deaf, list, capacity=100, batch=10, pace=Pace(60, 60, 60), reasons=reasons)
    try:
        sender.put(0, 10)
        until(lambda: deaf.tries)  # the first is in hand
        for n in range(1, 50):
            sender.put(n, 10)
        assert sender.waiting == sender.capacity
        assert sender.dropped == 50 - 100 // 10
    finally:
        sender.close()
    assert sender.dropped == 50
    assert (sender.sent, sender.waiting) == (0, 0)


def test_what_is_refused_for_too_long_makes_room_for_what_follows(reasons: Reasons) -> None:
    deaf = Deaf()
    sender = Sender[int]("traces", deaf, list, capacity=100, batch=1, pace=Pace(0.01, 0.01, 0.02), reasons=reasons)
    try:
        sender.put(1)
        sender.put(2)
        until(lambda: sender.dropped == 2)
        assert deaf.tries >= 2 * 2
        assert sender.waiting == 0
    finally:
        sender.close()


@pytest.mark.parametrize(
    "url", ["", "localhost:4317", "ftp://localhost", "grpc://", "grpc://localhost:none", "http://:4318"]
)
def test_an_address_that_is_none_is_refused_in_words(url: str) -> None:
    scene = Watched()
    with pytest.raises(BadEndpoint, match="grpc://HOST:4317"):
        OtelOutlet(OtelConfig(url), scene.watch, WatchCollector(scene.watch).collect)


@pytest.mark.parametrize(
    ("sample", "variable", "says"),
    [(1.5, "", "from 0 to 1"), (1.0, "OTEL_METRIC_EXPORT_INTERVAL", "milliseconds"),
     (1.0, "OTEL_EXPORTER_OTLP_TIMEOUT", "seconds")],
)  # fmt: skip
def test_a_setting_that_is_none_is_refused_in_words(
    sample: float, variable: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "soon")
    scene = Watched()
    with pytest.raises(BadEndpoint, match=says):
        OtelOutlet(OtelConfig("grpc://localhost", sample), scene.watch, WatchCollector(scene.watch).collect)


def test_the_whole_path_may_be_given(over_http: Receiver) -> None:
    scene = busy(Watched(total=33))
    with sending(f"{over_http.url}/v1/traces/", scene) as outlet:
        outlet.send(scene.watch.take_ended())
    assert len(roots(over_http)) == 6
    assert len(over_http.snapshots) == 1


@pytest.mark.slow
def test_nothing_is_lost_while_a_receiver_is_down_for_half_a_minute(receiver: Receiver) -> None:
    scene = Watched(total=33)
    sent = 0
    with sending(receiver.url, scene, pace=Pace()) as outlet:
        receiver.down()
        back = time.monotonic() + 30
        while time.monotonic() < back:
            busy(scene)
            ended = scene.watch.take_ended()
            outlet.send(ended)
            sent += len(ended)
            time.sleep(1)
        receiver.up()
        until(lambda: outlet.figures()[0].sent == sent)
        assert {figures.dropped for figures in outlet.figures()} == {0}
    assert len({span.span_id for span in roots(receiver).values()}) == sent > 100


@pytest.mark.prove
def test_memory_is_flat_while_a_receiver_is_down_for_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    """50 requests a second, each with a prefill of 100 steps, to an address that nobody listens at."""
    with receiving(GrpcReceiver) as gone:
        url = gone.url
    scene = Watched()
    resident = []
    with sending(url, scene, pace=Pace()) as outlet:
        began = time.monotonic()
        for number in range(50 * 600):
            outlet.follow([long_prefill(number)])
            record = RequestState(number, f"r-{number}", RequestStatus.FINISHED_STOPPED, arrived_ns=1, finished_ns=202)
            outlet.send([Ended("gone@127.0.0.1:0/0", record, 0)])
            if number % 3000 == 2999:
                resident.append(psutil.Process().memory_info().rss / 1e6)
            time.sleep(max(0.0, began + number / 50 - time.monotonic()))
        traces = outlet.figures()[0]
    with capsys.disabled():
        print(f"\nMB resident, by the minute, with no receiver: {[round(mb) for mb in resident]}; {traces}")
    assert traces.dropped > 0
    assert traces.sent == 0
    # The queue is full after a minute and a half, and what the allocator makes of that is done in the fifth.
    assert max(resident[5:]) < 1.02 * resident[4]


def long_prefill(number: int, steps: int = 100) -> Batch:
    done = [
        event
        for step in range(steps)
        for event in (
            Run(Kind.CLOCK, 0, -1, [2 * step + 2], []),
            Run(Kind.PROGRESSED, 0, -1, [16 * step + 16, step == steps - 1], [number]),
        )
    ]
    begun = [
        Run(Kind.ARRIVED, 0, number, [1, 16 * steps, 1, 0, steps, steps + 1], []),
        Run(Kind.ADMITTED, 0, number, [0], []),
    ]
    ended = Run(Kind.FINISHED, 0, number, [RequestStatus.FINISHED_STOPPED], [])
    batch = batch_of("gone@127.0.0.1:0/0", 1, [*begun, *done, ended])
    return msgspec.structs.replace(batch, sequence=number)
