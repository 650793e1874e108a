"""The leases as one agent knows them: who is alive, which leases are free, what to acquire, renew and hand over.

No I/O and no clock: times are seconds of this agent's monotonic clock. A lease is over when none of its renewals was
received for AGENT_LEASE_S by the clock of the agent that takes it, and its holder stops relying on it HOLD_S after it
began to send the last renewal that succeeded. No two clocks are compared, and writes are compare-and-set, so two agents
never both rely on a lease while clocks run at about the same rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from .bus_subjects import short_hash, subject_token

RENEW_LEASE_S: Final = 3.0
AGENT_LEASE_S: Final = 15.0
"""When the node that leads a stream is lost, JetStream elects another in 4 to 9 s, and no agent can renew until then.
An agent whose own node hangs needs up to 6 s to leave it. 15 s are both, so that neither moves an engine."""
HOLD_S: Final = 12.0
"""Shorter than a lease by one renewal: for what is under way when the holder finds out."""
GATHER_S: Final = 2.0
"""After its first heartbeat an agent waits so long before it acquires, so that agents that start together share."""
FALLBACK_S: Final = 3.0
"""Each agent behind the first in rendezvous order waits so much longer for a free lease: the first may be unable."""
RETURN_S: Final = 30.0
"""An engine moves back to an agent that comes first once that agent has been alive for so long: one that restarts over
and over moves nothing."""
MOVE_EVERY_S: Final = 2.0
"""Between two engines that an agent hands over, so that a fleet does not move all at once."""
FORGET_S: Final = 86_000.0
"""The bucket drops a record after a day. A little before that its revision no longer counts."""


class AgentRecord(msgspec.Struct, frozen=True):
    """A heartbeat: who is alive, and the leases it may hold, by key. `instance` is this run of the agent."""

    agent: str
    instance: str
    leases: list[str]
    major: int = 1


class LeaseRecord(msgspec.Struct, frozen=True):
    """A lease: its holder, empty once it was handed over, and the engines that the last holder found there. before:
    the agent that handed it over.
    """

    agent: str
    instance: str
    engines: list[str] = []
    major: int = 1
    before: str = ""


class Lease(NamedTuple):
    """A lease as it was last received."""

    record: LeaseRecord
    revision: int
    received_s: float


class LeaseStep(NamedTuple):
    """A write to make for a target, if its lease still has `revision`."""

    action: Literal["acquire", "renew", "hand-over"]
    target: str
    revision: int


class _Agent(NamedTuple):
    record: AgentRecord
    since_s: float
    received_s: float


def lease_key(scope: str, target: str) -> str:
    """Return the key of a target's lease. `scope` keeps apart what has one address on many machines."""
    return f"engine.{short_hash(chr(0).join((scope, target)))}"


def agent_key(agent: str) -> str:
    """Return the key of an agent's heartbeat."""
    return f"agent.{subject_token(agent)}"


def ranked(engine: str, agents: Iterable[str]) -> list[str]:
    """Return the agents in the order in which they should process an engine.

    Highest random weight: each agent's weight for the engine is a hash of both names, and the highest comes first. When
    an agent leaves, only its engines move, spread over the others. Thaler and Ravishankar, "Using name-based mappings
    to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998.
    """
    # The byte between the names occurs in neither.
    return sorted(set(agents), key=lambda agent: (short_hash(f"{engine}\0{agent}"), agent), reverse=True)


