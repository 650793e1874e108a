"""The severity of a finding follows its harm, it does not flap, and each alternative is excluded or named."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Release, Status
from kvscope.monitor.detectors.findings import Findings
from kvscope.monitor.detectors.judgement import FindingHarm, HoldsBlocks, Judgement, Severity
from kvscope.monitor.detectors.measured_harm import severity_by_harm
from kvscope.monitor.detectors.registry import CATALOGUE, sources_of
from tests.detectors import scenes, stuck
from tests.detectors.scenes import Spoken, Watched

S = 1_000_000_000
ENGINE = "a@127.0.0.1:1/0"
NONE = FindingHarm(0.0, 0, 0.0, 0.0)


def held(severity: Severity, share: float = 0.3, since_s: int = 1, requests: tuple[str, ...] = ("r",)) -> HoldsBlocks:
    return HoldsBlocks(
        code="leak.unaccounted",
        engine=ENGINE,
        verdict="confirmed",
        explanation="because",
        since_ns=since_s * S,
        share_of_pool=share,
        severity=severity,
        requests=requests,
    )


def one_block_is_left(total: int) -> Spoken:
    scene = Spoken(total=total)
    scene.arrive(1, [1, 2, 3])
    scene.log.released(1, [1, 2], Release.ABORTED)
    scene.log.finished(1, Status.FINISHED_ABORTED)
    for _ in range(6):
        scene.wait(1)
    return scene


def test_one_block_of_a_large_pool_is_a_warning() -> None:
    (finding,) = one_block_is_left(500_001).firing("leak.unaccounted")
    assert finding.severity == "warning"
    assert finding.harm == FindingHarm(share_of_pool=0.0, requests_waiting=0, share_of_requests=0.0, lost_s=0.0)


def test_one_block_of_a_small_pool_is_an_error() -> None:
    (finding,) = one_block_is_left(33).firing("leak.unaccounted")
    assert finding.severity == "error"
    assert finding.harm is not None
    assert finding.harm.share_of_pool == round(1 / 32, 4)


@pytest.mark.parametrize(
    ("harm", "severity"),
    [
        (NONE, "warning"),
        (FindingHarm(0.0099, 1, 0.0099, 599.0), "warning"),
        (FindingHarm(0.01, 0, 0.0, 0.0), "error"),
        (FindingHarm(0.0, 1, 0.01, 0.0), "error"),
        (FindingHarm(0.0, 1, 0.0, 600.0), "error"),
    ],
)
def test_each_harm_alone_makes_an_error(harm: FindingHarm, severity: Severity) -> None:
    judged = Judgement("stuck.grammar", ENGINE, "likely", "because")
    assert severity_by_harm(judged, "error", harm, 90.0) == severity
    assert severity_by_harm(judged, "warning", harm, 90.0) == "warning"


@pytest.mark.parametrize(
    ("share", "waiting", "lasts_s", "severity"),
    [
        (0.24, 0, 60, "info"),
        (0.24, 1, 60, "info"),
        (0.25, 0, 60, "warning"),
        (0.25, 1, 60, "error"),
        (0.49, 0, 60, "warning"),
        (0.5, 0, 60, "error"),
        (0.9, 0, 59, "info"),
    ],
)
def test_blocks_that_do_not_return_are_out_of_use_whatever_the_reason(
    share: float, waiting: int, lasts_s: float, severity: Severity
) -> None:
    harm = FindingHarm(share, waiting, 0.0, 0.0)
    assert severity_by_harm(held("info"), "info", harm, lasts_s) == severity
    assert severity_by_harm(Judgement("stuck.grammar", ENGINE, "likely", "x"), "info", harm, lasts_s) == "info"


def test_the_severity_of_an_open_finding_rises_and_never_falls() -> None:
    findings = Findings()
    for at_s, severity in enumerate(("warning", "error", "warning"), start=1):
        findings.update(ENGINE, at_s * S, [held(severity)])  # type: ignore[arg-type]
    assert [finding.severity for finding in findings.firing()] == ["error"]
    findings.update(ENGINE, 10 * S, [])
    findings.update(ENGINE, 11 * S, [held("warning")])
    assert [finding.severity for finding in findings.firing()] == ["warning"]


def test_a_silent_engine_resolves_nothing() -> None:
    findings = Findings()
    findings.update(ENGINE, S, [held("error")], last_received_ns=S)
    assert not findings.update(ENGINE, 60 * S, [], last_received_ns=S)
    assert [finding.judgement.code for finding in findings.firing()] == ["leak.unaccounted"]
    (ended,) = findings.update(ENGINE, 61 * S, [], last_received_ns=61 * S)
    assert ended.to == "resolved"


def test_a_finding_ends_with_its_epoch_though_the_next_has_the_same() -> None:
    findings = Findings()
    findings.update(ENGINE, S, [held("error")])
    (first,) = findings.firing()
    transitions = findings.update(ENGINE, 3 * S, [held("error", since_s=3)], epoch_ns=2 * S)
    assert [(one.to, one.finding is first) for one in transitions] == [("resolved", True), ("firing", False)]


def test_a_finding_that_is_over_names_all_that_it_ever_named() -> None:
    findings = Findings()
    findings.update(ENGINE, S, [held("error", requests=("r-1", "r-2"))])
    findings.update(ENGINE, 2 * S, [held("error", requests=("r-2", "r-3"))])
    (finding,) = findings.firing()
    assert finding.report().culprits.requests == ["r-2", "r-3"]
    findings.close()
    assert finding.report().culprits.requests == ["r-1", "r-2", "r-3"]


def test_a_code_that_the_stream_shows_names_its_alternatives() -> None:
    needs = {code for code, entry in CATALOGUE.items() if "stream" in sources_of(code) and entry.severity != "info"}
    judged_by_arithmetic = {"sizing.elsewhere", "sizing.kv-too-large", "sizing.overreserved", "sizing.bad-suggestion"}
    seen_in_kvscope_itself = {"blind.reader-failed"}
    assert {code for code in needs if not CATALOGUE[code].alternatives} == judged_by_arithmetic | seen_in_kvscope_itself


def some_scenes() -> list[tuple[str, Watched]]:
    return [
        ("leak.finished-held", scenes.finished_held()),
        ("leak.unaccounted", scenes.unaccounted()),
        ("stuck.grammar", stuck.grammar()[0]),
        ("stuck.never-fits", scenes.never_fits()[0]),
    ]


@pytest.mark.parametrize("index", range(4))
def test_a_verdict_follows_from_what_is_excluded(index: int) -> None:
    code, scene = some_scenes()[index]
    scene.live(45)
    (finding,) = scene.firing(code)
    remaining = [one.name for one in finding.alternatives if not one.excluded_by]
    assert finding.alternatives
    assert bool(remaining) == (finding.verdict != "confirmed")
