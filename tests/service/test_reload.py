"""`monitor serve --config` and `monitor agent` as processes: reloads, broken files, and what needs a restart."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec
import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.outputs.alerting.receivers import BadReceiver
from tests.finding_transitions import ENGINE, AlertMessages
from tests.test_service import process, receiver
from tests.waiting import until


@contextmanager
def service(command: str, path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    with process("kvscope.monitor", command, "--port", "0", "--config", str(path), *flags) as started:
        assert started.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", started.stderr.readline())
        assert address is not None
        with httpx2.Client(base_url=address[0], trust_env=False) as client:
            yield started, client


def targets(client: httpx2.Client) -> list[str]:
    return sorted(source["target"] for source in client.get("/api/sources").json())


def configured(client: httpx2.Client) -> dict[str, object]:
    health = client.get("/healthz").json()
    assert health["status"] == "ok", health
    view = health["configuration"]
    assert isinstance(view, dict)
    return view


def written(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))


def test_a_reload_changes_what_can_change_and_names_what_cannot(tmp_path: Path) -> None:
    path = tmp_path / "kvscope.toml"
    body = page(rows("never-freed")[30])
    with served(body) as one, served(body) as other:
        written(path, f'metrics = ["{one.url}"]', "keep_days = 3", f'data = "{tmp_path / "data"}"')
        with service("serve", path) as (started, client):
            until(lambda: client.get("/api/engines").json(), "an engine")
            assert configured(client)["reloads"] == 0

            written(
                path, f'metrics = ["{other.url}"]', "keep_days = 4", f'data = "{tmp_path / "data"}"', "[thresholds]"
            )
            with path.open("a") as file:
                file.write("\nleak.finished-held.grace_s = 7\n")
            started.send_signal(signal.SIGHUP)
            until(lambda: configured(client)["reloads"] == 1, "a reload")
            assert configured(client)["restart_needed"] == ["keep_days"]
            assert targets(client) == [other.url]
            thresholds = {each["name"]: each["value"] for each in client.get("/api/alert_state").json()["thresholds"]}
            assert thresholds["leak.finished-held.grace_s"] == 7
            changes = [(each["change"], each["target"]) for each in client.get("/api/source-changes").json()]
            assert changes == [("added", other.url), ("removed", one.url)]

            broken = {
                "metrics = [": "line 1",
                'port = 1\nmetrics = ["nonsense"]': "line 2: metrics",
                "\nhots = 1": "line 2: hots",
            }
            for refused, (text, where) in enumerate(broken.items(), 1):
                written(path, text)
                started.send_signal(signal.SIGHUP)
                until(lambda refused=refused: configured(client)["failures"] == refused, "a refusal")  # type: ignore[misc]
                assert configured(client)["error"] == where
                assert targets(client) == [other.url]
            written(path, f'metrics = ["{one.url}", "{other.url}"]', "keep_days = 3", f'data = "{tmp_path / "data"}"')
            started.send_signal(signal.SIGHUP)
            until(lambda: configured(client)["reloads"] == 2, "a reload")
            assert (configured(client)["error"], configured(client)["restart_needed"]) == ("", [])
            assert targets(client) == sorted([one.url, other.url])
            started.send_signal(signal.SIGTERM)
            _, stated = started.communicate(timeout=30)
            assert started.returncode == 0
            assert "take effect after a restart: keep_days" in stated
            assert f"{path}:2: hots: there is no such setting" in stated


@pytest.mark.slow
def test_an_agent_answers_and_has_no_page(tmp_path: Path) -> None:
    path, data = tmp_path / "agent.toml", tmp_path / "data"
    events = f"ipc://{tmp_path}/events"
    written(path, f'events = ["{events}"]', f'data = "{data}"')
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "4") as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        with service("agent", path) as (started, client):
            until(lambda: client.get("/api/engines").json(), "an engine")
            (view,) = client.get("/api/engines").json()
            asked = {"engine": view["engine"]}
            until(lambda: client.get("/api/requests", params=asked).json(), "a request")
            assert "kvscope_source_in_step" in client.get("/metrics").text
            assert client.get("/").status_code == 404
            until(lambda: list((data / "history").glob("*/*.kvj")), "a history")
            started.send_signal(signal.SIGTERM)
            assert started.wait(30) == 0


# -------------------------------------------------------------------- receivers


def test_a_new_receiver_gets_what_still_fires_and_one_that_left_gets_nothing() -> None:
    received_alerts = AlertMessages()
    with receiver() as (one, of_one), receiver() as (other, of_other):
        alerts = Alerts(AlertsConfig((one,), allow_private=True))
        alerts.start()
        try:
            alerts.put(received_alerts.fire(time.time()))
            until(lambda: of_one, "an alert")
            with pytest.raises(BadReceiver):
                alerts.replace_receivers(["nowhere"])
            assert [str(each.url) for each in alerts.receivers] == [one]
            alerts.replace_receivers([other])
            until(lambda: of_other, "the same alert")
            alerts.put(received_alerts.end(time.time() + 1))
            until(lambda: len(of_other) == 2, "its end")
        finally:
            alerts.close()
        assert len(of_one) == 1
        messages = [msgspec.json.decode(body) for _, _, body in of_other]
        assert [message["type"] for message in messages] == ["kvscope.finding.firing", "kvscope.finding.resolved"]
        assert {message["data"]["engine"] for message in messages} == {ENGINE}
