"""The life of a finding: pending, firing, resolved; one for one trouble, however it grows."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.monitor.detectors.findings import (
    MAX_RESOLVED,
    RESOLVE_AFTER_NS,
    Findings,
    runbook,
    severity_at_least,
)
from kvscope.monitor.detectors.judgement import SEVERITIES, Evidence, FindingHarm, Judgement
from kvscope.monitor.detectors.registry import CATALOGUE

S = 1_000_000_000
SETTLES_NS = {code: round(entry.settles_s * S) for code, entry in CATALOGUE.items() if entry.settles_s}
ENGINE = "a@127.0.0.1:1/0"


def judged(code: str = "leak.finished-held", **fields: object) -> Judgement:
    return Judgement(code, ENGINE, "confirmed", "because", **fields)  # type: ignore[arg-type]


def test_pending_firing_resolved() -> None:
    findings = Findings()
    assert findings.update(ENGINE, 1 * S, [judged(pending=True)]) == []
    (finding,) = findings.pending()
    assert finding.fired_ns == 0
    assert not findings.firing()
    (fires,) = findings.update(ENGINE, 2 * S, [judged()])
    assert (fires.finding, fires.to, fires.at_ns) == (finding, "firing", 2 * S)
    assert (findings.firing(), findings.pending()) == ([finding], [])
    assert findings.update(ENGINE, 3 * S, [judged()]) == []
    (resolves,) = findings.update(ENGINE, 3 * S + RESOLVE_AFTER_NS, [])
    assert (resolves.finding, resolves.to) == (finding, "resolved")
    assert (findings.firing(), findings.resolved()) == ([], [finding])
    report = finding.report()
    assert report.state == "resolved"
    assert report.resolved_at == "1970-01-01T00:00:03.000Z"  # when it was last seen, not when that was noticed


def test_a_finding_that_is_over_names_all_its_requests_and_a_recurring_one_those_of_the_last_time() -> None:
    findings = Findings()
    for second in (1, 2):
        requests = (f"r-{second}",)
        codes = ("leak.finished-held", "collapse.lockstep")
        findings.update(ENGINE, second * S, [judged(code, requests=requests) for code in codes])
    assert [each.report().culprits.requests for each in findings.firing()] == [["r-2"], ["r-2"]]
    findings.update(ENGINE, 2 * S + max(RESOLVE_AFTER_NS, *SETTLES_NS.values()), [])
    over = {each.judgement.code: each.report().culprits.requests for each in findings.resolved()}
    assert over == {"leak.finished-held": ["r-1", "r-2"], "collapse.lockstep": ["r-2"]}


def test_of_equally_severe_findings_the_one_whose_cure_relieves_most_clients_is_first() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged("leak.unaccounted", harm=FindingHarm(0.6, 0, None, None))])
    held = [judged("leak.unaccounted", harm=FindingHarm(0.6, 0, None, None))]
    for second, waiting in ((2, 1), (3, 4)):
        held.append(judged(f"stuck.made-up-{waiting}", severity="error", harm=FindingHarm(0.6, waiting, None, None)))
        findings.update(ENGINE, second * S, held)
    assert {each.severity for each in findings.firing()} == {"error"}
    assert [each.judgement.code for each in findings.firing()] == [
        "stuck.made-up-4",
        "stuck.made-up-1",
        "leak.unaccounted",
    ]


def test_what_never_fired_is_forgotten_without_a_word() -> None:
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged(pending=True)])
    assert findings.update(ENGINE, 1 * S + RESOLVE_AFTER_NS, []) == []
    assert not findings.pending()
    assert not findings.resolved()


def test_a_judgement_that_flickers_does_not_fire_twice() -> None:
    findings = Findings()
    reported = []
    for half_seconds in range(60):
        flickers = [] if half_seconds % 5 == 4 else [judged(pending=half_seconds % 7 == 3)]
        reported += findings.update(ENGINE, half_seconds * S // 2, flickers)
    assert [t.to for t in reported] == ["firing"]
    (finding,) = findings.firing()
    assert finding.fired_ns == 0


@pytest.mark.parametrize(("code", "settles"), SETTLES_NS.items())
def test_what_hovers_about_its_threshold_is_one_finding(code: str, settles: int) -> None:
    findings, reported = Findings(), []
    for at in range(0, 4 * settles, settles // 2):
        reported += findings.update(ENGINE, at, [judged(code)])
        reported += findings.update(ENGINE, at + settles // 4, [])
    assert [t.to for t in reported] == ["firing"]
    (last,) = findings.update(ENGINE, 5 * settles, [])
    assert last.to == "resolved"
    assert last.finding.resolved_ns == at
    assert findings.update(ENGINE, 6 * settles, [judged(code, pending=True)]) == []
    findings.update(ENGINE, 6 * settles + RESOLVE_AFTER_NS, [])
    assert not findings.pending()


def test_an_id_is_the_same_in_every_release() -> None:
    """Stored alerts have it."""
    findings = Findings()
    findings.update(ENGINE, 1 * S, [judged()])
    assert findings.firing()[0].id == "934fcf1ce2eda36b"


def test_one_trouble_that_grows_is_one_finding() -> None:
    findings = Findings()
    reported = []
    for n in range(1, 10):
        evidence = (Evidence("blocks_held", n),)
        reported += findings.update(
            ENGINE, n * S, [judged(requests=tuple(f"r-{i}" for i in range(n)), evidence=evidence)]
        )
    assert len(reported) == 1
    (finding,) = findings.firing()
    assert finding.id == reported[0].finding.id
    report = finding.report()
    assert len(report.culprits.requests) == report.evidence[0].value == 9


def test_another_key_or_engine_is_another_trouble() -> None:
    findings = Findings()
    there = msgspec.structs.replace(judged(key="a"), engine="b@127.0.0.1:2/0")
    findings.update(ENGINE, 1 * S, [judged(key="a"), judged(key="b")])
    findings.update(there.engine, 1 * S, [there])
    assert len({finding.id for finding in findings.firing()}) == 3
    # An engine that is judged resolves its own findings only.
    resolved = findings.update(ENGINE, 60 * S, [])
    assert {t.finding.judgement.key for t in resolved} == {"a", "b"}
    assert [f.judgement.engine for f in findings.firing()] == [there.engine]


def test_the_worst_is_named_first_then_the_oldest() -> None:
    findings = Findings()
    codes = ["held.prefix-cache", "collapse.lockstep", "leak.unaccounted", "leak.finished-held", "stuck.engine-stalled"]
    for at, code in enumerate(codes):
        findings.update(ENGINE, at, [judged(code)])
    assert [f.judgement.code for f in findings.firing()] == [
        "stuck.engine-stalled",
        "leak.unaccounted",
        "leak.finished-held",
        "collapse.lockstep",
        "held.prefix-cache",
    ]


def test_the_resolved_are_kept_but_not_for_ever() -> None:
    findings = Findings()
    for n in range(MAX_RESOLVED + 5):
        findings.update(ENGINE, n * 10 * S, [judged(key=str(n))])
    findings.update(ENGINE, (n + 1) * 10 * S, [])
    kept = findings.resolved()
    assert len(kept) == MAX_RESOLVED
    assert kept[0].judgement.key == str(n)


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_report_of_every_code(code: str) -> None:
    """Lists are empty, never null; severity, title and runbook go by the code. held.* and blind.* are information,
    but for what kvscope no longer sees.
    """
    findings = Findings()
    (fires,) = findings.update(ENGINE, 5 * S, [judged(code, since_ns=4 * S)])
    report = msgspec.to_builtins(fires.finding.report())
    assert report["culprits"] == {"requests": [], "blocks": []}
    assert report["evidence"] == report["do_now"] == report["change"] == report["wont_help"] == []
    assert report["severity"] == CATALOGUE[code].severity
    is_sent = code == "blind.reader-failed"
    assert (report["severity"] == "info") == (code.startswith(("held.", "blind.")) and not is_sent)
    assert report["title"] == CATALOGUE[code].title
    assert report["since"] == "1970-01-01T00:00:04.000Z"
    assert report["runbook"] == runbook(code) == f"docs/runbooks/{code}.md"


def test_severities_are_ordered() -> None:
    assert SEVERITIES == ("none", "info", "warning", "error", "critical")
    for severity in SEVERITIES:
        at_least = [bar for bar in SEVERITIES if severity_at_least(severity, bar)]
        assert at_least == list(SEVERITIES[: SEVERITIES.index(severity) + 1])
