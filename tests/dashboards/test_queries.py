"""Every query of the dashboard and of the rules, asked of a real Prometheus that scrapes a real service while all that
they ask for happens.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kvscope.dashboards.grafana.kv_cache_page import HOLDER_COLOURS
from kvscope.dashboards.grafana.pages import ANNOTATIONS, GENERATED_PAGES, PAGES, PAGES_OF_CHART, as_json, panel_id
from kvscope.dashboards.grafana.panels import GRID_WIDTH, HEIGHT
from kvscope.dashboards.prometheus.rules import GENERATED_RULES as RULES_FILE
from kvscope.monitor.detectors.findings import runbook
from kvscope.monitor.outputs.prometheus import METRIC_HOLDERS
from tests.dashboards.incident_process import TOTAL
from tests.dashboards.programs import Prometheus, answers, free_port, program, quick_prometheus, running, until
from tests.dashboards.scene import filled_in, lab, service, vllm_page
from tests.receiving import Server

SCOPE = ("cluster", "namespace", "job", "instance")
NEVER = {
    "In use with nothing running",
    "Batches requested again, per second",
    "GPU memory by process",
    "GPU busy",
    "Sent by OpenTelemetry, and lost on the way, per second",
}
"""Panels of what need not happen: they say themselves that no data is well."""
MAY_BE_ZERO = re.compile(r"Engines with inexact figures|engine:kvscope_requests_(queued|waiting)_late")

LEADS_TO = {"fleet": "", "engine": "engine", "kv-cache": "blocks", "requests": "requests", "findings": "findings"}
"""The view of the web app that shows the same closer."""


@cache
def dashboards() -> dict[str, Any]:
    return {name: json.loads((GENERATED_PAGES / f"{name}.json").read_text()) for name in PAGES}


@cache
def panels_with_rows() -> list[tuple[str, dict[str, Any]]]:
    return [(name, panel) for name, dashboard in dashboards().items() for panel in dashboard["panels"]]


@cache
def queried_panels() -> list[tuple[str, dict[str, Any]]]:
    return [(name, panel) for name, panel in panels_with_rows() if panel["type"] != "row"]


@cache
def shipped_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]


def blind_rule() -> dict[str, Any]:
    (found,) = (rule for rule in shipped_rules() if rule.get("alert") == "KvscopeBlind")
    return found


class Shown(NamedTuple):
    """A panel, an annotation or a rule, and the expressions that it draws or keeps."""

    title: str
    expressions: tuple[str, ...]


@cache
def _shown() -> list[Shown]:
    """All of the dashboards, and those of the rules that need no finding, variables filled in."""
    found = [
        Shown(panel["title"], tuple(target["expr"] for target in panel["targets"])) for _, panel in queried_panels()
    ]
    for dashboard in dashboards().values():
        found += [Shown(one["name"], (one["expr"],)) for one in dashboard["annotations"]["list"]]
    found += [Shown(rule["record"], (rule["expr"],)) for rule in shipped_rules() if "record" in rule]
    found.append(Shown("KvscopeBlind", (blind_rule()["expr"],)))
    return [Shown(title, tuple(map(filled_in, of))) for title, of in dict.fromkeys(found)]


def _reasons() -> set[str]:
    """Why KvscopeBlind may fire, as the rule names it."""
    return set(re.findall(r'"why", "([^"]+)"', blind_rule()["expr"]))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has seen the whole of it: a service alone, an engine with every incident, its death, the service's."""
    program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("queries")
    service_at, own = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with vllm_page() as vllm:
        receiver = Server()
        try:
            yield from _seen(folder, service_at, own, vllm, receiver.url)
        finally:
            receiver.stop()


