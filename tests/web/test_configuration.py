"""A restart is marked with what it changed, and the times before and after it are a link away."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope.dashboards.web.links import place_of
from kvscope.dashboards.web.views import compare_view, configuration_view, timeline_view
from kvscope.dashboards.web.views.configuration_view import changes_text, configuration_changes
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.questions.pipeline import Pipeline
from tests.web.test_states import at, text


def restarted(first: dict[str, Any], second: dict[str, Any]) -> Pipeline:
    """Two epochs of an engine, a minute apart, each with some work."""
    watch, clock = Pipeline(), VirtualClock()
    for settings in (first, second):
        lab = Lab(clock=clock, **settings)
        for _ in range(10):
            lab.arrive(20, max_tokens=4)
            for _ in range(8):
                lab.step(0.5)
                lab.heartbeat()
        lab.flush()
        watch.feed(lab.frames)
        clock.sleep(60)
    watch.settle()
    return watch


def test_a_restart_names_what_it_changed_and_leads_to_the_comparison() -> None:
    watch = restarted({"total": 129, "max_num_seqs": 8}, {"total": 65, "max_num_seqs": 8})
    shown = text(configuration_view.view(watch, at(watch, "/configuration")), "starts")
    assert "num_gpu_blocks: 129 → 65" in shown
    assert "max_num_seqs" not in shown
    marks = text(timeline_view.view(watch, at(watch, "/engine")), "marks")
    assert "The engine was restarted: num_gpu_blocks 129 → 65" in marks
    here = at(watch, "/engine")
    (start,) = configuration_view.last_starts(watch, here)
    there = place_of(configuration_view.before_and_after(here.place, start, ""))
    view = compare_view.view(watch, at(watch, there.but()))
    assert "Before and after the last start" in text(view, "head")
    found = watch.compare(here.name, there.since, there.until, "", there.get("with_from"), there.get("with_to"))
    assert found.before.seconds == pytest.approx(found.after.seconds, abs=0.01)
    assert (found.before.until or "") < (start.after.since or "") <= (found.after.since or "")


def test_a_restart_with_the_same_configuration_says_so() -> None:
    watch = restarted({"total": 65}, {"total": 65})
    assert "nothing changed" in text(configuration_view.view(watch, at(watch, "/configuration")), "starts")
    marks = text(timeline_view.view(watch, at(watch, "/engine")), "marks")
    assert "The engine was restarted: same configuration" in marks


def test_an_engine_that_started_once_has_nothing_to_compare_its_start_with() -> None:
    watch = Pipeline()
    lab = Lab()
    lab.arrive(20, max_tokens=4)
    for _ in range(20):
        lab.step(0.5)
    lab.flush()
    watch.feed(lab.frames)
    watch.settle()
    view = configuration_view.view(watch, at(watch, "/configuration"))
    assert "No earlier epoch" in text(view, "starts")
    assert "num_gpu_blocks" in text(view, "fields")
    assert "last start" not in text(compare_view.view(watch, at(watch, "/compare")), "head")


def test_changes_that_are_many_are_counted() -> None:
    old = {"a": 1, "b": True, "c": ["x"], "d": {"e": 2}, "pid": 1}
    new = {"a": 2, "b": False, "c": [], "pid": 7}
    assert configuration_changes(old, new) == [
        ("a", "1", "2"),
        ("b", "yes", "no"),
        ("c", "x", "none"),
        ("d", "e 2", "not set"),
    ]
    assert changes_text(configuration_changes(old, new)) == "a 1 → 2, b yes → no, c x → none and 1 more"
