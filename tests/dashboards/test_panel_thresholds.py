"""Thresholds and units of panels: what is red from where on, and that no figure stands without its unit."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES
from kvscope.dashboards.objectives import (
    MISSED_AFTER_S,
    OBJECTIVE,
    OBJECTIVE_FIRST_TOKEN_S,
    QUEUE_S,
    UNDELIVERED_AFTER_S,
)

PANELS: Final = {
    (name, panel["title"]): panel
    for name in PAGES
    for panel in json.loads((GENERATED_PAGES / f"{name}.json").read_text())["panels"]
    if panel["type"] != "row"
}
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


def steps_of(panel: dict[str, Any]) -> list[tuple[str, float | None]]:
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    return [(step["color"], step["value"]) for step in steps]


@pytest.mark.parametrize("place", PANELS, ids="/".join)
def test_a_panel_is_red_from_its_objective_on_and_others_never_are(place: tuple[str, str]) -> None:
    panel = PANELS[place]
    steps = steps_of(panel)
    if place in BAD_FROM:
        assert steps == [("green", None), ("red", BAD_FROM[place])]
    elif place in GOOD_FROM:
        assert steps == [("red", None), ("green", GOOD_FROM[place])]
    else:
        assert "red" not in dict(steps)
    if panel["type"] == "timeseries":
        custom = panel["fieldConfig"]["defaults"]["custom"]
        is_drawn = custom.get("thresholdsStyle", {}).get("mode") == "dashed"
        assert is_drawn == (place in BAD_FROM or place in GOOD_FROM)


def test_the_table_of_thresholds_names_panels_that_there_are() -> None:
    assert {*BAD_FROM, *GOOD_FROM, *PLAIN_NUMBERS, *WHOLE} <= set(PANELS)


@pytest.mark.parametrize("place", PANELS, ids="/".join)
def test_a_figure_has_its_unit(place: tuple[str, str]) -> None:
    panel = PANELS[place]
    if panel["type"] == "table":
        return
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert (unit == "short") == (place in PLAIN_NUMBERS)
    if "_seconds" in panel["targets"][0]["expr"] and "histogram_quantile" in panel["targets"][0]["expr"]:
        assert unit == "s"
    assert panel["fieldConfig"]["defaults"].get("max") == (1 if place in WHOLE else None)