def _seen(folder: Path, service_at: str, own: str, vllm: str, hook: str) -> Iterator[Prometheus]:
    server = program("prometheus", "prometheus")
    events = f"ipc://{folder}/events"
    config = quick_prometheus(folder, service_at, vllm)
    command = [server, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={own}"]
    with running(command, folder / "prometheus.log") as process:
        seen = Prometheus(f"http://{own}")
        until(lambda: answers(f"{seen.url}/-/ready"), "Prometheus is ready", process)

        def blind(why: str) -> None:
            expr = f'ALERTS{{alertname="KvscopeBlind", alertstate="firing", why="{why}"}}'
            until(lambda: seen.values(expr), f"the alert KvscopeBlind because {why}", process)

        with running(service(events, service_at, hook), folder / "service.log"):
            blind("no engine was ever received")
            with running(lab(events), folder / "lab.log") as engine:
                waiting = [shown for shown in _shown() if shown.title not in NEVER]
                try:
                    until(lambda: _told(seen, waiting), "an answer to every query", engine)
                except AssertionError as error:
                    raise AssertionError(f"no answer to {waiting}") from error
                blind("its ledger is not exact")
                engine.send_signal(signal.SIGKILL)
                blind("no events are received")
        blind("kvscope does not answer")
        yield seen


def _told(prometheus: Prometheus, waiting: list[Shown]) -> bool:
    """Whether all have data, and more than zeros where what they show has happened; strikes out those that have."""
    waiting[:] = [shown for shown in waiting if not _tells(prometheus, shown)]
    return not waiting


def _tells(prometheus: Prometheus, shown: Shown) -> bool:
    every = [[value for value in prometheus.values(of) if not math.isnan(value)] for of in shown.expressions]
    return all(every) and (bool(MAY_BE_ZERO.match(shown.title)) or any(any(values) for values in every))


def test_a_query_returns_data_that_is_not_all_zero(prometheus: Prometheus) -> None:
    asked = [shown for shown in _shown() if shown.title not in NEVER]
    assert len(asked) > 80
    without = [shown for shown in asked if not _tells(prometheus, shown)]
    assert without == [], [{of: prometheus.values(of) for of in shown.expressions} for shown in without]


def test_the_variables_find_the_engines(prometheus: Prometheus) -> None:
    for name, dashboard in dashboards().items():
        variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
        values = {}
        for variable in variables.values():
            if variable["type"] != "query":
                continue
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert found is not None
            values[variable["name"]] = prometheus.label(filled_in(found[1]), found[2])
            assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
        assert values.pop("model" if name == "vllm" else "engine") == {
            "tiny" if name == "vllm" else "lab@127.0.0.1:0/0"
        }
        assert values.pop("job") == {"vllm" if name == "vllm" else "kvscope"}
        assert len(values.pop("instance")) == 1
        assert values == {"cluster": set(), "namespace": set()}  # without Kubernetes: All, and nothing to choose from


def test_a_choice_of_one_instance_leaves_the_others_out(prometheus: Prometheus) -> None:
    """And none of them without a choice: each query of a panel goes through the variables."""
    for name, panel in queried_panels():
        for target in panel["targets"]:
            for label in SCOPE:
                expression = target["expr"].replace(f'{label}=~"${label}"', f'{label}=~"nowhere"')
                assert expression != target["expr"], (name, panel["title"], label)
            nowhere = target["expr"].replace('instance=~"$instance"', 'instance=~"nowhere"')
            assert prometheus.values(filled_in(nowhere)) == [], (name, panel["title"])


def test_a_query_that_need_not_have_data_can_be_asked(prometheus: Prometheus) -> None:
    asked = [of for shown in _shown() if shown.title in NEVER for of in shown.expressions]
    assert asked
    for expression in asked:
        prometheus.values(expression)  # an assertion, if Prometheus finds fault with it


def test_alerts_fire_with_their_labels(prometheus: Prometheus) -> None:
    firing = 'ALERTS{alertname="%s", alertstate="firing"}'
    finding = firing % "KvscopeFinding"
    codes = prometheus.label(finding, "code")
    assert {"leak.finished-held", "leak.unaccounted", "stuck.never-fits"} <= codes
    assert prometheus.label(finding, "runbook") == {runbook(code) for code in codes}
    assert prometheus.label(finding, "engine") == {"lab@127.0.0.1:0/0"}
    assert "info" not in prometheus.label(finding, "severity")
    assert prometheus.label(firing % "KvscopeBlind", "why") == _reasons()


def test_the_bands_of_the_balance_add_up_to_the_pool_while_the_ledger_is_exact(prometheus: Prometheus) -> None:
    (balance,) = {shown for shown in _shown() if shown.title.startswith("Balance")}
    (expression,) = balance.expressions
    assert set(prometheus.values(f"sum({expression}) and on () kvscope_ledger_exact == 1")) == {float(TOTAL)}


def test_the_checked_in_dashboards_are_the_generated_ones() -> None:
    for folder, name in product((GENERATED_PAGES, PAGES_OF_CHART), PAGES):
        assert (folder / f"{name}.json").read_text() == as_json(name), "run `python -m kvscope.dashboards.grafana`"


def test_no_other_dashboard_is_checked_in() -> None:
    for folder in (GENERATED_PAGES, PAGES_OF_CHART):
        assert {path.stem for path in folder.iterdir()} == set(PAGES)


def test_every_panel_says_what_it_tells_and_what_it_cannot_and_has_its_own_references() -> None:
    limits = re.compile(r"\b(not|no|never|nor|cannot|nothing|0|only|too|until|though|depend)\b")
    for name, panel in queried_panels():
        assert limits.search(panel["description"]), f"{name}: {panel['title']}"
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)