class LeaseTable:
    """The leases of `targets`, by key, as this run of `agent` knows them. Not thread-safe but for `holds`."""

    def __init__(self, agent: str, instance: str, targets: dict[str, str]) -> None:
        self.agent = agent
        self.instance = instance
        self.keys = dict(targets)
        """The lease key of each target."""
        self.namesake = False
        """Whether another process runs under this agent's name."""
        self._leases: dict[str, Lease] = {}
        self._agents: dict[str, _Agent] = {}
        self._held: dict[str, float] = {}
        """When the last renewal that succeeded began, by target."""
        self._leaving: set[str] = set()
        """Targets that this agent holds and does not name any more."""
        self._free_since: dict[str, float] = {}
        self._began_s = -1.0
        self._moved_s = 0.0

    def set_targets(self, targets: dict[str, str]) -> None:
        """Take the targets that this agent can read now, with their keys. A lease of any other is handed over."""
        self._leaving = self._held.keys() - targets.keys()
        self.keys = targets | {target: self.keys[target] for target in self._leaving}

    def heartbeat(self) -> AgentRecord:
        """Return this agent's heartbeat."""
        return AgentRecord(
            self.agent, self.instance, sorted(self.keys[target] for target in self.keys.keys() - self._leaving)
        )

    def began(self, now_s: float) -> None:
        """Note that the whole bucket was read and the first heartbeat was stored."""
        if self._began_s < 0:
            self._began_s = now_s

    # ---------------------------------------------------------------- what is received

    def receive_agent(self, record: AgentRecord, now_s: float) -> None:
        """Take a heartbeat."""
        if record.agent == self.agent:
            # Only one that comes after this run's own is of a process that runs now.
            self.namesake = record.instance != self.instance and self._began_s >= 0
        before = self._agents.get(record.agent)
        is_same = before is not None and now_s - before.received_s < AGENT_LEASE_S
        since_s = before.since_s if before is not None and is_same else now_s
        self._agents[record.agent] = _Agent(record, since_s, now_s)

    def receive_lease(self, key: str, record: LeaseRecord, revision: int, now_s: float) -> str:
        """Take a lease from the bucket. Return the target that this agent has lost by it, or an empty string."""
        before = self._leases.get(key)
        if before is not None and revision <= before.revision:
            return ""
        self._leases[key] = Lease(record, revision, now_s)
        for target in self._held:
            if self.keys.get(target) == key and not self._is_mine(record):
                del self._held[target]
                return target
        return ""

    # ---------------------------------------------------------------- what to do

    def steps(self, now_s: float, changed: Collection[str] = ()) -> list[LeaseStep]:
        """Return what to write now: renewals first. Changed targets (`changed`) do not wait."""
        steps = []
        for target, renewed_s in self._held.items():
            revision = self._leases[self.keys[target]].revision
            if target in self._leaving or self._should_move(target, now_s):
                self._moved_s = now_s
                steps.append(LeaseStep("hand-over", target, revision))
            elif now_s - renewed_s >= RENEW_LEASE_S or target in changed:
                steps.append(LeaseStep("renew", target, revision))
        if 0 <= self._began_s <= now_s - GATHER_S:
            steps += [
                LeaseStep("acquire", target, self._revision_of(target, now_s))
                for target in self.keys
                if target not in self._held and self._should_acquire(target, now_s)
            ]
        return steps

    def _should_acquire(self, target: str, now_s: float) -> bool:
        lease = self._leases.get(self.keys[target])
        is_taken = lease is not None and lease.record.agent and not self._is_mine(lease.record)
        if lease is not None and is_taken and now_s - lease.received_s < AGENT_LEASE_S:
            self._free_since.pop(target, None)
            return False
        since_s = self._free_since.setdefault(target, now_s)
        rank = self._candidates(target, now_s).index(self.agent)
        return now_s - since_s >= rank * FALLBACK_S

    def _should_move(self, target: str, now_s: float) -> bool:
        first = self._candidates(target, now_s)[0]
        if first == self.agent or now_s - self._moved_s < MOVE_EVERY_S:
            return False
        return now_s - self._agents[first].since_s >= RETURN_S

    def _candidates(self, target: str, now_s: float) -> list[str]:
        key = self.keys[target]
        live = [
            name
            for name, agent in self._agents.items()
            if now_s - agent.received_s < AGENT_LEASE_S and key in agent.record.leases
        ]
        return ranked(key, [*live, self.agent])

    def _revision_of(self, target: str, now_s: float) -> int:
        lease = self._leases.get(self.keys[target])
        return lease.revision if lease is not None and now_s - lease.received_s < FORGET_S else 0

    def last_steps(self) -> list[LeaseStep]:
        """Return the steps that hand every lease over: this agent ends."""
        return [
            LeaseStep("hand-over", target, self._leases[self.keys[target]].revision) for target in sorted(self._held)
        ]

    # ---------------------------------------------------------------- what was written

    def written(self, step: LeaseStep, record: LeaseRecord, revision: int, began_s: float) -> None:
        """Take what was written. `began_s`: when the write began."""
        self._leases[self.keys[step.target]] = Lease(record, revision, began_s)
        self._free_since.pop(step.target, None)
        if step.action == "hand-over":
            self._held.pop(step.target, None)
            if step.target in self._leaving:
                self._leaving.discard(step.target)
                del self.keys[step.target]
        else:
            self._held[step.target] = began_s

    def last_engines(self, target: str) -> Sequence[str]:
        """Return the engines that the last holder found at a target."""
        lease = self._leases.get(self.keys[target])
        return lease.record.engines if lease is not None else ()

    def last_record(self, target: str) -> LeaseRecord:
        """Return a lease as it was written last, an empty one if it never was."""
        lease = self._leases.get(self.keys[target])
        return lease.record if lease is not None else LeaseRecord("", "")

    def held(self) -> list[str]:
        """Return the targets whose lease this agent has, relied on or not."""
        return list(self._held)

    def holds(self, target: str, now_s: float) -> bool:
        """Return whether this agent may rely on a lease: no other can have it yet."""
        return now_s < self._held.get(target, -HOLD_S) + HOLD_S

    def _is_mine(self, record: LeaseRecord) -> bool:
        return (record.agent, record.instance) == (self.agent, self.instance)
