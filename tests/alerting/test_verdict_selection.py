"""Alerts by verdict: a finding is held back until its verdict is sure enough, and then told once."""

from __future__ import annotations

import pytest

from kvscope.monitor.alerting.message import alerted_finding
from kvscope.monitor.alerting.silences import BadSilence, silence
from kvscope.monitor.alerting.verdict_selection import VerdictSelection
from kvscope.monitor.detectors.judgement import Judgement, Verdict
from kvscope.monitor.findings import Findings, Transition

S = 1_000_000_000
ENGINE = "a@127.0.0.1:1/0"


def judged(verdict: Verdict) -> Judgement:
    return Judgement("stuck.grammar", ENGINE, verdict, "because")


def directions(transitions: list[Transition]) -> list[str]:
    return [transition.to for transition in transitions]


def test_a_likely_finding_is_held_back_until_it_is_confirmed() -> None:
    findings, selection = Findings(), VerdictSelection("confirmed")
    assert selection.select(findings.update(ENGINE, S, [judged("likely")])) == []
    assert selection.select(findings.update(ENGINE, 2 * S, [judged("likely")])) == []
    assert directions(selection.select(findings.update(ENGINE, 3 * S, [judged("confirmed")]))) == ["firing"]
    assert selection.select(findings.update(ENGINE, 4 * S, [judged("confirmed")])) == []
    assert directions(selection.select(findings.update(ENGINE, 9 * S, []))) == ["resolved"]


def test_the_end_of_a_finding_that_was_held_back_is_not_told() -> None:
    findings, selection = Findings(), VerdictSelection("confirmed")
    assert selection.select(findings.update(ENGINE, S, [judged("likely")])) == []
    assert selection.select(findings.update(ENGINE, 9 * S, [])) == []


@pytest.mark.parametrize("verdict", ["cannot-tell", "likely", "confirmed"])
def test_by_default_every_verdict_alerts(verdict: Verdict) -> None:
    findings, selection = Findings(), VerdictSelection()
    assert directions(selection.select(findings.update(ENGINE, S, [judged(verdict)]))) == ["firing"]


def test_the_end_of_an_alert_of_an_earlier_run_is_told() -> None:
    findings = Findings()
    findings.update(ENGINE, S, [judged("confirmed")])
    ended = findings.update(ENGINE, 9 * S, [])
    assert VerdictSelection("confirmed").select(ended) == ended != []


def test_a_silence_over_likely_findings_ends_when_one_is_confirmed() -> None:
    findings = Findings()
    held = silence(["verdict=likely"], 60, "", 0.0)
    selection = VerdictSelection()
    (fired,) = selection.select(findings.update(ENGINE, S, [judged("likely")]))
    assert held.matches(alerted_finding(fired.finding.report(), "a", "", "firing"))
    (again,) = selection.select(findings.update(ENGINE, 2 * S, [judged("confirmed")]))
    assert again.finding is fired.finding
    assert not held.matches(alerted_finding(again.finding.report(), "a", "", "firing"))
    with pytest.raises(BadSilence):
        silence(["certainty=likely"], 60, "", 0.0)
