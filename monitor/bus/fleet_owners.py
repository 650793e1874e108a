"""Which agent has an engine, by the leases and the points of a tenant: no I/O and no clock."""

from __future__ import annotations

from typing import NamedTuple


class EngineOwner(NamedTuple):
    """The agent that has an engine, and since when that is known (wall s, by the server's clock)."""

    agent: str
    known_s: float


class FleetOwners:
    """The owner of each engine: the agent of its latest lease or point, whichever was stored last.

    A lease moves at once and its first point follows, so that a lease is newer while an engine changes hands. An agent
    without leases sends points alone, which are newer than a lease that it had once.
    """

    def __init__(self) -> None:
        self._owners: dict[str, EngineOwner] = {}
        self._seen_s: dict[str, float] = {}

    def take(self, engine: str, agent: str, stored_s: float) -> None:
        """Take the agent of a lease or point. An empty name means that the agent handed the lease over."""
        before = self._owners.get(engine)
        if agent and (before is None or stored_s >= before.known_s):
            self._owners[engine] = EngineOwner(agent, stored_s)

    def see(self, agent: str, stored_s: float) -> None:
        """Note that an agent wrote something."""
        self._seen_s[agent] = max(stored_s, self._seen_s.get(agent, 0.0))

    def owner(self, engine: str) -> str:
        """Return the agent that has an engine, empty if none is known."""
        found = self._owners.get(engine)
        return found.agent if found is not None else ""

    def engines(self) -> dict[str, list[str]]:
        """Return the engines of each agent that has any."""
        found: dict[str, list[str]] = {}
        for engine, owner in self._owners.items():
            found.setdefault(owner.agent, []).append(engine)
        return found

    def last_seen_s(self, agent: str) -> float:
        """Return when an agent wrote something last (wall s), 0 if it never did."""
        return self._seen_s.get(agent, 0.0)
