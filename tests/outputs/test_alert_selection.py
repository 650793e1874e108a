"""Which findings alert: those whose verdict is sure enough, once it is, and those about kvscope unless refused."""

from __future__ import annotations

import pytest

from kvscope.monitor.detectors.findings import Findings, Transition
from kvscope.monitor.detectors.judgement import Judgement, Verdict
from kvscope.monitor.outputs.alerting.alerting import AlertsConfig
from kvscope.monitor.outputs.alerting.message import AlertSelection, BadSilence, alerted_finding, silence
from kvscope.monitor.service.settings_table import SETTINGS

S = 1_000_000_000
ENGINE = "a@127.0.0.1:1/0"


def judged(verdict: Verdict) -> Judgement:
    return Judgement("stuck.grammar", ENGINE, verdict, "because")


def directions(transitions: list[Transition]) -> list[str]:
    return [transition.to for transition in transitions]


def test_a_likely_finding_is_held_back_until_it_is_confirmed() -> None:
    findings, selection = Findings(), AlertSelection("confirmed")
    assert selection.select(findings.update(ENGINE, S, [judged("likely")])) == []
    assert selection.select(findings.update(ENGINE, 2 * S, [judged("likely")])) == []
    assert directions(selection.select(findings.update(ENGINE, 3 * S, [judged("confirmed")]))) == ["firing"]
    assert selection.select(findings.update(ENGINE, 4 * S, [judged("confirmed")])) == []
    assert directions(selection.select(findings.update(ENGINE, 9 * S, []))) == ["resolved"]


def test_the_end_of_a_finding_that_was_held_back_is_not_told() -> None:
    findings, selection = Findings(), AlertSelection("confirmed")
    assert selection.select(findings.update(ENGINE, S, [judged("likely")])) == []
    assert selection.select(findings.update(ENGINE, 9 * S, [])) == []


@pytest.mark.parametrize(("verdict", "is_sent"), [("cannot-tell", False), ("likely", True), ("confirmed", True)])
def test_by_default_a_doubt_alerts_nobody(verdict: Verdict, is_sent: bool) -> None:
    """So it is in a service, in a hub, and in the settings."""
    findings = Findings()
    fired = findings.update(ENGINE, S, [judged(verdict)])
    assert directions(AlertSelection().select(fired)) == (["firing"] if is_sent else [])
    assert AlertsConfig().least_verdict == SETTINGS["alert_verdict"].default == "likely"
    assert directions(AlertSelection("cannot-tell").select(fired)) == ["firing"]


def test_alerts_of_engines_only_leave_out_what_kvscope_reports_of_itself() -> None:
    findings, selection = Findings(), AlertSelection(engines_only=True)
    own = Judgement("blind.reader-failed", ENGINE, "confirmed", "because")
    fired = selection.select(findings.update(ENGINE, S, [judged("likely"), own]))
    assert [transition.finding.judgement.code for transition in fired] == ["stuck.grammar"]
    ended = selection.select(findings.update(ENGINE, 9 * S, []))
    assert [transition.finding.judgement.code for transition in ended] == ["stuck.grammar"]


def test_the_end_of_an_alert_of_an_earlier_run_is_told() -> None:
    findings = Findings()
    findings.update(ENGINE, S, [judged("confirmed")])
    ended = findings.update(ENGINE, 9 * S, [])
    assert AlertSelection("confirmed").select(ended) == ended != []


def test_a_silence_over_likely_findings_ends_when_one_is_confirmed() -> None:
    findings = Findings()
    held = silence(["verdict=likely"], 60, "", 0.0)
    selection = AlertSelection()
    (fired,) = selection.select(findings.update(ENGINE, S, [judged("likely")]))
    assert held.matches(alerted_finding(fired.finding.report(), "a", "", "firing"))
    (again,) = selection.select(findings.update(ENGINE, 2 * S, [judged("confirmed")]))
    assert again.finding is fired.finding
    assert not held.matches(alerted_finding(again.finding.report(), "a", "", "firing"))
    with pytest.raises(BadSilence):
        silence(["certainty=likely"], 60, "", 0.0)


def test_a_text_that_changes_is_let_through_every_five_minutes() -> None:
    findings, selection, let_through = Findings(), AlertSelection(), []
    for second in range(1, 1_200, 10):
        found = [Judgement("stuck.grammar", ENGINE, "likely", f"for {second} s")]
        selected = selection.select(findings.update(ENGINE, second * S, found))
        let_through += [(second, transition.at_ns) for transition in selected]
    assert [second for second, _ in let_through] == [1, 301, 601, 901]
    assert len({at_ns for _, at_ns in let_through}) == 4


def test_what_an_earlier_life_held_back_alerts_once_it_is_sure() -> None:
    """The service was killed while it held the finding back, and takes it up again from its history."""
    earlier, findings, selection = AlertSelection(), Findings(), AlertSelection()
    assert earlier.select(Findings().update(ENGINE, S, [judged("cannot-tell")])) == []
    selection.resume(findings.update(ENGINE, S, [judged("cannot-tell")]), told=())
    assert selection.select([]) == []
    assert directions(selection.select(findings.update(ENGINE, 2 * S, [judged("likely")]))) == ["firing"]
    assert directions(selection.select(findings.update(ENGINE, 9 * S, []))) == ["resolved"]


def test_what_an_earlier_life_told_is_not_told_again() -> None:
    findings, selection = Findings(), AlertSelection()
    selection.resume(findings.update(ENGINE, S, [judged("likely")]), told={(ENGINE, "stuck.grammar", "")})
    assert selection.select([]) == []
    assert selection.select(findings.update(ENGINE, 2 * S, [judged("likely")])) == []
    assert directions(selection.select(findings.update(ENGINE, 9 * S, []))) == ["resolved"]


def test_what_an_earlier_life_was_killed_before_it_told_alerts_at_once() -> None:
    findings, selection = Findings(), AlertSelection()
    selection.resume(findings.update(ENGINE, S, [judged("likely")]), told=())
    assert directions(selection.select([])) == ["firing"]
    assert selection.select([]) == []
