"""Defects of the page that no other test is about."""

from __future__ import annotations

import re

from kvscope.dashboards.web import header
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.questions.pipeline import Pipeline
from tests.web.parts import ENGINE
from tests.web.test_states import at, text, texts


def worked(lab: Lab, seconds: int = 3) -> None:
    for _ in range(seconds):
        lab.arrive(20)
        lab.run_until_idle()
        lab.clock.sleep(1)
        lab.flush()


def test_a_stopped_engine_is_the_headline_and_has_no_rates() -> None:
    lab = Lab(clock=VirtualClock())
    worked(lab)
    lab.log.stopped()
    lab.flush()
    watch = Pipeline()
    watch.feed(lab.frames)
    (engine,) = watch.engines()
    assert engine.status == "stopped"
    assert engine.output_tokens_per_s is None
    here = at(watch, "/")
    assert f"{ENGINE} has stopped since" in text(PATHS[""].make(watch, here), "head")
    running = Lab(clock=VirtualClock())
    worked(running)
    watch = Pipeline()
    watch.feed(running.frames)
    assert watch.engines()[0].output_tokens_per_s is not None
    assert "has stopped" not in text(PATHS[""].make(watch, at(watch, "/")), "head")


def test_a_dead_engine_is_neither_live_nor_exact_and_has_dashes_for_rates() -> None:
    lab = Lab(clock=VirtualClock())
    worked(lab)
    watch = Pipeline()
    watch.feed(lab.frames)
    words = "".join(texts(header.header_bar(at(watch, "/engine"))))
    assert "exact" in words
    lab.log.stopped()
    lab.flush()
    watch.feed(lab.frames[-1:])
    for address in ("/", "/engine"):
        here = at(watch, address)
        words = "".join(texts(header.header_bar(here)))
        assert not re.search(r"\b(live|exact)\b", words)
        assert "not received since" in words
        view = PATHS[here.place.view].make(watch, here)
        shown = text(view, "engines") if address == "/" else text(view, "summary")
        assert "–" in shown
        assert "not known" not in shown
        assert "tok/s" not in shown


def test_a_window_with_a_restart_begins_with_it_and_leaves_out_what_is_normal() -> None:
    clock = VirtualClock()
    watch = Pipeline()
    for _ in range(2):
        lab = Lab(clock=clock)
        worked(lab)
        watch.feed(lab.frames)
        clock.sleep(60)
    first, *others = watch.explain(ENGINE).sentences
    assert first.startswith("The engine was restarted: no event was received for")
    assert not any("did not fall" in sentence for sentence in others)
    once = Pipeline()
    once.feed(lab.frames)
    assert not any("restarted" in sentence for sentence in once.explain(ENGINE).sentences)
