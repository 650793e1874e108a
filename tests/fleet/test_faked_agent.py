"""A real agent whose wall clock libfaketime moves, over a real nats-server: its hub goes on with the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvscope.lab.faked_clock import LIBRARY, FakedClock
from kvscope.monitor.service.hub_server import Hub
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up
from tests.test_source_set import LEAK, leaking
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed: apt-get install libfaketime"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
    ),
]


@contextmanager
def agent_of(clock: FakedClock, server: NatsServer, target: str) -> Iterator[None]:
    command = [sys.executable, "-m", "kvscope.monitor", "agent", "--port", "0", "--events", target]
    command += ["--nats", server.url, "--nats-agent", "edge", "--set", f"{LEAK}.grace_s=1"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | clock.environment
    ) as process:
        try:
            yield
        finally:
            process.kill()


def step_of(hub: Hub) -> int:
    return max((view.step or 0 for view in hub.query.engines()), default=0)


def follows(hub: Hub, step: int) -> bool:
    """Whether the hub knows a later step, and heard of it by its own clock just now."""
    return step_of(hub) > step and hub.query.engines()[0].last_seen_s_ago < 15


def clocks_off(hub: Hub) -> list[str]:
    return [each.engine for each in hub.query.findings("firing") if each.code == "blind.clock-jump"]


@pytest.mark.parametrize("offset", ["+1h", "-1h", "+1d", "-1d"])
def test_a_hub_follows_an_agent_whose_clock_is_off_and_right_again(tmp_path: Path, offset: str) -> None:
    clock = FakedClock(tmp_path / "clock")
    with one_server(tmp_path / "nats") as server:
        set_up(bus_config_of([server]))
        with hub_of(bus_config_of([server], "hub", role="hub")) as hub, leaking(tmp_path) as engine:
            clock.move(offset)
            with agent_of(clock, server, engine.target):
                until(lambda: LEAK in {each.code for each in hub.query.findings("firing")}, "the leak")
                until(lambda: clocks_off(hub) == ["agent edge"], "the agent's clock, with its name")
                for then in ("+0", offset, "+0"):
                    clock.move(then)
                    before = step_of(hub)
                    until(lambda before=before: follows(hub, before + 100), "later steps, of now")  # type: ignore[misc]
                assert [each.code for each in hub.query.findings("firing")].count(LEAK) == 1
            until(lambda: hub.query.engines()[0].status == "unknown", "that nothing is known of it")
