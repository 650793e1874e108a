"""What a hub itself finds: agents whose clocks are off, whose messages are refused, or that name too many engines.

These are blind.* findings: they are about who observes, and no engine causes them. `key` is the agent's name.
"""

from __future__ import annotations

import threading
import time
from typing import Final, NamedTuple

from ..base import limits
from ..base.text import counted, duration
from ..detectors.blind.clock_jump import ClockJumped
from ..detectors.blind.name_clash import NameClash
from ..detectors.findings import Finding, Findings, Transition
from ..detectors.judgement import Alternative, Evidence, Judgement
from ..fleet.agent_clocks import ClockOffset
from ..fleet.fleet_link import FleetLink
from ..fleet.fleet_owners import OWNER_SILENT_S, RefusedAgent

LASTS_S: Final = 60.0
"""So long after the last message that shows it a finding fires."""


class HubFindings:
    """The findings of one hub about the agents of `link`'s tenant, since the hub began. Thread-safe.

    Their times are this machine's wall clock as the hub began, and its monotonic clock from then on.
    """

    def __init__(self, link: FleetLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._findings = Findings()
        self._judged: set[str] = set()
        self._transitions: list[Transition] = []
        self._began_ns = time.time_ns() - time.monotonic_ns()

    def firing(self) -> list[Finding]:
        """Return what fires now."""
        with self._lock:
            self._judge()
            return self._findings.firing()

    def resolved(self) -> list[Finding]:
        """Return what is over, the latest first."""
        with self._lock:
            self._judge()
            return self._findings.resolved()

    def finding(self, id: str) -> Finding | None:
        """Return the finding of an id, or None if it is no hub's."""
        with self._lock:
            return self._findings.by_id(id)

    def take_transitions(self) -> list[Transition]:
        """Return what began to fire or was resolved. Each call returns what is new since the last."""
        with self._lock:
            self._judge()
            taken, self._transitions = self._transitions, []
            return taken

    def _judge(self) -> None:
        after_s = time.monotonic() - LASTS_S
        with self._link.fold() as fold:
            clocks, refusals = fold.clocks.off(after_s), fold.owners.refusals(after_s)
        judged: dict[str, list[Judgement]] = {subject: [] for subject in self._judged}
        for each in (*map(self._clock, clocks), *map(self._refusal, refusals)):
            judged.setdefault(each.engine, []).append(each)
        now_ns = self._began_ns + time.monotonic_ns()
        for subject, judgements in judged.items():
            self._transitions += self._findings.update(subject, now_ns, judgements)
        self._judged = {finding.judgement.engine for finding in self._findings.firing()}
        del self._transitions[: -limits.BUS_FINDINGS]

    def _at(self, monotonic_s: float) -> int:
        return self._began_ns + round(monotonic_s * 1e9)

    def _clock(self, clock: ClockOffset) -> Judgement:
        is_ahead = clock.ahead_s > 0
        side = "ahead of" if is_ahead else "behind"
        shown = (
            f"{counted(clock.corrected, 'message')} of it had a time in the future, and got the time of its receipt."
            if is_ahead
            else "Times that it reports, such as since when a finding holds, are as much too early."
        )
        return Judgement(
            code=ClockJumped.code,
            engine=f"agent {clock.agent}",
            verdict="confirmed" if is_ahead else "likely",
            key=clock.agent,
            since_ns=self._at(clock.since_s),
            evidence=(
                Evidence("agent", clock.agent, "", "kvscope"),
                Evidence("clock_ahead_s", round(clock.ahead_s, 3), "s", "kvscope"),
                Evidence("messages_corrected", clock.corrected, "messages", "kvscope"),
            ),
            explanation=(
                f"The wall clock of agent {clock.agent} is {duration(abs(clock.ahead_s))} {side} the NATS server's, by"
                f" when its messages were sent and stored. {shown} Ages, order and states here do not depend on it:"
                " they follow the stream."
            ),
            missing="" if is_ahead else "the time of day on the agent's machine: its messages may be late instead",
            alternatives=() if is_ahead else (Alternative("NATS stores every message of the agent that late", ""),),
            do_now=(f"Compare the time of day on the machine of agent {clock.agent} with another one's.",),
            change=("Start time synchronization (chrony, systemd-timesyncd) on the machines of agents.",),
            wont_help=("Restarting the hub: the messages have the agent's times.",),
        )

    def _refusal(self, refusal: RefusedAgent) -> Judgement:
        explanation, do_now, change = _not_owner(refusal) if refusal.reason == "not-owner" else _too_many(refusal)
        return Judgement(
            code=NameClash.code,
            engine=f"agent {refusal.agent}",
            verdict="confirmed",
            key=f"{refusal.agent} {refusal.reason}",
            since_ns=self._at(refusal.since_s),
            evidence=(
                Evidence("agent_refused", refusal.agent, "", "kvscope"),
                Evidence("agent_owner", refusal.owner, "", "kvscope"),
                Evidence("messages_refused", refusal.messages, "messages", "kvscope"),
            ),
            explanation=explanation,
            do_now=do_now,
            change=change,
            wont_help=("Restarting the hub: it keeps who owns an engine in NATS.",),
        )


class _Words(NamedTuple):
    """What a refusal means, and what to do."""

    explanation: str
    do_now: tuple[str, ...]
    change: tuple[str, ...]


def _not_owner(refusal: RefusedAgent) -> _Words:
    agent, owner = refusal.agent, refusal.owner
    return _Words(
        f"Agent {agent} sends messages about {refusal.engine}, which agent {owner} owns: by its lease, or because it"
        f" described the engine first. {counted(refusal.messages, 'message')} of agent {agent} about engines of others"
        f" {'was' if refusal.messages == 1 else 'were'} refused, and changed nothing here.",
        (
            f"Find out whether agents {owner} and {agent} both read this engine, or two engines share the name.",
            f"If nobody started agent {agent}, revoke its credentials: only they can send in this name.",
        ),
        (
            "Let agents that read the same engines share them (--nats-share). Give each engine a name of its own.",
            f"Stop the agent that should not have it: the other's messages count {OWNER_SILENT_S:.0f} s later.",
        ),
    )


def _too_many(refusal: RefusedAgent) -> _Words:
    agent = refusal.agent
    bound = (
        f"{limits.BUS_AGENT_ENGINES:,} engines of one agent"
        if refusal.reason == "agent-full"
        else f"{limits.BUS_TENANT_ENGINES:,} engines of a tenant"
    )
    return _Words(
        f"A hub shows {bound}, and agent {agent} names more. {counted(refusal.messages, 'message')} about further ones"
        f" {'was' if refusal.messages == 1 else 'were'} refused, the last about {refusal.engine}. These engines are not"
        " shown.",
        (f"List the engines of agent {agent} on its own page: its list of targets may have grown.",),
        ("Divide the fleet into tenants (--nats-tenant), with a hub for each.",),
    )
