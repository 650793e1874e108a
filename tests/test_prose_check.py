"""The prose check: every text belongs to one group, a worse text is named, and bounds only become stricter."""

from __future__ import annotations

import tomllib

import pytest

from scripts import prose_check
from scripts.prose_check import TARGETS, Measured, ceilings, measured, messages_of, worse_than, written
from scripts.prose_counts import ROOT

PLAIN = ["The probe records events.", "You set the variable.", "The reader asks for the gap."]
ODD = ["What came of it is told to nobody; whoever asks is told.", "Of one alert nothing is sent."]
BOUNDS = {"openings": 2.0, "passives": 25.0, "semicolons": 3.0, "odd_words": 1.0, "you": 0.0}


def test_a_plain_text_passes_and_an_odd_one_is_named_with_its_sentences() -> None:
    assert list(worse_than("guides", PLAIN, BOUNDS)) == []
    lines = "\n".join(worse_than("guides", ODD, BOUNDS))
    for measure in ("openings", "passives", "semicolons", "odd_words"):
        assert f"guides: {measure} at" in lines
    assert ODD[0] in lines


def test_a_floor_is_one() -> None:
    assert list(worse_than("guides", PLAIN, {**BOUNDS, "you": 1.0})) == []
    (line,) = worse_than("guides", ["The probe records events."], {**BOUNDS, "you": 8.0})
    assert "below its floor" in line


def test_a_group_without_bounds_is_not_let_through() -> None:
    (line,) = worse_than("poems", PLAIN, {})
    assert "no ceilings" in line


def test_bounds_become_stricter_down_to_the_target_and_never_laxer() -> None:
    good = Measured(openings=0.0, passives=30.2, semicolons=4.0, odd_words=9.0, you=3.7)
    bounds = tomllib.loads(written({"guides": good}, {"guides": {**BOUNDS, "passives": 28.0, "odd_words": 12.0}}))
    assert bounds["guides"] == {"openings": 2, "passives": 28, "semicolons": 3, "odd_words": 9, "you": 3}


def test_messages_are_the_strings_that_people_read() -> None:
    source = '''
"""A docstring that has more than six words in it."""
SHORT = "a label"
name = f"the pool of {engine} has {count} blocks that it can use"
raise ValueError("this is not a number that the option takes")
'''
    assert list(messages_of(source)) == [
        "the pool of code has code blocks that it can use",
        "this is not a number that the option takes",
    ]


def test_every_page_is_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(prose_check, "sentences_below", lambda path: [str(path)])
    monkeypatch.setattr(prose_check, "messages", list)
    for _, found in prose_check.text_groups():
        seen += found
    pages = [str(page) for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "accuracy"]
    assert [page for page in pages if seen.count(page) != 1] == []


def test_every_group_has_bounds_for_every_measure() -> None:
    for bounds in ceilings().values():
        assert bounds.keys() == TARGETS._asdict().keys()
    assert measured(PLAIN).you > 0
