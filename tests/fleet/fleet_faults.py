"""Faults drawn at random for a fleet: what is killed, stopped or cut off, for how long, and how it ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
import msgspec

from kvscope.lab.chaos.engines_process import chaos_engine_name
from kvscope.monitor.fleet.lease_table import AGENT_LEASE_S, RETURN_S
from tests.fleet.fleet_checks import FleetJudge
from tests.fleet.fleet_lab import FleetLab, Service, wait_moved
from tests.fleet.nats_servers import NatsServer
from tests.waiting import until

BRIEF_S = (2.0, 8.0)
"""Shorter than a lease: nothing may move."""
SETTLED_S = 300.0
"""A message that a leader took as it lost its quorum can be refused until JetStream forgets its id, two minutes later
(nats-server pull request 6415 describes that of an older release)."""
STILL_S = 12.0
"""Longer than from one engine that moves back to the next, with the time until its first point."""
RESOLVED_S = 420.0
"""An agent that took an engine over has five minutes to see a finding again before it counts as resolved."""
EXPLAINED_BY = ("/api/engines", "/api/findings")
TAKEOVER_S = AGENT_LEASE_S + 30


class FleetRound(msgspec.Struct):
    """One fault and what came of it. took_over_s: until other agents had described all engines that moved, 0 if none
    did. transitions, batches: how many of this run of the fleet were compared so far.
    """

    number: int
    kind: str
    victim: str
    seconds: float = 0.0
    moved: int = 0
    took_over_s: float = 0.0
    transitions: int = 0
    batches: int = 0
    incidents: int = 0
    problems: list[str] = []
    took_s: float = 0.0


@contextmanager
def fault_of(kind: str, victim: Service | NatsServer, cut: Callable[[bool], None] | None) -> Iterator[None]:
    """A fault while the block runs."""
    if kind == "cut":
        assert cut is not None
        cut(False)
    else:
        victim.kill() if kind == "kill" else victim.pause()
    try:
        yield
    finally:
        if kind == "cut":
            assert cut is not None
            cut(True)
        else:
            victim.start() if kind == "kill" else victim.resume()


class FleetFaults:
    """Faults of one seed in a fleet, each with an incident that begins before it and one that begins during it."""

    def __init__(self, lab: FleetLab, engines: int, seed: int, links: dict[str, Callable[[bool], None]]) -> None:
        self._lab = lab
        self._seed = seed
        self._links = links
        self._engines = engines
        self._judge = FleetJudge(lab, engines)
        self._incidents: dict[str, int] = dict.fromkeys(map(chaos_engine_name, range(engines)), 0)

    def round(self, number: int) -> FleetRound:
        """Cause the fault of this number, wait until the fleet is as it should be, and judge it."""
        drawn, began_s = random.Random(f"{self._seed} {number}"), time.monotonic()
        victims: list[Service | NatsServer] = [*self._lab.agents, *self._lab.hubs, *self._lab.servers]
        victim = drawn.choice(victims)
        name = victim.folder.name if isinstance(victim, NatsServer) else victim.name
        done = FleetRound(number, drawn.choice(["kill", "stop", *(["cut"] if name in self._links else [])]), name)
        try:
            self._cause(done, victim, drawn)
            done.problems = self._judge.problems(self._incidents)
            if done.took_over_s > TAKEOVER_S:
                done.problems.append(f"taken over only after {done.took_over_s:.1f} s")
        except AssertionError as error:
            done.problems = [str(error), *self._states()]
        done.incidents = sum(self._incidents.values())
        done.transitions, done.batches = self._judge.transitions, self._judge.batches
        done.took_s = round(time.monotonic() - began_s, 1)
        return done

    def _cause(self, done: FleetRound, victim: Service | NatsServer, drawn: random.Random) -> None:
        lab = self._lab
        before, during = drawn.sample(range(self._engines), 2)
        self._begin(before)
        until(lambda: chaos_engine_name(before) in lab.leaking(), "the leak before the fault is on the bus", SETTLED_S)
        had = {engine for engine, agent in lab.owners().items() if agent == done.victim}
        is_long = bool(had) and drawn.random() < 0.7
        began_s, began_ns = time.monotonic(), time.time_ns()
        with fault_of(done.kind, victim, self._links.get(done.victim)):
            self._begin(during)
            if is_long:
                done.moved = len(had)
                done.took_over_s = wait_moved(lab, had, began_ns, done.victim)
            else:
                time.sleep(drawn.uniform(*BRIEF_S))
        done.seconds = time.monotonic() - began_s
        self._settle(before, during, is_long=is_long)

    def _begin(self, number: int) -> None:
        self._incidents[chaos_engine_name(number)] += 1
        self._lab.set_leak(number, True)

    def _settle(self, *leaking: int, is_long: bool) -> None:
        """Wait until the bus describes every engine and both leaks, then end them."""
        lab, ended_ns = self._lab, time.time_ns()
        if is_long:
            time.sleep(RETURN_S)  # engines move back then: a leak that ends meanwhile takes five minutes to be over
        names = {chaos_engine_name(number) for number in leaking}
        until(lambda: all(server.is_well() for server in lab.servers), "every node is well", SETTLED_S)
        until(lambda: len(lab.owners(ended_ns)) == self._engines, "every engine is described again", SETTLED_S)
        until(lambda: names <= lab.leaking(), "both leaks are on the bus", SETTLED_S)
        self._wait_until_nothing_moves()
        for number in leaking:
            lab.set_leak(number, False)
        until(lambda: not names & lab.leaking(), "both leaks are over on the bus", RESOLVED_S)

    def _wait_until_nothing_moves(self) -> None:
        owned, since_s = self._lab.owners(), time.monotonic()
        while time.monotonic() - since_s < STILL_S:
            time.sleep(0.5)
            if (now := self._lab.owners()) != owned:
                owned, since_s = now, time.monotonic()

    def _states(self) -> list[str]:
        """Return how agents see the bus and what leaks there, to explain a round that did not end."""
        leaking, owners = self._lab.leaking(), self._lab.owners()
        differ = leaking ^ set(map(chaos_engine_name, self._lab.set_leaks()))
        states = [f"leaking on the bus: {sorted(leaking)}, other than there: {sorted(differ)}"]
        with self._lab.reader.fold() as fold:
            states += [str(each) for each in fold.open_findings() if each.judgement.engine in differ]
        for agent in self._lab.agents:
            try:
                states.append(f"{agent.name}: {agent.health().get('bus')}")
                for name in sorted(differ):
                    if owners.get(name) == agent.name:
                        states += [f"{agent.name} of {name}: {agent.ask(route, engine=name)}" for route in EXPLAINED_BY]
            except httpx2.HTTPError as error:
                states.append(f"{agent.name}: {error!r}")
        return states
