"""Every rule that may say *confirmed* states the facts that void it, and is not confirmed where one of them holds.

Each class of RULES has a scene in which it is confirmed, and for each stated fact the same scene with that fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from kvscope.monitor.detectors.detector import Detector, rule_of
from kvscope.monitor.detectors.judgement import ENGINE_PAUSED
from kvscope.monitor.detectors.registry import DETECTORS
from tests.detectors.rules_of_blocks import CORRUPT, LEAKS, SIZES, WASTE, Rule
from tests.detectors.rules_of_requests import HARM, PAUSED, STUCK
from tests.detectors.scenes import Observer

BY_DEFINITION: Final = "always"
"""How the *Confirmed when* of a code begins that is its own proof: nothing voids what the reader itself recorded."""


RULES: Final[Mapping[str, Rule]] = {**LEAKS, **STUCK, **WASTE, **CORRUPT, **SIZES, **HARM}


# -------------------------------------------------------------------- the tests


def confirmable() -> Iterator[Detector[Any]]:
    """The detectors that may say *confirmed*, but for those that are right by definition."""
    for detector in DETECTORS:
        when = rule_of(type(detector)).get("Confirmed when", BY_DEFINITION)
        if not when.startswith(BY_DEFINITION):
            yield detector


def facts_of(detector: Detector[Any]) -> list[str]:
    """What its rule states under *Not when*, each."""
    return [fact for fact in re.split(r"; ", rule_of(type(detector)).get("Not when", "").rstrip(".")) if fact]


def verdicts(scene: Observer, code: str) -> set[str]:
    """With which it fires, or is told as the effect of another."""
    return {each.verdict for each in [*scene.firing(), *scene.watch.findings("suppressed")] if each.code == code}


NAMES: Final = sorted(type(each).__name__ for each in confirmable())
CODES: Final = {type(each).__name__: each.code for each in confirmable()}
FACTS: Final = [(name, words) for name in sorted(RULES) for words in RULES[name].voided]


@pytest.mark.parametrize("name", sorted(PAUSED))
def test_what_stands_still_in_a_pause_is_not_confirmed(name: str) -> None:
    assert "confirmed" not in verdicts(PAUSED[name](), CODES[name])


def test_each_rule_that_a_pause_voids_has_a_scene_of_one() -> None:
    states = [type(each).__name__ for each in confirmable() if ENGINE_PAUSED in each.alternatives]
    own = {"EngineStalled", "RankDiverged"}  # among the facts of the first, and its stall is the other's
    assert sorted(set(states) - own) == sorted(PAUSED)


def test_each_class_that_may_confirm_has_a_scene() -> None:
    assert sorted(RULES) == NAMES


@pytest.mark.parametrize("detector", list(confirmable()), ids=lambda each: type(each).__name__)
def test_each_fact_that_voids_a_rule_is_stated_and_has_a_scene(detector: Detector[Any]) -> None:
    name, facts = type(detector).__name__, facts_of(detector)
    assert facts, f"{name} states no fact that voids it: add *Not when* to its docstring"
    words = RULES[name].voided
    assert [fact for fact in facts if not any(each in fact for each in words)] == [], "no scene"
    assert [each for each in words if not any(each in fact for fact in facts)] == [], "not stated"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_confirmed(name: str) -> None:
    assert "confirmed" in verdicts(RULES[name].confirmed(), CODES[name])


@pytest.mark.parametrize(("name", "fact"), FACTS)
def test_it_is_not_confirmed_against_a_fact(name: str, fact: str) -> None:
    assert "confirmed" not in verdicts(RULES[name].voided[fact](), CODES[name])
