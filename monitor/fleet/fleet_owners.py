"""Which agent owns an engine: the one whose messages about it count. No I/O and no clock.

An agent owns the engines that it has a lease for, or was the first to describe. It loses an engine to the next holder
of the same lease at once, and to any other agent only after it has not described the engine for OWNER_SILENT_S. Times
are seconds of the reader's monotonic clock, at which messages arrived: what agents write about time moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from ..base import limits
from ..base.latest_entries import LatestEntries
from .bus_subjects import subject_token

OWNER_SILENT_S: Final = 30.0
"""Six points. An agent without leases that is replaced by another one of another name takes so long to be believed."""
OWNER_GONE_S: Final = 900.0
"""An engine that was not described for so long makes room for another one beyond the bounds."""
JUST_MOVED_S: Final = 60.0
"""What the last owner sent before it knew is no intrusion."""
MAX_BEFORE: Final = 16
"""Earlier owners of an engine that are remembered."""
MAX_REFUSED: Final = 100
"""Agents whose messages were refused that are remembered, by reason."""

RefusedFor = Literal["not-owner", "tenant-full", "agent-full"]


class EngineOwner(msgspec.Struct, frozen=True):
    """The owner of an engine: an agent, the key of its lease if it has one, and earlier owners, the latest last."""

    engine: str
    agent: str
    lease: str = ""
    before: list[str] = []
    major: int = 1


class RefusedAgent(NamedTuple):
    """The latest message of an agent that was refused, and how many were. owner: of that engine, by then."""

    agent: str
    reason: RefusedFor
    engine: str
    owner: str
    messages: int
    since_s: float
    last_s: float


def owner_key(engine: str) -> str:
    """Return the key of an engine's owner in the bucket of a tenant's hubs."""
    return f"owner.{subject_token(engine)}"


class FleetOwners:
    """The owners of a tenant's engines, as one reader knows them. `fixed` owns every engine, for good, if given."""

    def __init__(
        self,
        fixed: str = "",
        most_engines: int = limits.BUS_TENANT_ENGINES,
        most_of_agent: int = limits.BUS_AGENT_ENGINES,
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Messages by the reason of their refusal."""
        self._fixed = fixed
        self._most_engines = most_engines
        self._most_of_agent = most_of_agent
        self._owners: dict[str, EngineOwner] = {}
        self._described_s: dict[str, float] = {}
        """When the owner of an engine described it last, or began to own it."""
        self._moved_s: dict[str, float] = {}
        self._agents: LatestEntries[str, float] = LatestEntries(most_engines)
        self._of_agent: Counter[str] = Counter()
        self._refusals: LatestEntries[tuple[str, RefusedFor], RefusedAgent] = LatestEntries(MAX_REFUSED)
        self._unwritten: dict[str, EngineOwner] = {}
        self._dropped: list[str] = []

    # ---------------------------------------------------------------- what is received

    def take_record(self, record: EngineOwner, now_s: float) -> None:
        """Take an owner from the bucket of the tenant's hubs, whose word counts."""
        if record != self._owners.get(record.engine):
            self._set(record, now_s)
        self._unwritten.pop(record.engine, None)

    def take_lease(self, key: str, agent: str, engines: Sequence[str], now_s: float) -> list[str]:
        """Take a lease with the engines found there, and return those that it moved. No agent: it was handed over, and
        the last holder owns them until the next one writes.
        """
        return [engine for engine in engines if agent and self._claim(engine, agent, key, now_s)]

    def describe(self, engine: str, agent: str, heard_s: float, *, is_backlog: bool = False) -> bool:
        """Take a point of an agent. Return whether it counts."""
        self.see(agent, heard_s)
        if self._fixed:
            return agent == self._fixed
        before = self._owners.get(engine)
        if before is None or before.agent != agent:
            silent = before is None or heard_s - self._described_s[engine] > OWNER_SILENT_S
            if not silent or not self._has_room(engine, agent, heard_s):
                self._refuse("not-owner" if not silent else self._full(agent), engine, agent, heard_s, is_backlog)
                return self.owns(engine, agent)
            self._move(engine, agent, "", heard_s)
        self._described_s[engine] = max(heard_s, self._described_s[engine])
        return True

    def tell(self, engine: str, agent: str, heard_s: float, *, is_backlog: bool = False) -> bool:
        """Take a transition or an annotation of an agent. Return whether it counts. It gives an engine that nobody
        described its first owner, and never moves one.
        """
        self.see(agent, heard_s)
        if engine not in self._owners and not self._fixed:
            if not self._has_room(engine, agent, heard_s):
                self._refuse(self._full(agent), engine, agent, heard_s, is_backlog)
                return False
            self._move(engine, agent, "", heard_s)
        if not self.owns(engine, agent):
            self._refuse("not-owner", engine, agent, heard_s, is_backlog)
            return False
        return True

    def see(self, agent: str, heard_s: float) -> None:
        """Note that an agent wrote something."""
        self._agents[agent] = max(heard_s, self._agents.get(agent, heard_s))

    def _claim(self, engine: str, agent: str, key: str, now_s: float) -> bool:
        before = self._owners.get(engine)
        if before is not None and before.agent == agent:
            if before.lease != key:
                self._set(msgspec.structs.replace(before, lease=key), now_s)
            return False
        is_next = before is None or before.lease == key or now_s - self._described_s[engine] > OWNER_SILENT_S
        if not is_next or not self._has_room(engine, agent, now_s):
            self._refuse("not-owner" if not is_next else self._full(agent), engine, agent, now_s, is_backlog=False)
            return False
        self._move(engine, agent, key, now_s)
        return True

    def _move(self, engine: str, agent: str, key: str, now_s: float) -> None:
        before = self._owners.get(engine)
        earlier = [each for each in before.before if each != agent] + [before.agent] if before is not None else []
        self._set(EngineOwner(engine, agent, key, earlier[-MAX_BEFORE:]), now_s)

    def _set(self, owner: EngineOwner, now_s: float) -> None:
        before = self._owners.get(owner.engine)
        if before is not None:
            self._of_agent[before.agent] -= 1
        self._of_agent[owner.agent] += 1
        self._owners[owner.engine] = self._unwritten[owner.engine] = owner
        if before is None or before.agent != owner.agent:
            self._described_s[owner.engine] = self._moved_s[owner.engine] = now_s

    # ---------------------------------------------------------------- bounds

    def _has_room(self, engine: str, agent: str, now_s: float) -> bool:
        if self._of_agent[agent] >= self._most_of_agent:
            self._drop_gone(now_s, agent)
        if engine not in self._owners and len(self._owners) >= self._most_engines:
            self._drop_gone(now_s)
        return self._of_agent[agent] < self._most_of_agent and (
            engine in self._owners or len(self._owners) < self._most_engines
        )

    def _drop_gone(self, now_s: float, agent: str = "") -> None:
        """Drop the engine that was described longest ago, of that agent or of all, if it is gone."""
        named = [name for name, owner in self._owners.items() if agent in ("", owner.agent)]
        oldest = min(named, key=self._described_s.__getitem__)
        if now_s - self._described_s[oldest] > OWNER_GONE_S:
            self._of_agent[self._owners.pop(oldest).agent] -= 1
            for known in (self._described_s, self._moved_s, self._unwritten):
                known.pop(oldest, None)
            self._dropped.append(oldest)

    def _full(self, agent: str) -> RefusedFor:
        return "agent-full" if self._of_agent[agent] >= self._most_of_agent else "tenant-full"

    def _refuse(self, reason: RefusedFor, engine: str, agent: str, heard_s: float, is_backlog: bool) -> None:
        """Count a message of an agent that does not own the engine. What was stored before this reader began may be of
        an earlier owner.
        """
        owner = self._owners.get(engine)
        if is_backlog or self._fixed:
            return
        if owner is not None and agent in owner.before and heard_s - self._moved_s[engine] < JUST_MOVED_S:
            return
        self.refused[reason] += 1
        before = self._refusals.get((agent, reason))
        messages, since_s = (before.messages + 1, before.since_s) if before is not None else (1, heard_s)
        self._refusals[agent, reason] = RefusedAgent(
            agent, reason, engine, owner.agent if owner is not None else "", messages, since_s, heard_s
        )

    # ---------------------------------------------------------------- what is known

    def owner(self, engine: str) -> str:
        """Return the agent that owns an engine, empty if none is known."""
        found = self._owners.get(engine)
        return self._fixed or (found.agent if found is not None else "")

    def owns(self, engine: str, agent: str) -> bool:
        """Return whether an agent owns an engine."""
        return bool(agent) and self.owner(engine) == agent

    def owned(self, engine: str, agent: str) -> bool:
        """Return whether an agent owned an engine before its owner did."""
        found = self._owners.get(engine)
        return bool(self._fixed) or (found is not None and agent in found.before)

    def engines(self) -> dict[str, list[str]]:
        """Return the engines of each agent that has any."""
        found: dict[str, list[str]] = {}
        for engine, owner in self._owners.items():
            found.setdefault(owner.agent, []).append(engine)
        return found

    def refusals(self, after_s: float) -> list[RefusedAgent]:
        """Return the agents whose messages were refused after a time, by reason."""
        return [each for each in self._refusals.values() if each.last_s > after_s]

    def take_dropped(self) -> list[str]:
        """Return the engines that made room for others. Each call returns what is new since the last."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def heard_s(self, agent: str) -> float:
        """Return when an agent wrote something last, -inf if it never did."""
        return self._agents.get(agent, float("-inf"))

    def give_back(self, owners: Sequence[EngineOwner]) -> None:
        """Take back what could not be written. What changed since counts."""
        for owner in owners:
            self._unwritten.setdefault(owner.engine, owner)

    def take_unwritten(self) -> list[EngineOwner]:
        """Return the owners that the bucket does not have yet. Each call returns what is new since the last."""
        unwritten, self._unwritten = list(self._unwritten.values()), {}
        return unwritten
