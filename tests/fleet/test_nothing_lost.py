"""Random faults in a fleet under load: nothing is lost or doubled, and engines move within a lease or so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.cut_links import Machines
from tests.fleet.fleet_chaos import MACHINES, FleetRound, line_of, run_rounds, summary_of

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
FAULTS = int(os.environ.get("MONITOR_FLEET_FAULTS", "30"))


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A namespace for each node, agent and hub."""
    made = Machines(MACHINES)
    try:
        if made.reason:
            pytest.skip(f"links cannot be cut here: {made.reason}")
        yield made
    finally:
        made.close()


def show(done: FleetRound) -> None:
    print(line_of(done), flush=True)


@pytest.mark.slow
def test_a_fault_loses_nothing(tmp_path: Path, machines: Machines) -> None:
    (done,) = run_rounds(tmp_path, machines, engines=4, seed=2, numbers=[0], show=show)
    assert not done.problems
    assert done.transitions >= 4
    assert done.batches > 0


@pytest.mark.prove
def test_random_faults_lose_nothing(tmp_path: Path, machines: Machines) -> None:
    rounds = run_rounds(tmp_path, machines, engines=12, seed=2126, numbers=range(FAULTS), show=show)
    print(summary_of(rounds))
    assert [each.problems for each in rounds] == [[]] * FAULTS
