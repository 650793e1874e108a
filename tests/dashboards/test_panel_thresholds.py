"""Thresholds and units of panels: what is red from where on, and that no figure stands without its unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES
from kvscope.dashboards.objectives import (
    MISSED_AFTER_S,
    OBJECTIVE,
    OBJECTIVE_FIRST_TOKEN_S,
    QUEUE_S,
    UNDELIVERED_AFTER_S,
)

BAD_FROM: Final = {
    ("fleet", "Findings, warning or worse"): 1,
    ("fleet", "Engines with inexact figures"): 1,
    ("engine", "Findings here, warning or worse"): 1,
    ("engine", "UNACCOUNTED"): 1,
    ("engine", "Time since an engine's last event"): MISSED_AFTER_S,
    ("requests", "Queue time"): QUEUE_S,
    ("requests", "Time to first token"): OBJECTIVE_FIRST_TOKEN_S,
    ("findings", "Oldest undelivered alert"): UNDELIVERED_AFTER_S,
    ("vllm", "In use with nothing running"): 0.01,
    ("vllm", "vLLM's queue time"): QUEUE_S,
    ("vllm", "vLLM's time to first token"): OBJECTIVE_FIRST_TOKEN_S,
}
GOOD_FROM: Final = {
    ("engine", "Ledger is exact"): 1,
    ("requests", "Goodput"): OBJECTIVE,
    ("findings", "Sources in step"): 1,
}
"""All other panels have none: a full pool, a long queue or a low hit rate is not bad by itself."""
PLAIN_NUMBERS: Final = {
    ("fleet", "Findings, warning or worse"),
    ("fleet", "Engines received"),
    ("fleet", "Engines with inexact figures"),
    ("engine", "Findings here, warning or worse"),
    ("engine", "UNACCOUNTED"),
    ("engine", "Ledger is exact"),
    ("findings", "Alerts open, and silences"),
    ("findings", "Sources in step"),
}
"""Counts that their title names, of two things, or yes and no."""
WHOLE: Final = {("fleet", "Pool in use"), ("vllm", "KV cache usage over time")}
"""Usage over time, drawn against all of the pool."""


@cache
def panels() -> dict[tuple[str, str], dict[str, Any]]:
    """All panels of Grafana's pages, by page and title."""
    return {
        (name, panel["title"]): panel
        for name in PAGES
        for panel in json.loads((GENERATED_PAGES / f"{name}.json").read_text())["panels"]
        if panel["type"] != "row"
    }


def steps_of(panel: dict[str, Any]) -> list[tuple[str, float | None]]:
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    return [(step["color"], step["value"]) for step in steps]


def test_the_table_of_thresholds_names_panels_that_there_are() -> None:
    assert {*BAD_FROM, *GOOD_FROM, *PLAIN_NUMBERS, *WHOLE} <= set(panels())


def test_a_panel_is_red_from_its_objective_on_and_others_never_are() -> None:
    assert len(panels()) > 50
    assert [fault for place in panels() for fault in wrong_thresholds(place)] == []


def wrong_thresholds(place: tuple[str, str]) -> Iterator[str]:
    panel = panels()[place]
    steps = steps_of(panel)
    if place in BAD_FROM and steps != [("green", None), ("red", BAD_FROM[place])]:
        yield f"{place} is not red from {BAD_FROM[place]} on: {steps}"
    elif place in GOOD_FROM and steps != [("red", None), ("green", GOOD_FROM[place])]:
        yield f"{place} is not green from {GOOD_FROM[place]} on: {steps}"
    elif place not in BAD_FROM and place not in GOOD_FROM and "red" in dict(steps):
        yield f"{place} has no objective and is red: {steps}"
    if panel["type"] == "timeseries":
        style = panel["fieldConfig"]["defaults"]["custom"].get("thresholdsStyle", {}).get("mode")
        if (style == "dashed") != (place in BAD_FROM or place in GOOD_FROM):
            yield f"{place} draws its threshold as {style}"


def test_a_figure_has_its_unit() -> None:
    assert [fault for place in panels() for fault in wrong_units(place)] == []


def wrong_units(place: tuple[str, str]) -> Iterator[str]:
    panel = panels()[place]
    if panel["type"] == "table":
        return
    unit, most = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"].get("max")
    query = panel["targets"][0]["expr"]
    if (unit == "short") != (place in PLAIN_NUMBERS):
        yield f"{place} has the unit {unit}"
    if "_seconds" in query and "histogram_quantile" in query and unit != "s":
        yield f"{place} shows seconds as {unit}"
    if most != (1 if place in WHOLE else None):
        yield f"{place} ends at {most}"
