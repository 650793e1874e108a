"""Which requests have a trace."""

from __future__ import annotations

from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from kvscope.monitor.contract.kinds import Status as RequestStatus
from kvscope.monitor.outputs.otel.request_spans import root_of
from tests.detectors.scenes import ENGINE, Watched, finished_held
from tests.outputs.otel.receiver import Receiver, attributes
from tests.outputs.otel.sent import busy, roots, sending


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
        outlet.report([held])
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
