"""Random faults in a fleet under load: every transition is at the bus, once, and engines move within a lease or so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bus.cut_links import Machines
from tests.bus.fleet_faults import FleetFaults, judge
from tests.bus.fleet_lab import FleetLab, running_fleet

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
AGENTS, NODES = 4, 3
FAULTS = int(os.environ.get("MONITOR_FLEET_FAULTS", "30"))


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A namespace for each node and agent."""
    made = Machines(NODES + AGENTS)
    try:
        if made.reason:
            pytest.skip(f"links cannot be cut here: {made.reason}")
        yield made
    finally:
        made.close()


def caused(lab: FleetLab, machines: Machines, engines: int, seed: int, count: int) -> None:
    """Cause faults, and judge what came of them."""
    names = [server.folder.name for server in lab.servers] + [agent.name for agent in lab.agents]
    links = {name: machine.set_link for name, machine in zip(names, machines.machines, strict=True)}
    faults = FleetFaults(lab, engines, seed, links)
    done = faults.run(count)
    judge(lab, faults.incidents, done)


@pytest.mark.slow
def test_a_few_faults_lose_nothing(tmp_path: Path, machines: Machines) -> None:
    with running_fleet(tmp_path, engines=4, agents=AGENTS, machines=machines) as lab:
        caused(lab, machines, engines=4, seed=2, count=1)


@pytest.mark.prove
def test_random_faults_lose_nothing(tmp_path: Path, machines: Machines) -> None:
    with running_fleet(tmp_path, engines=12, agents=AGENTS, machines=machines) as lab:
        caused(lab, machines, engines=12, seed=2126, count=FAULTS)
