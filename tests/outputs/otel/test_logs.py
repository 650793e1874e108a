"""A finding is a log record."""

from __future__ import annotations

from kvscope.monitor.outputs.otel.request_spans import root_of
from tests.detectors.scenes import ENGINE, finished_held
from tests.outputs.otel.receiver import Receiver, attributes
from tests.outputs.otel.sent import sending


def test_a_finding_is_a_log_record_when_it_fires_and_when_it_is_resolved(receiver: Receiver) -> None:
    scene = finished_held()
    with sending(receiver.url, scene) as outlet:
        scene.live(400)
        fired = [t for t in scene.watch.take_transitions() if t.finding.judgement.code == "leak.finished-held"]
        outlet.report(fired)
        report = scene.only("leak.finished-held")
        culprit = scene.ledger.request(report.culprits.requests[0])
        assert culprit is not None
        connector = scene.lab.connector
        assert connector is not None
        outlet.report([fired[0]._replace(to="resolved")])
    firing, resolved = receiver.logs
    reported = attributes(firing.attributes)
    assert firing.event_name == "kvscope.finding"
    assert firing.body.string_value == report.explanation
    assert firing.time_unix_nano == fired[0].at_ns
    assert reported["kvscope.finding.id"] == report.id
    assert reported["kvscope.finding.code"] == "leak.finished-held"
    assert reported["kvscope.finding.state"] == "firing"
    assert reported["kvscope.finding.severity"] == report.severity
    assert reported["kvscope.finding.verdict"] == report.verdict
    assert reported["kvscope.finding.runbook"] == report.runbook
    assert reported["kvscope.culprits.requests"] == report.culprits.requests
    assert reported["kvscope.culprits.blocks"] == len(report.culprits.blocks)
    assert reported["kvscope.engine"] == ENGINE
    root = root_of(ENGINE, culprit)
    assert (int.from_bytes(firing.trace_id), int.from_bytes(firing.span_id)) == (root.trace_id, root.span_id)
    assert (firing.severity_text, resolved.severity_text) == ("ERROR", "INFO")
    assert attributes(resolved.attributes)["kvscope.finding.state"] == "resolved"
