"""Cause over consequence: what one trouble brings about is listed by it, and raises no alarm of its own."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.monitor.detectors.findings import EFFECT_LASTS_NS, RESOLVE_AFTER_NS, Findings
from kvscope.monitor.detectors.judgement import MIN_SHARE, SEVERITIES, HoldsBlocks, Judgement, ShortOfBlocks
from kvscope.monitor.detectors.registry import CATALOGUE, EFFECTS, explains
from tests.detectors.scenes import Watched, value

S = 1_000_000_000
ENGINE = "a@127.0.0.1:1/0"
LEAK, HEAD, THRASH = "leak.finished-held", "stuck.head-of-line", "thrash.preemption"
STALLED, FETCH = "stuck.engine-stalled", "stuck.remote-load"


def judged(code: str, since_s: int = 2, engine: str = ENGINE, **fields: object) -> Judgement:
    return Judgement(code, engine, "confirmed", "because", since_ns=since_s * S, **fields)  # type: ignore[arg-type]


def leak(blocks: int = 40, share: float | None = MIN_SHARE) -> HoldsBlocks:
    return HoldsBlocks(
        code=LEAK,
        engine=ENGINE,
        verdict="confirmed",
        explanation="because",
        since_ns=S,
        requests=("gone",),
        blocks=tuple(range(blocks)),
        share_of_pool=share,
    )


def head(needed: int = 50, free: int = 10, name: str = "head") -> ShortOfBlocks:
    return ShortOfBlocks(
        code=HEAD,
        engine=ENGINE,
        verdict="confirmed",
        explanation="because",
        since_ns=2 * S,
        key=name,
        requests=(name,),
        blocks_needed=needed,
        blocks_free_for_it=free,
    )


def firing(findings: Findings) -> list[str]:
    return [finding.judgement.code for finding in findings.firing()]


# -------------------------------------------------------------------- the table


def test_the_table_is_of_codes_and_has_no_circle() -> None:
    for cause, effects in EFFECTS.items():
        assert {cause, *effects} <= CATALOGUE.keys()

    def below(code: str, path: tuple[str, ...]) -> None:
        assert code not in path
        for effect in EFFECTS.get(code, {}):
            below(effect, (*path, code))

    for code in EFFECTS:
        below(code, ())


@pytest.mark.parametrize("cause", EFFECTS)
def test_no_effect_is_graver_than_its_cause(cause: str) -> None:
    """Else to suppress it would keep an alarm from those who are told of grave ones only."""
    gravest = max(SEVERITIES.index(CATALOGUE[effect].severity) for effect in EFFECTS[cause])
    assert gravest <= SEVERITIES.index(CATALOGUE[cause].severity)


def test_a_leak_explains_what_its_blocks_would_end() -> None:
    assert explains(leak(blocks=40), head(needed=50, free=10))
    assert not explains(leak(blocks=39), head(needed=50, free=10))
    assert not explains(leak(), head(needed=50, free=50))  # it lacks nothing
    assert explains(leak(), judged(THRASH))
    assert not explains(leak(share=MIN_SHARE / 2), judged(THRASH))
    assert not explains(leak(), judged(THRASH, since_s=0))  # it was there before
    assert not explains(leak(), judged(THRASH, engine="b@127.0.0.1:2/0"))
    assert not explains(leak(), judged("stuck.never-fits"))
    assert not explains(msgspec.structs.replace(leak(), verdict="cannot-tell"), head())


# -------------------------------------------------------------------- the life


def test_a_leak_that_starves_the_queue_is_one_finding_with_two_effects() -> None:
    findings = Findings()
    reported = findings.update(ENGINE, 9 * S, [head(), judged(THRASH, requests=("a", "b")), leak()])
    assert [(t.finding.judgement.code, t.to) for t in reported] == [(LEAK, "firing")]
    (report,) = [finding.report() for finding in findings.firing()]
    assert {e.code: e.requests for e in report.effects} == {HEAD: ["head"], THRASH: ["a", "b"]}
    assert [e.since for e in report.effects] == ["1970-01-01T00:00:02.000Z"] * 2
    suppressed = [finding.report() for finding in findings.suppressed()]
    assert {f.code: (f.state, f.caused_by) for f in suppressed} == {
        HEAD: ("suppressed", [LEAK]),
        THRASH: ("suppressed", [LEAK]),
    }
    # Another head is the same effect; all of it ends, and what the cause had brought about stays with it.
    findings.update(ENGINE, 10 * S, [head(), head(name="next"), leak()])
    assert findings.firing()[0].effects[HEAD].requests == ["head", "next"]
    reported = findings.update(ENGINE, 10 * S + RESOLVE_AFTER_NS, [])
    assert [(t.finding.judgement.code, t.to) for t in reported] == [(LEAK, "resolved")]
    (over,) = findings.resolved()
    assert sorted(over.effects) == [HEAD, THRASH]
    assert not findings.suppressed()


def test_who_was_told_of_an_effect_hears_that_it_is_over_when_its_cause_is_known() -> None:
    findings = Findings()
    pending = judged(LEAK, since_s=1, pending=True, blocks=tuple(range(40)))
    assert [t.to for t in findings.update(ENGINE, 5 * S, [head(), pending])] == ["firing"]
    reported = findings.update(ENGINE, 6 * S, [head(), leak()])
    assert sorted((t.finding.judgement.code, t.to) for t in reported) == [(LEAK, "firing"), (HEAD, "resolved")]
    assert findings.update(ENGINE, 7 * S, [head(), leak()]) == []


def test_an_effect_that_outlives_its_cause_fires() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [head(), leak()])
    reported = []
    for at in range(6, 50):
        reported += findings.update(ENGINE, at * S, [head()])
    ends, fires = reported
    assert (ends.finding.judgement.code, ends.to) == (LEAK, "resolved")
    assert (fires.finding.judgement.code, fires.to) == (HEAD, "firing")
    last_explained = ends.at_ns - S  # it could be the cause until it was resolved
    assert fires.at_ns == last_explained + EFFECT_LASTS_NS
    assert fires.finding.report().caused_by == []


@pytest.mark.parametrize(("began_s", "fires"), [(6, False), (7, True)])
def test_preemptions_counted_since_before_their_cause_ended_stay_its_effects(began_s: int, fires: bool) -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [judged(THRASH), leak()])
    reported = []
    for at in range(6, 60):
        reported += findings.update(ENGINE, at * S, [judged(THRASH, since_s=began_s)])
    assert (reported[0].finding.judgement.code, reported[0].at_ns) == (LEAK, 8 * S)  # the cause until then, seen at 7 s
    assert [one.finding.judgement.code for one in reported[1:]] == ([THRASH] if fires else [])


def test_an_effect_that_is_seen_no_more_does_not_fire_when_its_cause_has_ended() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [head(), leak()])
    for at in (6, 7, 8):
        ended = findings.update(ENGINE, at * S, [head()], last_received_ns=at * S)
    assert [(one.finding.judgement.code, one.to) for one in ended] == [(LEAK, "resolved")]
    for at in range(9, 60):
        assert findings.update(ENGINE, at * S, [], last_received_ns=8 * S) == []  # silent: it may be over or not
    assert [finding.judgement.code for finding in findings.suppressed()] == [HEAD]


def test_an_engine_that_is_judged_does_not_prolong_what_causes_of_another_explain() -> None:
    findings, other = Findings(), "b@127.0.0.1:2/0"
    there = [msgspec.structs.replace(one, engine=other) for one in (head(), leak())]
    findings.update(other, 5 * S, there)
    findings.update(ENGINE, 25 * S, [])
    reported = []
    for at in range(30, 40):
        reported += findings.update(other, at * S, there[:1])
    assert [(one.finding.judgement.code, one.at_ns) for one in reported] == [(LEAK, 30 * S), (HEAD, 35 * S)]


def test_a_cause_that_fired_explains_while_its_judgement_flickers() -> None:
    findings = Findings()
    findings.update(ENGINE, 5 * S, [leak()])
    flickers = msgspec.structs.replace(leak(), pending=True)
    assert findings.update(ENGINE, 6 * S, [flickers, head()]) == []
    assert [finding.judgement.code for finding in findings.suppressed()] == [HEAD]


def test_an_effect_that_began_at_an_unknown_time_has_none() -> None:
    findings = Findings()
    findings.update(
        ENGINE, 5 * S, [msgspec.structs.replace(leak(), since_ns=0), msgspec.structs.replace(head(), since_ns=0)]
    )
    (cause,) = findings.firing()
    assert [effect.since for effect in cause.effects.values()] == [None]


def test_the_root_lists_the_effects_of_its_effects() -> None:
    findings = Findings()
    fetch = judged(FETCH, since_s=3, requests=("waits",), blocks=tuple(range(40)))
    findings.update(ENGINE, 9 * S, [head(), fetch, judged(STALLED, since_s=1)])
    assert firing(findings) == [STALLED]
    assert sorted(findings.firing()[0].effects) == [HEAD, FETCH]
    assert {f.judgement.code: f.report().caused_by for f in findings.suppressed()} == {
        HEAD: [STALLED],
        FETCH: [STALLED],
    }


# -------------------------------------------------------------------- with the real scheduler


def starved(leaks: bool) -> Watched:
    """Four requests end, and their 64 of 96 blocks may be kept for good. Four prompts of 20 blocks are let in while
    a chunk has room; then one runs, and another comes that needs more than is left of 32, and a small one behind it.
    """
    faults = ["thrash.preemption:limit=12", *(["leak.finished-held:limit=4"] if leaks else [])]
    settings = ["stuck.head-of-line.grace_s=5", "stuck.head-of-line.min_steps=1", "thrash.preemption.min_requests=2"]
    scene = Watched(
        settings, total=97, connector_share=1.0, prefix_caching=False, max_num_batched_tokens=16, faults=faults
    )
    for _ in range(4):
        scene.lab.arrive(60, max_tokens=4)
    scene.run_until_idle()
    scene.live(12)
    for _ in range(4):
        scene.lab.arrive(80, max_tokens=12)
    scene.run_until_idle()
    scene.lab.arrive(68, max_tokens=2000, name="runs")
    scene.live(6)
    scene.lab.arrive(70, max_tokens=10, name="head")
    scene.lab.arrive(8, max_tokens=10, name="small")
    scene.live(8)
    return scene


def test_a_real_leak_and_what_it_brings_about() -> None:
    scene = starved(leaks=True)
    finding = scene.only(LEAK)
    effects = {effect.code: effect for effect in finding.effects}
    assert sorted(effects) == [HEAD, THRASH]
    assert effects[HEAD].requests == ["head"]
    (blocked,) = [f for f in scene.watch.findings("suppressed") if f.code == HEAD]
    lacks = value(blocked, "blocks_needed") - value(blocked, "blocks_free_for_it")  # type: ignore[operator]
    assert 0 < lacks <= value(finding, "blocks_held")  # type: ignore[operator]
    assert not starved(leaks=False).alarms()
