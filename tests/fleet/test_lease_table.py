"""Leases and rendezvous hashing in virtual time: one agent an engine, whatever dies, hangs or comes back."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvscope.monitor.fleet.lease_table import AGENT_LEASE_S, RETURN_S, LeaseRecord, LeaseTable, ranked

TURN_S = 0.5


def test_only_the_engines_of_an_agent_that_leaves_move() -> None:
    agents = [f"agent-{number}" for number in range(5)]
    engines = [f"engine-{number}" for number in range(1_000)]
    before = {engine: ranked(engine, agents)[0] for engine in engines}
    after = {engine: ranked(engine, agents[1:])[0] for engine in engines}
    moved = {engine for engine in engines if before[engine] != after[engine]}
    assert moved == {engine for engine in engines if before[engine] == agents[0]}
    assert len({after[engine] for engine in moved}) == 4
    assert all(150 <= count <= 250 for count in Counter(before.values()).values())
    assert ranked("e", ["b", "a"]) == ranked("e", ["a", "b", "a"])


class Bucket:
    """What a key-value bucket does: revisions, compare and put, and everything to everybody a moment later."""

    def __init__(self) -> None:
        self.revision = 0
        self.stored: dict[str, tuple[LeaseRecord, int]] = {}

    def put(self, key: str, record: LeaseRecord, revision: int) -> int:
        if self.stored.get(key, (None, 0))[1] != revision:
            return 0
        self.revision += 1
        self.stored[key] = (record, self.revision)
        return self.revision


class Fleet:
    """Agents over one bucket. A paused agent does nothing and receives late; a cut one cannot reach the bucket."""

    def __init__(self, agents: list[str], targets: list[str], seed: int) -> None:
        self.now_s = 0.0
        self.bucket = Bucket()
        self.keys = {target: f"engine.{target}" for target in targets}
        self.drawn = random.Random(seed)
        self.tables: dict[str, LeaseTable] = {}
        self.paused: set[str] = set()
        self.cut: set[str] = set()
        self.runs = 0
        for agent in agents:
            self.begin(agent)

    def begin(self, agent: str) -> None:
        self.runs += 1
        self.tables[agent] = LeaseTable(agent, f"run-{self.runs}", self.keys)

    def turn(self) -> None:
        self.now_s += TURN_S
        agents = [agent for agent in self.tables if agent not in self.paused | self.cut]
        self.drawn.shuffle(agents)
        for agent in agents:
            for receiver in agents:
                self.tables[receiver].receive_agent(self.tables[agent].heartbeat(), self.now_s)
        for agent in agents:
            table = self.tables[agent]
            for key, (record, revision) in self.bucket.stored.items():
                table.receive_lease(key, record, revision, self.now_s)
            table.began(self.now_s)
            for step in table.steps(self.now_s):
                record = LeaseRecord("" if step.action == "hand-over" else agent, table.instance)
                revision = self.bucket.put(self.keys[step.target], record, step.revision)
                if revision:
                    table.written(step, record, revision, self.now_s)
        for target in self.keys:
            relying = [agent for agent, table in self.tables.items() if table.holds(target, self.now_s)]
            assert len(relying) <= 1, (self.now_s, target, relying)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN_S)):
            self.turn()

    def holders(self) -> dict[str, str]:
        return {
            target: agent
            for target in self.keys
            for agent, table in self.tables.items()
            if table.holds(target, self.now_s) and agent not in self.paused
        }


def test_agents_that_start_together_share_at_once_and_nothing_moves() -> None:
    fleet = Fleet(["a", "b", "c"], [f"t{n}" for n in range(30)], 1)
    fleet.run(5)
    first = fleet.holders()
    assert len(first) == 30
    assert set(first.values()) == {"a", "b", "c"}
    fleet.run(120)
    assert fleet.holders() == first
    assert all(first[target] == ranked(fleet.keys[target], "abc")[0] for target in first)


@pytest.mark.parametrize("how", ["paused", "cut"])
def test_the_engines_of_an_agent_that_is_gone_move_within_a_lease_and_come_back(how: str) -> None:
    fleet = Fleet(["a", "b", "c"], [f"t{n}" for n in range(30)], 2)
    fleet.run(10)
    before = fleet.holders()
    getattr(fleet, how).add("a")
    fleet.run(AGENT_LEASE_S + 1.5)
    after = fleet.holders()
    assert len(after) == 30
    assert "a" not in after.values()
    assert {target for target in before if before[target] != after[target]} == {
        target for target in before if before[target] == "a"
    }
    getattr(fleet, how).clear()
    fleet.run(5)
    assert fleet.holders() == after  # it has just come back, and nothing moves yet
    fleet.run(RETURN_S + 2 * 30)
    assert fleet.holders() == before


def test_no_leader_for_nine_seconds_moves_nothing() -> None:
    fleet = Fleet(["a", "b", "c"], [f"t{n}" for n in range(30)], 3)
    fleet.run(10)
    before = fleet.holders()
    fleet.cut.update("abc")
    fleet.run(9)
    fleet.cut.clear()
    fleet.run(20)
    assert fleet.holders() == before


def test_a_restarted_agent_waits_for_its_own_lease_and_two_of_a_name_are_noticed() -> None:
    fleet = Fleet(["a"], ["t"], 4)
    fleet.run(5)
    old = fleet.tables["a"]
    fleet.begin("a")
    fleet.run(5)
    assert fleet.holders() == {}  # the old run may still work
    fleet.run(AGENT_LEASE_S)
    assert fleet.holders() == {"t": "a"}
    assert not fleet.tables["a"].namesake
    fleet.tables["a"].receive_agent(old.heartbeat(), fleet.now_s)
    assert fleet.tables["a"].namesake


def test_an_agent_that_does_not_name_an_engine_never_gets_it() -> None:
    fleet = Fleet(["a", "b"], [f"t{n}" for n in range(10)], 5)
    fleet.tables["b"].set_targets({"t0": fleet.keys["t0"]})
    fleet.run(20)
    assert {target for target, agent in fleet.holders().items() if agent == "b"} <= {"t0"}
    assert len(fleet.holders()) == 10
    fleet.tables["a"].set_targets({})
    fleet.run(10 * 2 + 5)  # one is handed over at a time
    assert set(fleet.holders()) <= {"t0"}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(2, 20))])
def test_never_two_and_in_the_end_one(seed: int) -> None:
    """Random pauses, cuts and restarts: `turn` asserts that no two agents ever rely on one lease."""
    fleet = Fleet(["a", "b", "c", "d"], [f"t{n}" for n in range(12)], seed)
    for _ in range(40):
        agent = fleet.drawn.choice("abcd")
        fault = fleet.drawn.choice(("pause", "cut", "restart", "heal", "heal"))
        if fault == "pause":
            fleet.paused.add(agent)
        elif fault == "cut":
            fleet.cut.add(agent)
        elif fault == "restart":
            fleet.begin(agent)
        else:
            fleet.paused.clear()
            fleet.cut.clear()
        fleet.run(fleet.drawn.uniform(1, 25))
    fleet.paused.clear()
    fleet.cut.clear()
    fleet.run(3 * AGENT_LEASE_S)
    assert len(fleet.holders()) == 12