@pytest.mark.parametrize("name", PAGES)
def test_panels_fill_their_rows_without_holes(name: str) -> None:
    """But for the end of the page's last rows: a row that ends early is one of panels alone."""
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboards()[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= GRID_WIDTH, panel["title"]
        for place in product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert place not in taken, (panel["title"], taken.get(place))
            taken[place] = panel["title"]
    last = max(y for _, y in taken)
    holes = [place for place in product(range(GRID_WIDTH), range(last - HEIGHT)) if place not in taken]
    assert holes == []


def test_titles_are_one_panels_each_but_for_what_pages_share() -> None:
    expressions: dict[str, set[str]] = {}
    for _, panel in queried_panels():
        expressions.setdefault(panel["title"], set()).add(json.dumps([target["expr"] for target in panel["targets"]]))
    assert [title for title, of in expressions.items() if len(of) > 1] == []


def test_pages_lead_to_each_other_and_to_the_web_app_with_engine_and_time() -> None:
    for name, dashboard in dashboards().items():
        names = [one["name"] for one in dashboard["annotations"]["list"]]
        assert set(names) <= set(ANNOTATIONS)
        assert len(names) == 3
        assert dashboard["uid"] == f"kvscope-{name}"
        links = {link["type"]: link for link in dashboard["links"]}
        assert set(links["dashboards"]["tags"]) <= set(dashboard["tags"])
        assert links["dashboards"]["keepTime"]
        assert links["dashboards"]["includeVars"]
        view, _, query = links["link"]["url"].removeprefix("${kvscope:raw}/").partition("?")
        assert view == LEADS_TO.get(name, "")
        assert query == ("engine=${engine:percentencode}&" * (name != "vllm")) + "${__url_time_range}"


def test_a_dashboard_can_be_edited_and_shares_its_crosshair() -> None:
    for dashboard in dashboards().values():
        assert dashboard["editable"]
        assert dashboard["graphTooltip"] == 1
        names = [variable["name"] for variable in dashboard["templating"]["list"]]
        assert set(SCOPE) <= set(names)
        rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
        assert len(rows) >= 2
        assert dashboard["panels"][0] is rows[0]


def test_a_panel_keeps_its_id_whatever_else_a_dashboard_has() -> None:
    for dashboard in dashboards().values():
        ids = {panel["id"]: panel["title"] for panel in dashboard["panels"]}
        assert len(ids) == len(dashboard["panels"])
        assert ids == {panel_id(title): title for title in ids.values()}


def test_gauge_histograms_are_heatmaps_and_no_unit_is_left_out() -> None:
    drawn = {
        target["expr"] for _, panel in queried_panels() if panel["type"] == "heatmap" for target in panel["targets"]
    }
    for histogram in ("kvscope_block_age_seconds", "kvscope_request_waiting_seconds"):
        assert any(histogram in expr for expr in drawn)
    for _, panel in queried_panels():
        if panel["type"] == "heatmap":
            assert panel["options"]["yAxis"]["unit"] == "s"
            assert {target["format"] for target in panel["targets"]} == {"heatmap"}
        elif "second" in panel["title"]:
            assert panel["fieldConfig"]["defaults"]["unit"] not in ("short", ""), panel["title"]


def test_latencies_show_exemplars_and_no_other_query_asks_for_them() -> None:
    for _, panel in queried_panels():
        for target in panel["targets"]:
            is_latency = "histogram_quantile" in target["expr"] or "increase(" in target["expr"]
            is_drawn = panel["type"] == "heatmap" or "histogram_quantile" in target["expr"]
            assert target.get("exemplar", False) == (is_latency and is_drawn), panel["title"]


def test_a_series_of_an_engine_leads_to_that_engine() -> None:
    linked = [
        panel
        for _, panel in queried_panels()
        if panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"].get("links")
    ]
    assert linked
    for panel in linked:
        (link,) = panel["fieldConfig"]["defaults"]["links"]
        assert "engine=${__field.labels.engine:percentencode}" in link["url"]
        assert all("{{engine}}" in target["legendFormat"] for target in panel["targets"])


def test_every_holder_has_its_colour() -> None:
    assert set(HOLDER_COLOURS) == set(METRIC_HOLDERS)
