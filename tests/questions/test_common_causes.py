"""Findings grouped by what their engines share: a real common cause is named, and chance is not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from kvscope.monitor.base.text import timestamp
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.fleet_overview import at_least_by_chance, common_causes
from kvscope.monitor.questions.fleet_schema import FleetCause, FleetEngineView
from tests.finding_transitions import AlertMessages

START_S = 1_800_000_000


def fleet(count: int, seed: int = 1) -> list[FleetEngineView]:
    drawn = random.Random(seed)
    return [
        FleetEngineView(
            engine=f"engine-{number}",
            harm="none",
            status="serving",
            version=drawn.choice(("vLLM 0.11", "vLLM 0.12", "vLLM 0.13")),
            zone=drawn.choice(("zone-a", "zone-b", "zone-c")),
            node=f"node-{number // 8}",
            model=drawn.choice(("llama", "qwen")),
        )
        for number in range(count)
    ]


def found(engines: Sequence[FleetEngineView], at_s: Sequence[float]) -> list[FindingReport]:
    (transition,) = AlertMessages().fire(1)
    report = transition.finding.report()
    return [
        msgspec.structs.replace(
            report, id=engine.engine, engine=engine.engine, since=timestamp(round((START_S + began_s) * 1e9))
        )
        for engine, began_s in zip(engines, at_s, strict=True)
    ]


def spread(count: int, seed: int = 2) -> list[float]:
    drawn = random.Random(seed)
    return sorted(drawn.uniform(0, 86_400) for _ in range(count))


def of_kind(causes: Sequence[FleetCause], kind: str) -> list[FleetCause]:
    return [cause for cause in causes if cause.kind == kind]


def test_a_release_that_leaks_is_named_with_its_engines_and_the_others() -> None:
    engines = fleet(300)
    hit = [engine for engine in engines if engine.version == "vLLM 0.12"][:60]
    (first, *_) = causes = common_causes(engines, found(hit, spread(60)))
    assert (first.kind, first.name, len(first.engines)) == ("release", "vLLM 0.12", 60)
    assert f"60 of {first.of_engines} engines with release vLLM 0.12 have it, and 0 of" in first.explanation
    assert first.code == "leak.finished-held"
    assert set(first.findings) == {engine.engine for engine in hit}
    assert not of_kind(causes, "time")
    assert not of_kind(causes, "zone")


def test_a_node_is_named_among_a_thousand_engines() -> None:
    engines = fleet(1_000)
    hit = [engine for engine in engines if engine.node == "node-7"]
    (first, *_) = common_causes(engines, found(hit, spread(8)))
    assert (first.kind, first.name, first.of_engines) == ("node", "node-7", 8)


def test_findings_that_began_together_are_named_by_their_time() -> None:
    engines = fleet(200)
    hit = random.Random(3).sample(engines, 12)
    times = [*(20_000 + number for number in range(9)), 100, 40_000, 80_000]
    (cause,) = of_kind(common_causes(engines, found(hit, times)), "time")
    assert len(cause.engines) == 9
    assert cause.name == timestamp((START_S + 20_000) * 10**9)
    assert "9 engines within 8 s" in cause.explanation


@pytest.mark.parametrize("seed", range(40))
def test_findings_on_engines_drawn_at_random_have_nothing_in_common(seed: int) -> None:
    engines = fleet(400, seed)
    hit = random.Random(seed).sample(engines, 40)
    causes = common_causes(engines, found(hit, spread(40, seed)))
    assert causes == []


def test_what_all_engines_share_explains_nothing() -> None:
    engines = [msgspec.structs.replace(engine, version="vLLM 0.12", zone="zone-a") for engine in fleet(50)]
    causes = common_causes(engines, found(engines, spread(50)))
    assert not of_kind(causes, "release")
    assert not of_kind(causes, "zone")


def test_two_engines_and_information_are_no_group() -> None:
    engines = fleet(400)
    pair = [engine for engine in engines if engine.node == "node-3"][:2]
    assert common_causes(engines, found(pair, [0.0, 1.0])) == []
    informed = [msgspec.structs.replace(each, severity="info") for each in found(engines[:8], [0.0] * 8)]
    assert common_causes(engines, informed) == []


def test_the_chance_is_the_hypergeometric_tail() -> None:
    assert at_least_by_chance(10, 5, 5, 5) == pytest.approx(1 / 252)
    assert at_least_by_chance(10, 10, 4, 4) == pytest.approx(1.0)
    assert at_least_by_chance(52, 13, 5, 0) == pytest.approx(1.0)
