"""`monitor serve --nats` and `monitor bus` as a user runs them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from kvscope.monitor.cli import main
from kvscope.monitor.service.service import ServiceConfig
from tests.bus.nats_servers import bus_config_of, one_server, set_up, stored_findings
from tests.test_service import process, until
from tests.test_source_set import leaking, running

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


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


@pytest.mark.slow
def test_health_and_metrics_show_what_is_wrong_with_nats_and_when_it_is_over(tmp_path: Path) -> None:
    with (
        one_server(tmp_path / "nats") as server,
        process(
            "kvscope.monitor", "serve", "--port", "0", "--events", "tcp://127.0.0.1:1", "--nats", server.url
        ) as run,
    ):
        assert run.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", run.stderr.readline())
        assert address is not None
        with httpx.Client(base_url=address[0], trust_env=False) as client:
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
    assert main(["bus", "permissions", "--nats-tenant", "team-a"]) == 0
    assert '"kvscope.v1.team-a.finding.>"' in capsys.readouterr().out
    assert main(["serve", "--nats-share"]) == 2
    assert "set nats, too" in capsys.readouterr().err
    assert main(["serve", "--nats", "nats://nats.example:4222"]) == 2
    assert "use tls://" in capsys.readouterr().err
