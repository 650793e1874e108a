"""Draws every page of Grafana's as a picture, from what a real Prometheus answers: to see what a panel tells.

python -m tests.dashboards.contact_sheet     writes docs/dashboards/*.png, in two minutes; it needs Prometheus, Chromium

Grafana itself is not there. A panel has the place, queries, unit, colours and thresholds that its dashboard gives it,
and Plotly draws it.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from kvscope.dashboards.grafana.pages import GENERATED_PAGES, PAGES
from tests.dashboards.programs import ROOT, Prometheus, answers, free_port, program, quick_prometheus, running, until
from tests.dashboards.scene import filled_in, lab, service, vllm_page
from tests.receiving import Server
from tests.web.parts import CHROMIUM_FLAGS

PICTURES: Final = ROOT / "docs" / "dashboards"
SECONDS: Final = 75
WIDTH: Final = 1600
ROW: Final = 34
"""Pixels of a column's and a row's unit of Grafana's grid."""
COLOURS: Final = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff9830", "#f2495c", "#5794f2", "#b877d9", "#96d98d", "#ffee52")
NAMED: Final = {
    "green": "#73bf69",
    "yellow": "#f2cc0c",
    "orange": "#ff9830",
    "blue": "#5794f2",
    "red": "#f2495c",
    "purple": "#b877d9",
}
UNITS: Final = {
    "percentunit": (".0%", ""),
    "bytes": ("~s", "B"),
    "s": ("~s", "s"),
    "short": (".3~r", ""),
    "reqps": (".3~r", " req/s"),
    "cps": (".3~r", " c/s"),
}
STYLE: Final = """
body { margin: 0; background: #111217; color: #ccccdc; font: 13px Inter, sans-serif; position: relative }
.panel { position: absolute; box-sizing: border-box; border: 4px solid #111217; background: #181b1f; overflow: hidden }
h2 { font-size: 13px; font-weight: 500; margin: 6px 10px 0 }
.figure { font-size: 26px; padding: 8px 10px; line-height: 30px } .figure small { font-size: 12px; color: #9fa7b3 }
table { border-collapse: collapse; margin: 8px 10px; width: 95% } td, th { text-align: left; padding: 3px 8px }
th { color: #6e9fff; font-weight: 500 } tr + tr { border-top: 1px solid #2c3235 }
.row { position: absolute; left: 8px } .none { padding: 30px; color: #9fa7b3 }
"""

Mark = tuple[float, float, str]
"""From when to when, and the colour, of an annotation."""


def main() -> None:
    """Write them."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as at, watched(Path(at)) as prometheus, sync_playwright() as drawing:
        browser = drawing.chromium.launch(executable_path=shutil.which("chromium"), args=list(CHROMIUM_FLAGS))
        for name in PAGES:
            dashboard = json.loads((GENERATED_PAGES / f"{name}.json").read_text())
            high = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) * ROW
            page = browser.new_page(viewport={"width": WIDTH, "height": high})
            page.set_content(as_html(dashboard, prometheus))
            page.screenshot(path=PICTURES / f"{name}.png")
            page.close()
            print(f"docs/dashboards/{name}.png written")
        browser.close()


@contextmanager
def watched(folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that has seen a lab with every incident, and a vLLM, for SECONDS, and sees them still."""
    service_at, own, events = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", f"ipc://{folder}/events"
    hook = Server()
    with vllm_page(first=30, every_s=0.5) as vllm:
        command = [
            program("prometheus", "prometheus"),
            f"--config.file={quick_prometheus(folder, service_at, vllm)}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={own}",
        ]
        with (
            running(command, folder / "prometheus.log") as process,
            running(service(events, service_at, hook.url), folder / "service.log"),
        ):
            prometheus = Prometheus(f"http://{own}")
            until(lambda: answers(f"{prometheus.url}/-/ready"), "Prometheus is ready", process)
            with running(lab(events), folder / "lab.log"):
                time.sleep(SECONDS)
                yield prometheus
    hook.stop()


def as_html(dashboard: dict[str, Any], prometheus: Prometheus) -> str:
    """The page, with all that it draws in it."""
    marks = [
        (since, until, one["iconColor"])
        for one in dashboard["annotations"].get("list", [])
        for series in prometheus.series(filled_in(one["expr"]))
        for since, until in _prefix_runs([at for at, _ in series["values"]], 1 if one["iconColor"] == "orange" else 15)
    ]
    panels = "".join(
        _row(panel) if panel["type"] == "row" else _panel(panel, prometheus, marks) for panel in dashboard["panels"]
    )
    return f"<style>{STYLE}</style><script>{get_plotlyjs()}</script>{panels}"


def _row(row: dict[str, Any]) -> str:
    return f'<h2 class="row" style="top:{row["gridPos"]["y"] * ROW}px">{html.escape(row["title"])}</h2>'


def _panel(panel: dict[str, Any], prometheus: Prometheus, marks: list[Mark]) -> str:
    at = panel["gridPos"]
    x, y, width, height = at["x"] * WIDTH / 24, at["y"] * ROW, at["w"] * WIDTH / 24, at["h"] * ROW
    found = [
        (_legend(target.get("legendFormat", ""), series["metric"]), series)
        for target in panel["targets"]
        for series in prometheus.series(filled_in(target["expr"]))
        if not target.get("instant") or series["values"][-1][0] > time.time() - 2
    ]
    if panel["type"] == "heatmap":
        inside = _heatmap(panel, found, width, height - 30)
    else:
        drawn = {"stat": _stat, "table": _table}.get(panel["type"])
        inside = drawn(panel, found) if drawn else _lines(panel, found, marks, width, height - 30)
    if not found:
        inside = f'<div class="none">{panel["fieldConfig"]["defaults"].get("noValue", "No data")}</div>'
    place = f"left:{x:.0f}px;top:{y}px;width:{width:.0f}px;height:{height}px"
    return f'<div class="panel" style="{place}"><h2>{html.escape(panel["title"])}</h2>{inside}</div>'


