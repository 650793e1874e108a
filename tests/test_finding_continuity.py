"""Findings across restarts, losses of sight and epochs: what is still the same finding, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.base.text import timestamp
from kvscope.monitor.detectors.findings import (
    LOOK_AGAIN_S,
    MAX_INTERVALS,
    MAX_KEPT_CULPRITS,
    MAX_RESOLVED,
    MAX_SET_ASIDE,
    RESOLVE_AFTER_NS,
    RETURNS_S,
    Finding,
    Findings,
)
from kvscope.monitor.detectors.judgement import Judgement
from kvscope.monitor.history.findings_log import FindingsLog
from kvscope.monitor.questions.windows import firing_at, touches

S = 1_000_000_000
ENGINE, OTHER = "a@127.0.0.1:1/0", "b@127.0.0.1:2/0"
LEAK, LOCKSTEP, GAP = "leak.finished-held", "collapse.lockstep", "blind.stream-gap"
AGAIN_NS, RETURNS_NS = round(LOOK_AGAIN_S * 1e9), round(RETURNS_S * 1e9)


def judged(code: str = LEAK, engine: str = ENGINE, **fields: object) -> Judgement:
    return Judgement(code, engine, "confirmed", "because", **fields)  # type: ignore[arg-type]


def changes(findings: Findings, at_ns: int, *judgements: Judgement, **update: int) -> list[str]:
    return [transition.to for transition in findings.update(ENGINE, at_ns, judgements, **update)]


# -------------------------------------------------------------------- a restart of the service


def test_a_known_problem_keeps_its_id_after_a_restart_and_a_later_one_does_not() -> None:
    before = Findings()
    before.update(ENGINE, 5 * S, [judged()])
    known = {finding.place: finding.first_seen_ns for finding in before.firing()}
    at_once, too_late = Findings(), Findings()
    at_once.remember(known, 100 * S)
    at_once.update(ENGINE, 99 * S, [judged()])
    assert at_once.firing()[0].id == before.firing()[0].id
    too_late.remember(known, 100 * S)
    too_late.update(ENGINE, 100 * S, [judged()])
    assert too_late.firing()[0].first_seen_ns == 100 * S


def test_a_known_problem_is_continued_once() -> None:
    findings = Findings()
    findings.remember({(ENGINE, LEAK, ""): 5 * S}, 2 * RETURNS_NS)
    findings.update(ENGINE, 9 * S, [judged()])
    findings.update(ENGINE, 20 * S, [])
    findings.update(ENGINE, 9 * S + RETURNS_NS, [judged()])
    seen = [finding.first_seen_ns for finding in (*findings.firing(), *findings.resolved())]
    assert seen == [9 * S + RETURNS_NS, 5 * S]


def test_what_was_over_before_a_restart_is_listed_within_the_bound() -> None:
    findings = Findings()
    for at in range(MAX_RESOLVED + 3):
        ended = Finding(judged(key=str(at)), at)
        ended.resolved_ns = at + 1
        findings.recall([ended])
    over = findings.resolved()
    assert len(over) == MAX_RESOLVED
    assert findings.by_id(over[-1].id) is over[-1]


# -------------------------------------------------------------------- a return


def over_at(at_ns: int) -> Findings:
    """A leak that was there for a second, and was last seen then."""
    findings = Findings()
    findings.update(ENGINE, at_ns - 1 * S, [judged(requests=("a",), severity="critical")])
    findings.update(ENGINE, at_ns, [judged(requests=("b",), severity="warning")])
    findings.update(ENGINE, at_ns + 5 * S, [])
    return findings


def test_a_finding_that_returns_soon_is_one_with_two_intervals() -> None:
    findings = over_at(10 * S)
    (before,) = findings.resolved()
    again_ns = 10 * S + RETURNS_NS - 1
    assert changes(findings, again_ns, judged(requests=("c",), severity="warning", since_ns=20 * S)) == ["firing"]
    (finding,) = findings.firing()
    assert (finding.id, findings.resolved()) == (before.id, [])
    assert findings.by_id(before.id) is finding
    report = finding.report()
    (interval,) = report.earlier
    assert (interval.since, interval.resolved_at) == (timestamp(9 * S), timestamp(10 * S))
    assert (report.since, report.resolved_at, report.severity) == (timestamp(20 * S), None, "warning")  # now
    assert finding.intervals(again_ns) == [(9 * S, 9 * S, 10 * S), (20 * S, again_ns, again_ns)]
    assert [bool(firing_at(findings, ENGINE, at)) for at in (9 * S, 15 * S, again_ns)] == [True, False, True]
    assert [touches(finding, at, at) for at in (9 * S, 15 * S, 20 * S)] == [True, False, True]
    changes(findings, again_ns + 5 * S)
    (over,) = findings.resolved()
    assert (over.id, over.report().culprits.requests) == (before.id, ["a", "b", "c"])


def test_intervals_of_a_problem_that_was_there_all_the_time_do_not_overlap() -> None:
    findings = over_at(10 * S)
    changes(findings, 20 * S, judged(since_ns=1 * S))
    (finding,) = findings.firing()
    assert finding.intervals(30 * S) == [(9 * S, 9 * S, 10 * S), (20 * S, 20 * S, 30 * S)]


def test_one_that_returns_later_or_in_another_process_is_another() -> None:
    for at_ns, epoch_ns in ((10 * S + RETURNS_NS, 0), (30 * S, 10 * S)):
        findings = over_at(10 * S)
        changes(findings, at_ns, judged(), epoch_ns=epoch_ns)
        (before,), (finding,) = findings.resolved(), findings.firing()
        assert (finding.id != before.id, finding.earlier) == (True, ())


def test_a_return_that_does_not_fire_leaves_the_finding_over() -> None:
    findings = over_at(10 * S)
    (before,) = findings.resolved()
    assert changes(findings, 20 * S, judged(pending=True)) == []
    assert [finding.id for finding in findings.pending()] == [before.id]
    assert findings.by_id(before.id) is before
    assert changes(findings, 30 * S) == []
    assert findings.resolved() == [before]


def test_a_finding_keeps_the_latest_of_its_intervals() -> None:
    findings = Findings()
    for number in range(MAX_INTERVALS + 2):
        changes(findings, (1 + 10 * number) * S, judged())
        changes(findings, (6 + 10 * number) * S)
    (finding,) = findings.resolved()
    assert [one.since_ns // S for one in finding.earlier] == [11 + 10 * number for number in range(MAX_INTERVALS)]


def test_a_return_is_kept_over_a_restart_of_the_service(tmp_path: Path) -> None:
    findings, log = Findings(), FindingsLog(tmp_path)
    for at_ns, judgements in ((1 * S, [judged()]), (6 * S, []), (8 * S, [judged()])):
        log.append(findings.update(ENGINE, at_ns, judgements))
    (before,) = findings.firing()
    later = Findings()
    later.recall(log.resolved())
    later.remember(log.open(), 3 * RETURNS_NS)
    later.update(ENGINE, 2 * RETURNS_NS, [judged()])
    (finding,) = later.firing()
    assert (finding.id, len(finding.earlier), later.resolved()) == (before.id, 1, [])


# -------------------------------------------------------------------- an engine that is not watched


def set_aside_at(at_ns: int) -> Findings:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(), judged(LOCKSTEP, pending=True)])
    findings.update(OTHER, 1 * S, [judged(engine=OTHER)])
    findings.set_aside(ENGINE, at_ns)
    return findings


def test_an_engine_that_is_set_aside_keeps_what_fired_and_no_other_engine_is_concerned() -> None:
    findings = set_aside_at(2 * S)
    assert [finding.judgement.engine for finding in findings.firing()] == [OTHER]
    assert [finding.place for finding in findings.set_aside_since(1 * S)] == [(ENGINE, LEAK, "")]
    assert not findings.set_aside_since(1 * S + 1)
    (aside,) = findings.set_aside_since(0)
    assert findings.by_id(aside.id) is aside


def test_only_what_fires_is_listed_of_an_engine_that_is_set_aside() -> None:
    findings = Findings()
    stalled = judged("stuck.engine-stalled", since_ns=1)
    findings.update(ENGINE, 1 * S, [stalled, judged("stuck.front-end", since_ns=2)])
    explained = [finding.judgement.code for finding in findings.suppressed()]
    findings.set_aside(ENGINE, 2 * S)
    listed = [finding.judgement.code for finding in findings.set_aside_since(0)]
    assert (explained, listed) == (["stuck.front-end"], ["stuck.engine-stalled"])


def test_an_engine_that_is_watched_again_goes_on_with_its_findings() -> None:
    findings = set_aside_at(2 * S)
    (aside,) = findings.set_aside_since(0)
    assert changes(findings, 60 * S) == []  # the detectors have time to see it again
    assert findings.firing()[-1] is aside
    assert changes(findings, 61 * S, judged()) == ["firing"]  # known, and still so
    assert changes(findings, 62 * S, judged()) == []
    assert changes(findings, 62 * S + RESOLVE_AFTER_NS) == ["resolved"]


def test_an_effect_of_an_engine_that_is_watched_again_does_not_fire() -> None:
    findings = Findings()
    both = [judged("stuck.engine-stalled", since_ns=1), judged("stuck.front-end", since_ns=2)]
    findings.update(ENGINE, 1 * S, both)
    findings.set_aside(ENGINE, 2 * S)
    again = findings.update(ENGINE, 3 * S, both)
    assert [(one.finding.judgement.code, one.to) for one in again] == [("stuck.engine-stalled", "firing")]


@pytest.mark.parametrize(("after_ns", "same"), [(AGAIN_NS - 1, True), (AGAIN_NS, False)])
def test_an_engine_that_is_watched_again_too_late_begins_anew(after_ns: int, same: bool) -> None:
    findings = set_aside_at(2 * S)
    changes(findings, 2 * S + after_ns)
    assert bool([finding for finding in findings.firing() if finding.judgement.engine == ENGINE]) is same


def test_a_finding_that_is_not_seen_again_ends_when_the_time_for_it_is_over() -> None:
    findings = set_aside_at(2 * S)
    assert changes(findings, 10 * S) == []
    assert changes(findings, 10 * S + AGAIN_NS - 1) == []
    assert changes(findings, 10 * S + AGAIN_NS) == ["resolved"]


def test_a_restart_of_the_engine_ends_what_was_set_aside() -> None:
    findings = set_aside_at(2 * S)
    assert changes(findings, 10 * S, epoch_ns=1 * S) == ["resolved"]  # it was seen at 1 s, when this epoch began


def test_findings_of_the_engines_set_aside_first_are_dropped_beyond_the_bound() -> None:
    findings = Findings()
    for number in range(MAX_SET_ASIDE + 1):
        engine = f"{number}@127.0.0.1:1/0"
        findings.update(engine, 1 * S, [judged(engine=engine), judged(LOCKSTEP, engine=engine)])
        findings.update(engine, 1 * S + RESOLVE_AFTER_NS, [judged(engine=engine)])
        findings.set_aside(engine, 5 * S)
        assert len(findings.set_aside_since(0)) == min(number + 1, MAX_SET_ASIDE)
    assert {finding.judgement.engine for finding in findings.set_aside_since(0)} == {
        f"{number}@127.0.0.1:1/0" for number in range(1, MAX_SET_ASIDE + 1)
    }
    assert len(findings.resolved()) == MAX_SET_ASIDE


def test_what_another_service_found_is_continued_beside_what_fires_here() -> None:
    there = Findings()
    there.update(ENGINE, 1 * S, [judged(), judged(LOCKSTEP)])
    here = Findings()
    here.update(ENGINE, 2 * S, [judged(), judged(LOCKSTEP, pending=True)])
    (own,) = here.firing()
    here.expect(ENGINE, there.firing())
    here.update(ENGINE, 4 * S, [judged()])
    fires = {finding.judgement.code: finding for finding in here.firing()}
    assert fires[LEAK] is own
    assert fires[LOCKSTEP].first_seen_ns == 1 * S


# -------------------------------------------------------------------- epochs and silence


@pytest.mark.parametrize(("epoch_ns", "ends"), [(5 * S - 1, False), (5 * S, True)])
def test_a_finding_ends_with_the_process_that_it_is_about(epoch_ns: int, ends: bool) -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [judged()])
    assert changes(findings, 6 * S, judged(), epoch_ns=epoch_ns) == (["resolved", "firing"] if ends else [])


def test_a_finding_about_the_observer_outlasts_the_engines_process() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [judged(GAP)])
    assert changes(findings, 6 * S, judged(GAP), epoch_ns=5 * S) == []


def test_a_code_that_settles_slowly_ends_with_its_epoch_at_once() -> None:
    same, restarted = Findings(), Findings()
    for findings in (same, restarted):
        findings.update(ENGINE, 5 * S, [judged("held.prefix-cache")])
    assert changes(same, 9 * S, epoch_ns=5 * S - 1) == []
    assert changes(restarted, 9 * S, epoch_ns=5 * S) == ["resolved"]


def test_a_silent_engine_resolves_no_finding_but_those_about_the_observer() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [judged(), judged(GAP)])
    after = findings.update(ENGINE, 60 * S, [], last_received_ns=5 * S + RESOLVE_AFTER_NS - 1)
    assert [(one.finding.judgement.code, one.to) for one in after] == [(GAP, "resolved")]
    assert changes(findings, 61 * S, last_received_ns=5 * S + RESOLVE_AFTER_NS) == ["resolved"]


# -------------------------------------------------------------------- what a finding keeps


def test_requests_of_a_finding_are_those_of_now_and_all_of_them_when_it_is_over() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(requests=("a",))])
    findings.update(ENGINE, 2 * S, [judged(requests=("b",))])
    (finding,) = findings.firing()
    assert finding.report().culprits.requests == ["b"]
    findings.update(ENGINE, 9 * S, [])
    assert finding.report().culprits.requests == ["a", "b"]


def test_requests_of_a_finding_whose_evidence_has_ended_are_all_of_them() -> None:
    findings = Findings()
    for at, name in enumerate("ab"):
        findings.update(ENGINE, at * S, [judged(requests=(name,)), judged(LOCKSTEP, requests=(name,))])
    findings.close()
    named = {finding.judgement.code: finding.report().culprits.requests for finding in findings.firing()}
    assert named == {LEAK: ["a", "b"], LOCKSTEP: ["b"]}  # a collapse recurs: the last one counts


def test_a_finding_keeps_a_bounded_number_of_requests() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(requests=tuple(str(n) for n in range(MAX_KEPT_CULPRITS)))])
    findings.update(ENGINE, 2 * S, [judged(requests=("one more",))])
    findings.update(ENGINE, 9 * S, [])
    assert len(findings.resolved()[0].report().culprits.requests) == MAX_KEPT_CULPRITS


def test_a_finding_is_as_severe_as_it_ever_was() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(severity="info")])
    (finding,) = findings.firing()
    assert finding.severity == "info"  # by its harm, not by its code
    findings.update(ENGINE, 2 * S, [judged(severity="critical")])
    findings.update(ENGINE, 3 * S, [judged(severity="warning")])
    assert finding.severity == "critical"


def test_a_problem_lasts_from_its_own_beginning_to_its_end_or_until_now() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [judged(since_ns=2 * S), judged(LOCKSTEP)])
    spans = {finding.judgement.code: finding.intervals(7 * S) for finding in findings.firing()}
    assert spans == {LEAK: [(2 * S, 5 * S, 7 * S)], LOCKSTEP: [(5 * S, 5 * S, 7 * S)]}
    findings.update(ENGINE, 60 * S, [])
    assert {finding.intervals(99 * S)[-1].resolved_ns for finding in findings.resolved()} == {5 * S}


def test_a_still_copy_does_not_change() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(requests=("a",))])
    still = findings.still()
    findings.update(ENGINE, 2 * S, [judged(requests=("b",))])
    findings.update(ENGINE, 9 * S, [])
    assert [finding.report().culprits.requests for finding in still.firing()] == [["a"]]
    assert not still.resolved()
