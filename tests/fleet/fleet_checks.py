"""What must hold of a fleet after a fault: transitions at the bus and at each hub, and the history on agents' disks."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final

import httpx2

from kvscope.lab.chaos.arena import wait_for
from kvscope.lab.chaos.engines_process import chaos_engine_name
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, decode
from kvscope.monitor.fleet.bus_messages import FindingMessage
from kvscope.monitor.history.findings_log import LoggedTransition
from kvscope.monitor.history.history import History
from tests.fleet.fleet_lab import LEAK_CODE, FleetLab, Service, assert_each_once
from tests.fleet.nats_servers import stored_findings

SHOWN_S = 60.0
"""Until a hub that was killed or cut off shows what the stream holds."""
ARRIVES_S = 60.0
"""Until the newest batches of an engine are on an agent's disk."""
MARGIN_NS: Final = 60_000_000_000
"""Segments are selected by time, and a journal is read a moment after that time was taken."""
BatchPlace = tuple[int, int]


def episodes(leaks: Sequence[LoggedTransition]) -> tuple[int, int]:
    """Return how many leaks of one engine began and ended. Those of two ids that overlap are one: an agent that was cut
    off reports late what the next one has found as well.
    """
    began: dict[str, int] = {}
    ended: dict[str, float] = {}
    for each in leaks:
        if each.to == "firing":
            began[each.id] = each.at_ns
        else:
            ended[each.id] = each.at_ns
    count = open_count = 0
    until = -math.inf
    for id, at_ns in sorted(began.items(), key=lambda each: each[1]):
        count += at_ns > until
        until = max(until, ended.get(id, math.inf))
        open_count += id not in ended
    return count, count - min(open_count, count)


class FleetJudge:
    """Judges the fleet of `lab` after each fault, over all of its time."""

    def __init__(self, lab: FleetLab, engines: int) -> None:
        self._lab = lab
        self._engines = engines
        self._read = dict.fromkeys(range(engines), 0)
        """How many records of each engine's journal were read before."""
        self._since_ns = time.time_ns()
        """When these were sent. An agent begins with what an engine sends when it is first read."""
        for number in range(engines):
            self._new_places(number)
        self.transitions = 0
        self.batches = 0
        """How many were compared so far."""

    def problems(self, incidents: dict[str, int]) -> list[str]:
        """Return what is not as it should be. incidents: how many began and ended on each engine."""
        stored = stored_findings(self._lab.config)
        self.transitions = len(stored)
        problems = self._stream_problems(stored, incidents)
        for hub in self._lab.hubs:
            # The stream is read for each comparison: a finding may fire or end while a hub catches up.
            if wait_for(lambda hub=hub: not self._hub_problems(hub), SHOWN_S, 1.0) < 0:  # type: ignore[misc]
                problems += self._hub_problems(hub)
        since_ns, self._since_ns = self._since_ns, time.time_ns()
        for number in range(self._engines):
            problems += self._history_problems(number, since_ns)
        return problems

    def _hub_problems(self, hub: Service) -> list[str]:
        return hub_problems(hub, stored_findings(self._lab.config))

    def _stream_problems(self, stored: list[FindingMessage], incidents: dict[str, int]) -> list[str]:
        assert_each_once(stored)
        ids = {each.id for each in stored}
        reader = self._lab.reader
        wait_for(lambda: ids <= reader.transitions.keys(), SHOWN_S)
        with reader.fold():
            read = dict(reader.transitions)
        problems = [f"{id} was read {count} times" for id, count in read.items() if count != 1]
        problems += [f"{id} is in the stream and was not read" for id in sorted(ids - read.keys())]
        for engine, count in incidents.items():
            leaks = [each.transition for each in stored if each.transition.judgement.engine == engine]
            began, ended = episodes([each for each in leaks if each.judgement.code == LEAK_CODE])
            if (began, ended) != (count, count):
                still_s = self._longest_pause_s(engine)
                problems.append(
                    f"{engine}: {count} leaks were caused, {began} began and {ended} ended;"
                    f" the engine stood still for {still_s:.1f} s at most"
                )
        return problems

    def _longest_pause_s(self, engine: str) -> float:
        """Return the longest time without a step of an engine, by its journal: a pause may look like a leak."""
        number = next(each for each in range(self._engines) if chaos_engine_name(each) == engine)
        frames = map(decode, journal.read(self._lab.folder / "engines" / f"journal-{number}"))
        times = [
            event.args[0]
            for frame in frames
            if isinstance(frame, Batch)
            for event in frame.events()
            if event.kind == Kind.STEP_COMPLETED
        ]
        return max((after - before for before, after in pairwise(times)), default=0) / 1e9

    def _history_problems(self, number: int, since_ns: int) -> list[str]:
        """Compare what agents' disks hold together with the engine's journal, which holds all it ever sent."""
        wanted = self._new_places(number)
        name = chaos_engine_name(number)
        until_s = time.monotonic() + ARRIVES_S
        while lacking := sorted(wanted - kept_places(self._lab, name, since_ns)):
            if time.monotonic() > until_s:
                return [f"{name}: no agent has {len(lacking)} batches of the journal, {lacking[0]} to {lacking[-1]}"]
            time.sleep(2.0)
        self.batches += len(wanted)
        return []

    def _new_places(self, number: int) -> set[BatchPlace]:
        """Return the batches that an engine's journal has since the last call."""
        payloads = list(
            islice(journal.read(self._lab.folder / "engines" / f"journal-{number}"), self._read[number], None)
        )
        self._read[number] += len(payloads)
        frames = map(decode, payloads)
        return {(frame.epoch, frame.sequence) for frame in frames if isinstance(frame, Batch) and frame.sequence >= 0}


def hub_problems(hub: Service, stored: list[FindingMessage]) -> list[str]:
    """Compare the findings that a hub lists with the last transition of each finding in the stream. What a hub itself
    finds out about an agent, such as one whose messages it refuses, is in no stream.
    """
    last = {each.transition.id: each.transition.to for each in sorted(stored, key=lambda each: each.transition.at_ns)}
    try:
        findings = hub.ask("/api/findings")
        listed = [(each["id"], each["state"]) for each in findings if not each["engine"].startswith("agent ")]
    except httpx2.HTTPError as error:
        return [f"{hub.name}: {error!r}"]
    twice = [id for id, count in Counter(id for id, _ in listed).items() if count > 1]
    if twice:
        return [f"{hub.name} lists {len(twice)} findings twice: {twice[:3]}"]
    differ = sorted(set(listed) ^ set(last.items()))
    if not differ:
        return []
    sent = [
        (each.agent, each.transition.to, each.transition.judgement.code, each.transition.judgement.engine)
        for each in stored
        if each.transition.id == differ[0][0]
    ]
    return [f"{hub.name} lists other findings than the stream holds: {differ[:3]}; of the first, the stream has {sent}"]


def kept_places(lab: FleetLab, engine: str, since_ns: int) -> set[BatchPlace]:
    """Return every batch of an engine since a time that the history of any agent holds."""
    kept: set[BatchPlace] = set()
    for agent in lab.agents:
        with contextlib.suppress(journal.NotAJournal):  # it never had an engine
            batches = History(agent.data / "history").batches(engine, since_ns - MARGIN_NS, time.time_ns())
            kept |= {(each.epoch, each.sequence) for each in batches if each.sequence >= 0}
    return kept
