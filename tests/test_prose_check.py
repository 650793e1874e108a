"""The prose check: every text belongs to one group, a worse text is named, and bounds only become stricter."""

from __future__ import annotations

import tomllib

import pytest

from scripts import prose_check
from scripts.prose_check import LABELS, TARGETS, USER_TEXTS, Measured, ceilings, measured, worse_than, written
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


def test_no_odd_word_is_allowed_in_a_label() -> None:
    one = Measured(openings=0.0, passives=0.0, semicolons=0.0, odd_words=0.4, you=0.0)
    bounds = tomllib.loads(written({"labels": one._replace(odd_words=0.0), "findings": one}, {}))
    assert (bounds["labels"]["odd_words"], bounds["findings"]["odd_words"]) == (0, 1)
    assert {name: ceilings()[name]["odd_words"] for name in LABELS} == dict.fromkeys(LABELS, 0)


def test_every_page_is_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(prose_check, "sentences_below", lambda path: [str(path)])
    for kinds in (USER_TEXTS, LABELS):
        for name in kinds:
            monkeypatch.setitem(kinds, name, list)
    for _, found in prose_check.text_groups():
        seen += found
    pages = [str(page) for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "accuracy"]
    assert [page for page in pages if seen.count(page) != 1] == []


def test_every_group_has_bounds_for_every_measure() -> None:
    for bounds in ceilings().values():
        assert bounds.keys() == TARGETS._asdict().keys()
    assert measured(PLAIN).you > 0
