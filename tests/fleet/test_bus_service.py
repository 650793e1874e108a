"""`monitor serve --nats` and `monitor bus` as a user runs them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kvscope.monitor.service.service import ServiceConfig
from kvscope.monitor.terminal.cli import main
from tests.fleet.nats_servers import bus_config_of, one_server, set_up, stored_findings
from tests.test_service import process
from tests.test_source_set import LEAK, leaking, running
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


@contextmanager
def serving(*command: str) -> Iterator[httpx2.Client]:
    """A client of a service in a process of its own."""
    with process(*command) as run:
        assert run.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", run.stderr.readline())
        assert address is not None
        with httpx2.Client(base_url=address[0], trust_env=False) as client:
            yield client


def test_a_restarted_service_goes_on_with_its_findings_on_the_bus(tmp_path: Path) -> None:
    """Without --data it remembers nothing itself: the stream says what is open."""
    with one_server(tmp_path / "nats") as server, leaking(tmp_path) as engine:
        config = bus_config_of([server])
        set_up(config)
        for _ in range(2):
            with running(ServiceConfig(events=(engine.target,), bus=config)) as service:
                assert service.bus is not None
                until(service.watch.lifecycle.firing, "the leak fires")
                time.sleep(1.0)
        stored = [each.transition.to for each in stored_findings(config)]
        assert stored == ["firing"]


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@pytest.mark.slow
def test_a_service_without_nats_answers_as_one_with_nats_does(tmp_path: Path) -> None:
    with one_server(tmp_path / "nats") as server, leaking(tmp_path) as engine, ExitStack() as stack:
        set_up(bus_config_of([server]))
        command = ("kvscope.monitor", "serve", "--port", "0", "--events", engine.target)
        clients = [stack.enter_context(serving(*command, *flags)) for flags in ((), ("--nats", server.url))]

        def findings(client: httpx2.Client) -> list[dict[str, Any]]:
            fields = ("code", "engine", "verdict", "severity", "state", "since", "do_now", "runbook")
            return [{field: each[field] for field in fields} for each in client.get("/api/findings").json()]

        def report(client: httpx2.Client) -> bool:
            return LEAK in [each["code"] for each in findings(client)]

        until(lambda: all(map(report, clients)), "both report the leak")
        assert clients[1].get("/healthz").json()["bus"]["connected"]
        assert "bus" not in clients[0].get("/healthz").json()
        (name,) = [each["engine"] for each in clients[0].get("/api/engines").json()]
        joined = now()

        def living(at: str) -> list[list[dict[str, Any]]]:
            """The living requests that arrived since, at a time that both have passed: the one that came later has not
            seen how long each cause held back those that it found in the queue.
            """
            until(lambda: all(each.get("/api/engines").json()[0]["at"] > at for each in clients), "both are past it")
            answers = [client.get("/api/requests", params={"engine": name, "at": at}).json() for client in clients]
            return [[each for each in known if not each["ended"] and each["arrived"] > joined] for known in answers]

        def compared() -> tuple[str, list[list[dict[str, Any]]]] | None:
            known = living(at := now())
            return (at, known) if any(known) else None

        at, (alone, connected) = until(compared, "requests that arrived since")
        assert alone == connected
        # The one that came later has seen fewer transfers end, and is as sure as the other a moment later.
        until(lambda: findings(clients[0]) == findings(clients[1]), "both find the same")
        parameters = {"engine": name, "at": at}
        alone, connected = (client.get("/api/block_map", params=parameters).json() for client in clients)
        assert alone == connected
        engines = [client.get("/api/engines", params=parameters).json()[0] for client in clients]
        for field in ("status", "epoch", "step", "running", "waiting_by_reason", "usage", "balance", "position"):
            assert engines[0][field] == engines[1][field], field


@pytest.mark.slow
def test_health_and_metrics_show_what_is_wrong_with_nats_and_when_it_is_over(tmp_path: Path) -> None:
    command = ("kvscope.monitor", "serve", "--port", "0", "--events", "tcp://127.0.0.1:1", "--nats")
    with one_server(tmp_path / "nats") as server, serving(*command, server.url) as client:
        until(lambda: client.get("/healthz").json()["bus"]["connected"], "a connection")
        server.kill()
        until(lambda: client.get("/healthz").json()["bus"]["error"], "an error")
        assert client.get("/healthz").status_code == 200
        assert "kvscope_bus_connected 0.0" in client.get("/metrics").text
        server.start()
        set_up(bus_config_of([server]))
        until(lambda: client.get("/healthz").json()["bus"]["error"] == "", "no error")
        assert "kvscope_bus_connected 1.0" in client.get("/metrics").text


def test_the_command_line_makes_streams_and_shows_what_they_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_server(tmp_path / "nats") as server:
        assert main(["bus", "setup", "--nats", server.url, "--nats-tenant", "team-a"]) == 0
        assert "kvscope-team-a-events: created" in capsys.readouterr().out
        assert main(["bus", "status", "--nats", server.url, "--nats-tenant", "team-a", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["engines"] == {}
        assert main(["bus", "status", "--nats", server.url, "--nats-tenant", "team-b"]) == 3
        assert "monitor bus setup" in capsys.readouterr().err
    assert main(["bus", "permissions", "--agent", "gpu.7", "--nats-tenant", "team-a"]) == 0
    assert '"kvscope.v1.team-a.finding.gpu%2E7.>"' in capsys.readouterr().out
    assert main(["bus", "permissions", "--hub", "--share"]) == 2
    assert "--share" in capsys.readouterr().err
    assert main(["serve", "--nats-share"]) == 2
    assert "set nats, too" in capsys.readouterr().err
    assert main(["serve", "--nats", "nats://nats.example:4222"]) == 2
    assert "use tls://" in capsys.readouterr().err
