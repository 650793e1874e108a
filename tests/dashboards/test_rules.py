"""The alerting rules: by hand-made series, and by those that the exporter makes of a leak from its begin to its end."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvscope.dashboards.prometheus.rules import GENERATED_RULES, RULES_OF_CHART, as_yaml
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import runbook, severity_at_least
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.questions.pipeline import Pipeline
from tests.dashboards.programs import program

RULES = GENERATED_RULES
ABSENT = "_"


def _promtool(*arguments: str | Path) -> None:
    promtool = program("promtool", "prometheus")
    reported = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr


def test_the_rules_are_well_formed() -> None:
    _promtool("check", "rules", RULES)


def test_the_checked_in_rules_are_the_generated_ones() -> None:
    for path in (GENERATED_RULES, RULES_OF_CHART):
        assert path.read_text() == as_yaml(), "run `python -m kvscope.dashboards.prometheus`"


def test_every_code_that_is_more_than_information_has_its_alert_with_its_runbook() -> None:
    groups = yaml.safe_load(GENERATED_RULES.read_text())["groups"]
    labels = [rule["labels"] for group in groups for rule in group["rules"] if rule.get("alert") == "KvscopeFinding"]
    assert {of["code"]: of["runbook"] for of in labels} == {
        code: runbook(code) for code, entry in CATALOGUE.items() if entry.severity != "info"
    }
    assert len({of["code"] for of in labels}) == len(labels)


@pytest.mark.slow
def test_the_rules_do_what_they_say() -> None:
    _promtool("test", "rules", Path(__file__).parent / "rules.yml")


def test_the_alert_begins_and_ends_with_the_finding(tmp_path: Path) -> None:
    """One second of the lab's time is one scrape; what the alert must be, the finding says."""
    lab = Lab(connector_share=1.0, faults=["leak.finished-held:limit=1"])
    assert lab.connector is not None
    request = lab.arrive(10, max_tokens=4)
    while not lab.faults.on["leak.finished-held"].affected:
        lab.step()
    watch, fed = Pipeline(Settings({"leak.finished-held.unseen_times": 0})), 0
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(watch))
    series: defaultdict[str, dict[int, float]] = defaultdict(dict)
    firing: list[bool] = []
    first_received = 0.0
    for second in range(40):
        lab.clock.sleep(1.0)
        if second == 20:
            lab.connector.request_finished(request, lab.blocks_of(request.number))  # and it completes after all
            while request.number in lab.scheduler.deferred:
                lab.step()
        lab.heartbeat()
        watch.feed(lab.frames[fed:])
        fed = len(lab.frames)
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = ", ".join(f'{name}="{value}"' for name, value in sample.labels.items())
                value = sample.value
                if sample.name == "kvscope_engine_last_heard_timestamp_seconds":
                    first_received = first_received or value
                    value -= first_received  # promtool's time begins at 0
                series[f"{sample.name}{{{labels}}}"][second] = value
        firing.append(any(severity_at_least(found.severity, "warning") for found in watch.findings("firing")))
    assert sorted(set(firing)) == [False, True]
    assert not firing[-1]
    (finding,) = watch.findings("resolved")
    alert = (
        f'ALERTS{{alertname="KvscopeFinding", alertstate="firing", engine="{finding.engine}", code="{finding.code}",'
        f' severity="{finding.severity}", runbook="{finding.runbook}"}}'
    )
    values = {
        name: " ".join(str(at.get(second, "stale" if second - 1 in at else ABSENT)) for second in range(len(firing)))
        for name, at in series.items()
    }
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1s",
        "tests": [
            {
                "interval": "1s",
                "input_series": [{"series": name, "values": text} for name, text in values.items()],
                "promql_expr_test": [
                    {
                        "expr": "ALERTS",
                        "eval_time": f"{second}s",
                        "exp_samples": [{"labels": alert, "value": 1}] if fires else [],
                    }
                    for second, fires in enumerate(firing)
                ],
            }
        ],
    }
    path = tmp_path / "recorded.yml"
    path.write_text(yaml.safe_dump(test))
    _promtool("test", "rules", path)
