"""Every query of the dashboard and of the rules, asked of a real Prometheus that scrapes a real service while all that
they ask for happens.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import yaml

from dashboards.grafana.dashboard import GENERATED, HOLDER_COLOURS, as_json
from dashboards.prometheus.rules import GENERATED as RULES_FILE
from monitor.findings import runbook
from monitor.outlets.prometheus import HOLDERS
from tests.dashboards.incident_process import TOTAL
from tests.dashboards.programs import (
    Prometheus,
    answers,
    free_port,
    program,
    quick_prometheus,
    running,
    service_command,
    until,
)  # fmt: skip

DASHBOARD = yaml.safe_load(GENERATED.read_text())  # JSON is YAML
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
(BLIND,) = (rule for rule in RULES if rule.get("alert") == "KvscopeBlind")
GRACES = ("--set", "leak.finished-held.grace_s=0.5", "--set", "leak.unaccounted.grace_s=0.5")


class Query(NamedTuple):
    """An expression, and where it is shown."""

    title: str
    expr: str


def _queries() -> list[Query]:
    """All of the dashboard and the rules, with Grafana's variables filled in."""
    of_panels = [Query(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
    of_rules = [Query("KvscopeBlind", BLIND["expr"])]
    return [
        Query(title, expr.replace("$engine", ".*").replace("$__rate_interval", "3s")) for title, expr in
        of_panels + of_rules
    ]  # fmt: skip


def _reasons() -> set[str]:
    """Why KvscopeBlind may fire, as the rule names it."""
    return set(re.findall(r'"why", "([^"]+)"', BLIND["expr"]))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has seen the whole of it: a service alone, an engine with every incident, its death, the service's."""
    server = program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("queries")
    service_at, own = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    events = f"ipc://{folder}/events"
    config = quick_prometheus(folder, service_at)
    command = [server, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={own}"]
    with running(command, folder / "prometheus.log") as process:
        seen = Prometheus(f"http://{own}")
        until(lambda: answers(f"{seen.url}/-/ready"), "Prometheus is ready", process)

        def blind(why: str) -> None:
            expr = f'ALERTS{{alertname="KvscopeBlind", alertstate="firing", why="{why}"}}'
            until(lambda: seen.values(expr), f"the alert KvscopeBlind because {why}", process)

        with running(service_command(events, int(service_at.rpartition(":")[2]), *GRACES), folder / "service.log"):
            blind("none was ever heard")
            lab = [sys.executable, "-m", "tests.dashboards.incident_process", events]
            with running(lab, folder / "lab.log") as engine:
                until(lambda: not _unanswered(seen), "an answer to every query", engine)
                blind("its ledger is not exact")
                engine.send_signal(signal.SIGKILL)
                blind("it is not heard")
        blind("kvscope does not answer")
        yield seen


def _unanswered(prometheus: Prometheus) -> list[Query]:
    return [query for query in _queries() if not any(prometheus.values(query.expr))]


@pytest.mark.parametrize("query", _queries(), ids=lambda query: query.title)
def test_a_query_returns_data_that_is_not_all_zero(prometheus: Prometheus, query: Query) -> None:
    values = prometheus.values(query.expr)
    assert values, f"{query.title}: no data for {query.expr}"
    assert any(values), f"{query.title}: nothing but zeros for {query.expr}, though it happened"


def test_the_variable_finds_the_engine(prometheus: Prometheus) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["engine"]["query"])
    assert found is not None
    assert prometheus.label(found[1], found[2]) == {"lab@127.0.0.1:0/0"}


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
    (query,) = (query for query in _queries() if query.title.startswith("Balance"))
    assert set(prometheus.values(f"sum({query.expr}) and on () kvscope_ledger_exact == 1")) == {float(TOTAL)}


def test_the_checked_in_dashboard_is_the_generated_one() -> None:
    assert GENERATED.read_text() == as_json(), "run `python -m dashboards.grafana`"


def test_every_panel_says_what_it_tells_and_has_its_own_references() -> None:
    for panel in DASHBOARD["panels"]:
        assert len(panel["description"]) > len(panel["title"]), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_every_holder_has_its_colour() -> None:
    assert set(HOLDER_COLOURS) == set(HOLDERS)
