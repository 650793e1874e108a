"""The routes and inhibitions, in a real Alertmanager that is given alerts as the rules make them."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml

from kvscope.dashboards.prometheus.rules import GENERATED_RULES
from kvscope.monitor.detectors.registry import CATALOGUE
from tests.dashboards.programs import ROOT, answers, free_port, program, running, until

CONFIG = ROOT / "dashboards" / "alertmanager" / "alertmanager.yml"
GONE, STALLED, LEAKING = "gone@host:1/0", "stalled@host:2/0", "leaking@host:3/0"
Labels = dict[str, str]


@cache
def alerting_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(GENERATED_RULES.read_text())["groups"] for rule in group["rules"]]


def alert(name: str, engine: str, **wanted: str) -> Labels:
    """What the rule of that name and those labels makes of an engine."""
    (labels,) = (
        rule["labels"]
        for rule in alerting_rules()
        if rule.get("alert") == name and all(rule["labels"].get(key, value) == value for key, value in wanted.items())
    )
    return {**labels, **wanted, "alertname": name, "engine": engine}


def finding_alert(engine: str, code: str) -> Labels:
    """What the rule of that code makes of a finding of its usual severity, which the metric has as a label."""
    return {**alert("KvscopeFinding", engine, code=code), "severity": CATALOGUE[code].severity}


class GivenAlerts(NamedTuple):
    """The alerts that Alertmanager is given: by the receiver that is to get them, and those that another silences."""

    sent: dict[str, list[Labels]]
    silenced: list[Labels]

    def active(self) -> list[Labels]:
        return [labels for all_labels in self.sent.values() for labels in all_labels]


@cache
def given_alerts() -> GivenAlerts:
    leaks = [
        finding_alert(GONE, rule["labels"]["code"])
        for rule in alerting_rules()
        if rule.get("labels", {}).get("code", "").startswith("leak.")
    ]
    silent = alert("KvscopeBlind", GONE, why="no events are received")
    stall = finding_alert(STALLED, "stuck.engine-stalled")
    burns = [alert("KvscopeGoodputBurn", STALLED, severity=severity) for severity in ("critical", "error", "warning")]
    leak = finding_alert(LEAKING, "leak.finished-held")
    fast, slow = (alert("KvscopeQueueTimeBurn", LEAKING, severity=severity) for severity in ("critical", "warning"))
    return GivenAlerts({"page": [silent, stall, fast], "ticket": [leak]}, [*leaks, *burns, slow])


@pytest.fixture(scope="module")
def received() -> Iterator[tuple[str, list[tuple[str, Labels]]]]:
    """An HTTP receiver's URL, and the labels that were posted to each of its paths."""
    got: list[tuple[str, Labels]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.extend((self.path.strip("/"), one["labels"]) for one in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def alertmanager(
    tmp_path_factory: pytest.TempPathFactory, received: tuple[str, list[tuple[str, Labels]]]
) -> Iterator[str]:
    """One with the shipped configuration, our receiver in place of its URLs, that was given all of the alerts."""
    command = program("prometheus-alertmanager", "prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("alertmanager")
    config = CONFIG.read_text()
    for shipped, here in (("http://127.0.0.1:9099", received[0]), ("group_wait: 10s", "group_wait: 1s")):
        assert shipped in config
        config = config.replace(shipped, here)
    (folder / "alertmanager.yml").write_text(config)
    own = f"127.0.0.1:{free_port()}"
    arguments = [
        command,
        f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/data",
        f"--web.listen-address={own}",
        "--cluster.listen-address=",
    ]
    with running(arguments, folder / "alertmanager.log") as process:
        until(lambda: answers(f"http://{own}/-/ready"), "Alertmanager is ready", process)
        given = [{"labels": labels} for labels in (*given_alerts().active(), *given_alerts().silenced)]
        httpx2.post(f"http://{own}/api/v2/alerts", json=given, trust_env=False).raise_for_status()
        wanted = [(path, labels) for path, all_labels in given_alerts().sent.items() for labels in all_labels]
        until(lambda: all(one in received[1] for one in wanted), "what is to be told is told", process)
        yield f"http://{own}"


def test_what_another_explains_is_silenced_by_it(alertmanager: str) -> None:
    alerts: list[dict[str, Any]] = httpx2.get(f"{alertmanager}/api/v2/alerts", trust_env=False).json()
    state = {frozenset(one["labels"].items()): one["status"] for one in alerts}
    for labels in given_alerts().silenced:
        status = state[frozenset(labels.items())]
        assert status["state"] == "suppressed", labels
        assert status["inhibitedBy"]
    for labels in given_alerts().active():
        assert state[frozenset(labels.items())]["state"] == "active", labels


@pytest.mark.smoke
def test_each_alert_reaches_its_receiver_and_no_other(
    alertmanager: str, received: tuple[str, list[tuple[str, Labels]]]
) -> None:
    assert alertmanager
    for path, wanted in given_alerts().sent.items():
        reported = [labels for at, labels in received[1] if at == path]
        assert sorted(map(str, map(sorted, (one.items() for one in reported)))) == sorted(
            map(str, map(sorted, (one.items() for one in wanted)))
        )


@pytest.mark.usefixtures("real_parts")
def test_amtool_accepts_the_configuration(tmp_path: Path) -> None:
    amtool = program("amtool", "prometheus-alertmanager")
    reported = subprocess.run([amtool, "check-config", str(CONFIG)], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stdout + reported.stderr
