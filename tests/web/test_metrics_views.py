"""An engine that is seen through its metrics only: the views show its data, or are absent."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvscope.dashboards.web import header
from kvscope.dashboards.web.charts import joined_gaps, over_time
from kvscope.dashboards.web.links import PageWindow, place_of, wall_ns
from kvscope.dashboards.web.pool import gaps_between, pool_row
from kvscope.dashboards.web.view import Here
from kvscope.dashboards.web.view_registry import PATHS, views_of
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import BadTime
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.questions.pipeline import Pipeline
from tests.web.parts import ENGINE

VLLM = "qwen/0@127.0.0.1:8000"
BEGAN_NS = 1_795_000_000 * 10**9
BLOCKS = 1_001
EVERY_S = 5


def sample(number: int, **figures: Any) -> Sample:
    """The scrape of that number; a third of the way on, the engine is restarted, and its counters begin anew."""
    since_start = number if number < 40 else number - 40
    known = {
        "running": number % 7,
        "waiting": number // 10,
        "deferred": min(number // 10, 2),
        "usage": number / 200,
        "preemptions": since_start // 4,
        "generation_tokens": 100 * since_start,
        "generation_tokens_per_s": 20.0,
        "prompt_tokens_per_s": 50.0,
        "prefix_hit_rate": 0.25,
        "steps": since_start,
        "restarted": number == 40,
        "source": "metrics",
    }
    return Sample(VLLM, f"scrape {number + 1}", BEGAN_NS + number * EVERY_S * 10**9, **(known | figures))


def plain_vllm(samples: int = 120) -> Pipeline:
    watch = Pipeline()
    facts = (("num_gpu_blocks", BLOCKS), ("block_size", 16), ("model", "qwen"), ("exposition", "vllm"))
    watch.feed([Fact(VLLM, "scrape 1", name, value) for name, value in facts])
    watch.feed([sample(number) for number in range(samples)])
    return watch


def at(watch: Pipeline, address: str) -> Here:
    engines = watch.engines()
    (engine,) = engines
    place = place_of(address)._replace(engine=engine.engine)
    return Here(place, place.window(wall_ns(engine.at or "", 0)), engine, engines)


def shown(watch: Pipeline, address: str) -> str:
    here = at(watch, address)
    view = PATHS[here.place.view].make(watch, here)
    text = json.dumps(view.sections, default=lambda part: part.to_plotly_json())
    return text.encode().decode("unicode_escape")


def figure(watch: Pipeline, address: str) -> dict[str, Any]:
    """What the chart of Timeline is drawn from."""
    here = at(watch, address)
    text = json.dumps(PATHS["engine"].make(watch, here).sections, default=lambda part: part.to_plotly_json())
    found: list[dict[str, Any]] = []

    def walk(tree: Any) -> None:
        if isinstance(tree, dict):
            if "figure" in tree:
                found.append(tree["figure"])
            for part in tree.values():
                walk(part)
        elif isinstance(tree, list):
            for part in tree:
                walk(part)

    walk(json.loads(text))
    (only,) = found
    return only


def trace(drawn: dict[str, Any], name: str) -> list[Any]:
    (values,) = (one["y"] for one in drawn["data"] if one.get("name") == name)
    return list(values)


def test_each_view_in_its_navigation_shows_data_of_the_engine() -> None:
    watch = plain_vllm()
    for entry in views_of("metrics"):
        text = shown(watch, f"/{entry.path}")
        assert "known by its figures" not in text
        assert len(re.sub(r"[^a-z]", "", text)) > 300, entry.path
    tabs = json.dumps(header.header_bar(at(watch, "/engine")), default=lambda part: part.to_plotly_json())
    assert "Retained blocks" not in tabs
    assert "With the stream" in tabs
    assert {"Blocks", "Retained blocks"} <= {entry.label for entry in views_of("stream")}
    assert "With the stream" not in {entry.label for entry in views_of("stream")}


def test_points_are_the_samples_and_reasons_add_up_to_the_queue() -> None:
    watch = plain_vllm()
    points = watch.points(VLLM)
    assert [point.usage for point in points] == [number / 200 for number in range(120)]
    for point in points:
        assert sum(point.waiting_by_reason.values()) == point.requests_waiting
        assert (point.free, point.usable) == (None, BLOCKS - 1)
    assert [index for index, point in enumerate(points) if point.restarted] == [40]
    thinned = watch.points(VLLM, limit=10)
    assert sum(point.restarted for point in thinned) == 1
    assert thinned[-1] == points[-1]


def test_the_chart_has_usage_queue_and_tokens_and_marks_the_restart() -> None:
    watch = plain_vllm()
    drawn = figure(watch, "/engine")
    assert trace(drawn, "in use") == pytest.approx([number / 2 for number in range(120)])
    assert trace(drawn, "for capacity")[-1] == 11 - 2
    assert set(trace(drawn, "output")) == {20.0}
    assert set(trace(drawn, "hits")) == {25.0}
    (marks,) = (one for one in drawn["data"] if one.get("meta") == "marks")
    assert marks["text"].count("The engine was restarted") == 1
    assert not [shape for shape in drawn["layout"]["shapes"] if shape["type"] == "rect"]


def test_what_happened_is_told_from_samples() -> None:
    watch = plain_vllm()
    reported = " ".join(watch.explain(VLLM).sentences)
    assert "59.5 % of the pool at most" in reported
    assert "11 requests waited (9 for capacity, 2 deferred)" in reported
    assert "restarted 1 time" in reported


def test_a_time_without_scrapes_is_a_gap_and_a_slow_scrape_is_none() -> None:
    watch = plain_vllm(30)
    watch.feed([sample(number) for number in range(90, 120)])
    points = watch.points(VLLM)
    ((since, until),) = gaps_between(points, points[-1].at_ns)
    assert (since, until) == (points[29].at_ns, points[30].at_ns)
    drawn = figure(watch, "/engine")
    (gap,) = (shape for shape in drawn["layout"]["shapes"] if shape["type"] == "rect")
    assert gap["x1"] - gap["x0"] == (90 - 29) * EVERY_S * 1000
    assert trace(drawn, "in use")[30] is None
    assert gap["label"]["text"] == "no data"
    slow = Pipeline()
    slow.feed([sample(12 * number) for number in range(20)])  # once a minute
    assert len(slow.points(VLLM, seconds=3600)) == 20
    points = slow.points(VLLM, seconds=3600)
    assert not gaps_between(points, points[-1].at_ns)


def test_gaps_that_one_moment_parts_are_one_and_a_narrow_one_has_no_words() -> None:
    second = 10**9
    gaps = [(0, 40 * second), (40 * second, 50 * second), (60 * second, 62 * second)]
    assert joined_gaps(gaps) == [(0, 50 * second), (60 * second, 62 * second)]
    moments = [at * second for at in (0, 40, 50, 60, 62, 100)]
    chart = over_time("chart", moments, [], PageWindow(0, 100 * second, False), gaps=gaps)
    drawn = json.loads(json.dumps(chart, default=lambda part: part.to_plotly_json()))
    shapes = drawn["props"]["children"][1]["props"]["children"]["props"]["figure"]["layout"]["shapes"]
    words = [(shape["x1"], shape["label"]["text"]) for shape in shapes if shape["type"] == "rect"]
    assert words == [(50_000, "no data"), (62_000, "")]


def test_the_past_shows_the_sample_of_then() -> None:
    watch = plain_vllm()
    (then,) = watch.engines(at=stamp(50))
    assert (then.running, then.waiting, then.usage) == (50 % 7, 5, 0.25)
    assert "25.0 %" in shown(watch, f"/engine?at={stamp(50)}")


def stamp(number: int) -> str:
    stamp = plain_vllm(number + 1).engines()[0].at
    assert stamp
    return stamp


def test_windows_are_compared_by_what_the_page_counts() -> None:
    watch = plain_vllm()
    diff = watch.compare(VLLM, since=stamp(60), until=stamp(119), other_since=stamp(0), other_until=stamp(59))
    rows = {row.name: row for row in diff.metrics}
    # 39 intervals before the restart, and what was generated by the scrapes after it: 0 at the first of them.
    assert rows["tokens generated"].before == pytest.approx((39 * 100 + 19 * 100) / (59 * EVERY_S))
    assert rows["tokens generated"].after == pytest.approx(20.0)
    assert rows["in use at peak"].after == 119 / 200
    assert rows["held by finished at peak"].after is None
    assert rows["tokens lost to preemptions"].change == ""
    with pytest.raises(BadTime, match="fewer than two samples"):
        watch.compare(VLLM, since="2020-01-01T00:00:00Z", until="2020-01-01T00:10:00Z")


def test_a_scrape_that_evidence_names_is_no_link() -> None:
    watch = Pipeline()
    watch.feed([Fact(VLLM, "scrape 1", "exposition", "vllm")])
    still = {"running": 3, "steps": 7, "generation_tokens": 50, "usage": 0.3}
    watch.feed([sample(number, restarted=False, **still) for number in range(60)])
    (found,) = [finding for finding in watch.findings("firing") if finding.code == "stuck.engine-stalled"]
    assert any(one.position.startswith("scrape") for one in found.evidence)
    text = shown(watch, f"/finding?id={found.id}")
    assert "at=scrape" not in text
    assert "scrape " in text


def test_a_pool_that_was_larger_before_a_restart_is_drawn_whole() -> None:
    watch = Pipeline()
    clock = VirtualClock()
    for total in (513, 201):
        lab = Lab(total=total, clock=clock)
        for _ in range(5):
            lab.arrive(20)
            lab.run_until_idle()
            clock.sleep(1)
            lab.flush()
        watch.feed(lab.frames)
        clock.sleep(60)
    points = watch.points(ENGINE, seconds=3600)
    row = pool_row(points, 100)
    assert row.top == 513
    (size,) = (one for one in row.traces if one.label == "the pool")
    assert set(size.values) == {513, 201}
    assert sum(point.restarted for point in points) == 1
    assert gaps_between(points, points[-1].at_ns)


def test_an_engine_that_computes_nothing_is_not_better_for_preempting_less() -> None:
    watch = Pipeline()
    busy = [sample(number, restarted=False, preemptions=number, generation_tokens=100 * number) for number in range(40)]
    stands = {"restarted": False, "preemptions": 40, "generation_tokens": 4000, "steps": 40}
    watch.feed([*busy, *(sample(number, **stands) for number in range(40, 80))])
    rows = {row.name: row for row in watch.compare(VLLM, since=stamp(41), until=stamp(79)).metrics}
    assert rows["tokens generated"].change == "worse"
    assert (rows["preemptions"].after, rows["preemptions"].change) == (0.0, "")
    text = shown(watch, f"/compare?from={stamp(41)}&to={stamp(79)}")
    assert "no token was computed in the second window" in text
    halves = {row.name: row for row in watch.compare(VLLM, since=stamp(20), until=stamp(39)).metrics}
    assert halves["preemptions"].change == "same"
    assert halves["tokens generated"].change == "same"


def test_the_overview_leads_with_the_engine_that_serves_no_client() -> None:
    watch = Pipeline()
    watch.feed([sample(number, restarted=False) for number in range(20)])
    stands = {name: getattr(sample(19), name) for name in ("steps", "generation_tokens", "preemptions", "usage")}
    stands |= {"restarted": False, "running": 3, "waiting": 9}
    stands |= {"generation_tokens_per_s": 0.0, "prompt_tokens_per_s": 0.0}
    watch.feed([sample(number, **stands) for number in range(20, 30)])
    text = shown(watch, "/")
    assert "has computed no token since" in text
    assert "with 12 unfinished requests" in text
    assert "No finding is open" not in text
    well = shown(plain_vllm(20), "/")
    assert "No known fault on 1 engine" in well