def _stat(panel: dict[str, Any], found: list[tuple[str, dict[str, Any]]]) -> str:
    of = panel["fieldConfig"]["defaults"]
    reported = []
    for legend, series in found:
        value = float(series["values"][-1][1])
        passed = [step["color"] for step in of["thresholds"]["steps"] if value >= (step["value"] or 0)]
        shown = f"{value:.0%}" if of["unit"] == "percentunit" else f"{value:g}{_unit(of['unit'])[1]}"
        reported.append(f'<span style="color:{NAMED[passed[-1]]}">{shown}</span> <small>{html.escape(legend)}</small>')
    return f'<div class="figure">{"<br>".join(reported)}</div>'


def _table(panel: dict[str, Any], found: list[tuple[str, dict[str, Any]]]) -> str:
    order = panel["transformations"][0]["options"]["indexByName"]
    columns = sorted(order, key=order.__getitem__)
    rows = ["".join(f"<th>{column}</th>" for column in columns)]
    for _, series in found:
        cells = series["metric"] | {"Value": series["values"][-1][1]}
        rows.append("".join(f"<td>{html.escape(cells.get(column, ''))}</td>" for column in columns))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _lines(
    panel: dict[str, Any],
    found: list[tuple[str, dict[str, Any]]],
    marks: list[Mark],
    width: float,
    height: float,
) -> str:
    of = panel["fieldConfig"]
    stacks = of["defaults"]["custom"].get("stacking", {}).get("mode") == "normal"
    fixed = {one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"] for one in of["overrides"]}
    figure = go.Figure()
    for number, (legend, series) in enumerate(found):
        colour = fixed.get(legend, COLOURS[number % len(COLOURS)])
        figure.add_scatter(
            x=[_time(at) for at, _ in series["values"]],
            y=[float(value) for _, value in series["values"]],
            name=legend,
            line={"width": 1, "color": NAMED.get(colour, colour)},
            stackgroup="one" if stacks else None,
            mode="lines" if len(series["values"]) > 1 else "markers",
        )
    for since, end, colour in marks:
        if colour == "orange":  # what is uncertain is so all the while
            figure.add_vrect(_time(since), _time(end + 0.5), fillcolor=NAMED[colour], opacity=0.3, line_width=0)
        else:
            figure.add_vline(_time(since), line={"color": NAMED[colour], "dash": "dash", "width": 1})
    tick, suffix = _unit(of["defaults"]["unit"])
    figure.update_layout(
        template="plotly_dark",
        paper_bgcolor="#181b1f",
        plot_bgcolor="#181b1f",
        width=width - 8,
        height=height,
        margin={"l": 50, "r": 10, "t": 10, "b": 10},
        font={"size": 11},
        showlegend=True,
        legend={"orientation": "h", "yanchor": "top", "y": -0.12},
        colorway=COLOURS,
    )
    figure.update_yaxes(tickformat=tick, ticksuffix=suffix, rangemode="tozero", gridcolor="#2c3235")
    figure.update_xaxes(gridcolor="#2c3235", tickformat="%H:%M:%S")
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
    return text


def _heatmap(panel: dict[str, Any], found: list[tuple[str, dict[str, Any]]], width: float, height: float) -> str:
    """Each bucket without the one below it, as Grafana draws buckets that add up."""
    bounds = sorted(found, key=lambda one: float(one[0]))
    below: dict[float, float] = {}
    rows: list[list[float | None]] = []
    for _, series in bounds:
        values = {at: float(value) for at, value in series["values"]}
        rows.append([max(0.0, values[at] - below.get(at, 0.0)) or None for at in values])
        below = values
    figure = go.Figure(
        go.Heatmap(
            x=[_time(at) for at, _ in bounds[-1][1]["values"]] if bounds else [],
            y=[f"{legend} s" for legend, _ in bounds],
            z=rows,
            colorscale=panel["options"]["color"]["scheme"],
            reversescale=True,
            showscale=False,
        )
    )
    figure.update_layout(
        template="plotly_dark",
        paper_bgcolor="#181b1f",
        plot_bgcolor="#181b1f",
        width=width - 8,
        height=height,
        margin={"l": 60, "r": 10, "t": 10, "b": 20},
        font={"size": 11},
    )
    figure.update_xaxes(tickformat="%H:%M:%S")
    figure.update_yaxes(type="category")
    text: str = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
    return text


def _unit(unit: str) -> tuple[str, str]:
    """How Plotly writes a unit of Grafana's: the format and what stands behind."""
    return (".3~r", unit.removeprefix("suffix:")) if unit.startswith("suffix:") else UNITS[unit]


def _prefix_runs(times: list[float], apart_s: float) -> Iterator[tuple[float, float]]:
    """From when to when, of moments with a mark that are so far apart or less."""
    since = until = times[0]
    for at in times[1:]:
        if at - until > apart_s:
            yield since, until
            since = at
        until = at
    yield since, until


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f"{at % 1:.3f}"[1:]


def _legend(written: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), written)


if __name__ == "__main__":
    main()
