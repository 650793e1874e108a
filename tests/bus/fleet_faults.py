"""Faults drawn at random for a fleet: what is killed, stopped or cut off, for how long, and how it ends."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvscope.monitor.bus.bus_messages import FindingMessage
from kvscope.monitor.bus.lease_table import AGENT_LEASE_S, RETURN_S
from tests.bus.fleet_lab import LEAK_CODE, FleetLab, Service, assert_each_once, wait_moved
from tests.bus.nats_servers import NatsServer, stored_findings
from tests.chaos.engines_process import chaos_engine_name
from tests.test_service import until

BRIEF_S = (2.0, 8.0)
"""Shorter than a lease: nothing may move."""
SETTLED_S = 300.0
"""A message that a leader took as it lost its quorum can be refused until JetStream forgets its id, two minutes later
(nats-server pull request 6415 describes that of an older release)."""
STILL_S = 12.0
"""Longer than from one engine that moves back to the next, with the time until its first point."""
RESOLVED_S = 420.0
"""An agent that took an engine over has five minutes to see a finding again before it counts as resolved."""


class FleetFault(NamedTuple):
    """What one fault did. took_over_s: until other agents had described every engine that moved, 0 if none did."""

    kind: str
    victim: str
    seconds: float
    took_over_s: float


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
        self._drawn = random.Random(seed)
        self._links = links
        self._engines = engines
        self.incidents: dict[str, int] = dict.fromkeys(map(chaos_engine_name, range(engines)), 0)

    def run(self, count: int) -> list[FleetFault]:
        """Cause so many faults, one after another; each ends with the fleet as it should be."""
        done = []
        for number in range(count):
            done.append(self._one())
            fault = done[-1]
            print(f"{number + 1:3}  {fault.kind} {fault.victim} {fault.seconds:.0f} s", end="")
            print(f"  taken over in {fault.took_over_s:.1f} s" if fault.took_over_s else "", flush=True)
        return done

    def _one(self) -> FleetFault:
        lab = self._lab
        victims: list[Service | NatsServer] = [*lab.agents, *lab.hubs, *lab.servers]
        victim = self._drawn.choice(victims)
        name = victim.folder.name if isinstance(victim, NatsServer) else victim.name
        kind = self._drawn.choice(["kill", "stop", *(["cut"] if name in self._links else [])])
        before, during = self._drawn.sample(range(self._engines), 2)
        self._begin(before)
        until(lambda: chaos_engine_name(before) in lab.leaking(), "the leak before the fault is on the bus", SETTLED_S)
        had = {engine for engine, agent in lab.owners().items() if agent == name}
        is_long = name.startswith("agent") and bool(had) and self._drawn.random() < 0.7
        took_over_s, began_s, began_ns = 0.0, time.monotonic(), time.time_ns()
        with fault_of(kind, victim, self._links.get(name)):
            self._begin(during)
            if is_long:
                took_over_s = wait_moved(lab, had, began_ns, name)
            else:
                time.sleep(self._drawn.uniform(*BRIEF_S))
        seconds = time.monotonic() - began_s
        self._settle(before, during, is_long=is_long)
        return FleetFault(kind, name, seconds, took_over_s)

    def _begin(self, number: int) -> None:
        self.incidents[chaos_engine_name(number)] += 1
        self._lab.set_trouble(number, True)

    def _settle(self, *troubled: int, is_long: bool) -> None:
        """Wait until the bus describes every engine and both leaks, then end them."""
        lab, ended_ns = self._lab, time.time_ns()
        if is_long:
            time.sleep(RETURN_S)  # engines move back then: a leak that ends meanwhile takes five minutes to be over
        names = {chaos_engine_name(number) for number in troubled}
        until(lambda: all(server.is_well() for server in lab.servers), "every node is well", SETTLED_S)
        until(lambda: len(lab.owners(ended_ns)) == self._engines, "every engine is described again", SETTLED_S)
        until(lambda: names <= lab.leaking(), "both leaks are on the bus", SETTLED_S)
        self._wait_until_nothing_moves()
        for number in troubled:
            lab.set_trouble(number, False)
        until(lambda: not names & lab.leaking(), "both leaks are over on the bus", RESOLVED_S)

    def _wait_until_nothing_moves(self) -> None:
        owned, since_s = self._lab.owners(), time.monotonic()
        while time.monotonic() - since_s < STILL_S:
            time.sleep(0.5)
            if (now := self._lab.owners()) != owned:
                owned, since_s = now, time.monotonic()


def judge(lab: FleetLab, incidents: dict[str, int], done: Sequence[FleetFault]) -> list[FindingMessage]:
    """Every incident is at the bus with its beginning and its end, each once, and nothing else of its code is."""
    stored = stored_findings(lab.config)
    assert_each_once(stored)
    for engine, count in incidents.items():
        leaks = [each.transition for each in stored if each.transition.judgement.engine == engine]
        reported = [each.to for each in leaks if each.judgement.code == LEAK_CODE]
        assert (reported.count("firing"), reported.count("resolved")) == (count, count), engine
    moved = [fault.took_over_s for fault in done if fault.took_over_s]
    print(f"{len(done)} faults, {sum(incidents.values())} incidents, {len(stored)} transitions at the bus, each once")
    if moved:
        print(f"{len(moved)} takeovers: median {statistics.median(moved):.1f} s, worst {max(moved):.1f} s")
    assert all(seconds < AGENT_LEASE_S + 30 for seconds in moved)
    return stored
