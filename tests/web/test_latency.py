"""The time to the first token and in the queue, from metrics: headline, table, chart, activity and comparison."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from kvscope.dashboards.web.links import place_of, wall_ns
from kvscope.dashboards.web.pictures import sparkline
from kvscope.dashboards.web.view import Here, worst_first
from kvscope.dashboards.web.views.overview_view import ENGINE_COLUMNS, engine_table, sorted_engines
from kvscope.monitor.base.errors import Unreachable
from kvscope.monitor.questions.pipeline import Pipeline
from tests.web.test_metrics_views import VLLM, figure, sample, shown, stamp, trace

MINUTE = 12
"""Scrapes."""


def slowing(queue_s: float = 90.0) -> Pipeline:
    """An engine whose requests wait in the queue for longer in the second half: four of five between two scrapes."""
    watch = Pipeline()
    for number in range(120):
        waits = 0.5 if number < 60 else queue_s
        counts = {
            "first_token_s": ((0.0, 1.0, 1), (waits, 2 * waits, 4)),
            "queue_s": ((0.0, 0.3, 1), (waits, 2 * waits, 4)),
        }
        watch.feed([sample(number, restarted=False, **counts)])
    return watch


def test_the_headline_has_a_slow_queue_and_is_not_green() -> None:
    slow = shown(slowing(), "/")
    assert re.search(r"No known fault on 1 engine; queue p95 is 3 min on qwen\S+, 11 requests waiting", slow)
    assert '"className": "well"' not in slow
    quick = shown(slowing(0.4), "/")
    assert "queue p95" not in quick
    assert '"className": "well"' in quick


def test_the_table_has_both_percentiles_of_the_last_five_minutes() -> None:
    (engine,) = slowing().engines()
    assert engine.first_token is not None
    assert engine.queue_time is not None
    assert engine.queue_time.requests == 5 * 60
    assert 90 < engine.queue_time.p50_s < engine.queue_time.p95_s < 180
    text = shown(slowing(), "/")
    assert "p50 2 min, 300 requests" in text
    none = shown(slowing(), f"/?at={stamp(0)}")
    assert "none in 5 min" not in none
    assert "none in 5 min" in shown(_without(), "/")


def _without() -> Pipeline:
    watch = Pipeline()
    watch.feed([sample(number, restarted=False) for number in range(20)])
    return watch


def test_the_chart_has_the_percentiles_of_the_minute_before_each_point() -> None:
    drawn = figure(slowing(), "/engine")
    queue = trace(drawn, "queue time, p95")
    assert max(queue[:60]) <= 1.0
    assert all(90 < value < 180 for value in queue[60 + MINUTE :])
    assert all(0.5 < value < 180 for value in queue[60 : 60 + MINUTE])
    assert len(trace(drawn, "first token, p50")) == 120
    assert not [one for one in figure(_without(), "/engine")["data"] if one.get("name") == "queue time, p95"]


def test_activity_and_summary_have_them() -> None:
    reported = " ".join(slowing().explain(VLLM).sentences)
    assert re.search(r"Time to first token: p50 .+, p95 .+ \(595 requests\)\. Queue time: p50", reported)
    assert "Queue time" not in " ".join(_without().explain(VLLM).sentences)
    text = shown(slowing(), "/engine")
    assert "First token, p95" in text
    assert "First token, p95" not in shown(_without(), "/engine")


def test_windows_are_compared_by_them() -> None:
    watch = slowing()
    diff = watch.compare(VLLM, since=stamp(60), until=stamp(119), other_since=stamp(0), other_until=stamp(59))
    rows = {row.name: row for row in diff.metrics}
    assert (rows["queue time, p95"].change, rows["first token, p95"].change) == ("worse", "worse")
    assert (rows["queue time, p95"].before or 9) < 1 < 90 < (rows["queue time, p95"].after or 0)
    same = {row.name: row for row in watch.compare(VLLM, since=stamp(90), until=stamp(119)).metrics}
    assert same["queue time, p95"].change == "same"
    none = {row.name: row for row in _without().compare(VLLM, since=stamp(10), until=stamp(19)).metrics}
    assert (none["queue time, p95"].before, none["queue time, p95"].change) == (None, "")


# -------------------------------------------------------------------- the table


def fleet() -> Pipeline:
    """Engines whose names sort otherwise than their queues; of the last one no latency is known."""
    watch = Pipeline()
    for place, queue_s in enumerate((40.0, 2.0, 9.0, None)):
        counts: dict[str, Any] = {} if queue_s is None else {"queue_s": ((queue_s, queue_s + 1, 1),)}
        for number in range(10):
            one = sample(number, restarted=False, waiting=place, **counts)
            watch.feed([msgspec.structs.replace(one, engine=f"qwen@10.0.0.{place}:8000/0")])
    return watch


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("", "3210"),  # the worst off first: by the queue
        ("queue_time", "1203"),
        ("-queue_time", "0213"),
        ("engine", "0123"),
        ("-engine", "3210"),
        ("-waiting", "3210"),
        ("first_token", "3210"),  # of none known: as they were
        ("nonsense", "3210"),
    ],
)
def test_columns_sort_and_what_is_not_known_is_last(sort: str, order: str) -> None:
    watch = fleet()
    here = at_first(watch, f"/?sort={sort}" if sort else "/")
    table = shown_table(watch, here)
    rows = [place for place, _ in re.findall(r'"children": "qwen@10\.0\.0\.(\d):8000/0", "(className|href)"', table)]
    assert "".join(rows) == order
    if sort.strip("-") in {column.parameter for column in ENGINE_COLUMNS if column.sort_key}:
        assert table.count('"aria-sort": "descending"') + table.count('"aria-sort": "ascending"') == 1


def shown_table(watch: Pipeline, here: Here) -> str:
    return json.dumps(engine_table(watch, here, here.engines, []), default=lambda part: part.to_plotly_json())


def at_first(watch: Pipeline, address: str) -> Here:
    engines = worst_first(watch.engines())
    place = place_of(address)
    return Here(place, place.window(wall_ns(engines[0].at or "", 0)), engines[0], engines)


def test_a_heading_sorts_the_most_first_then_the_least_then_no_longer() -> None:
    watch = fleet()
    address, found = "/", []
    for _ in range(3):
        here = at_first(watch, address)
        table = shown_table(watch, here)
        (address,) = re.findall(r'"Requests", [^}]*?\}[^}]*?\}\], "href": "([^"]*)"', table)
        found.append(address)
    assert found == ["/?sort=-waiting", "/?sort=waiting", "/"]


def test_every_sortable_column_has_a_value_of_an_engine_that_serves() -> None:
    (engine,) = slowing().engines()
    for column in ENGINE_COLUMNS:
        if column.sort_key is not None:
            assert column.sort_key(engine) is not None, column.name
            assert sorted_engines(column.parameter, [engine]) == [engine]


def test_a_sparkline_is_the_recent_past_with_its_extremes_in_words() -> None:
    (image,) = sparkline("Waiting requests", [4, None, 8, 2], "", (1, 2, 3))
    assert image.alt == "Waiting requests over 10 min: 2 to 8, now 2"
    path = re.findall(r"([ML])([\d.]+) ([\d.]+)", unquote(image.src))
    assert [kind for kind, _, _ in path] == ["M", "M", "L"]  # broken where nothing is known
    heights = [float(height) for _, _, height in path]
    assert heights[1] < heights[0] < heights[2]
    assert sparkline("Waiting requests", [4, None], "", (1, 2, 3)) == []
    assert sparkline("Waiting requests", [0, 0, 0], "", (1, 2, 3)) == []


def test_an_engine_whose_past_cannot_be_asked_for_has_a_row_without_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fleet()
    here = at_first(watch, "/")
    assert "Pool in use over 10 min" in shown_table(watch, here)

    def unreachable(*_: Any, **__: Any) -> None:
        raise Unreachable("the agent does not answer")

    monkeypatch.setattr(watch, "points", unreachable)
    table = shown_table(watch, here)
    assert "Pool in use over 10 min" not in table
    assert "10.0.0.3" in table
