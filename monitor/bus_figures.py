"""How the connection to NATS is, for /healthz and /metrics."""

from __future__ import annotations

import msgspec


class BusFigures(msgspec.Struct, frozen=True):
    """The state of the bus as one agent sees it.

    spooled, spooled_bytes: messages that wait on this machine. published: messages the streams acknowledged since the
    service began, by kind. dropped: messages given up because the spool was full, or because another agent processed
    the engine meanwhile, by kind. error: why nothing is sent just now, empty while all is well. away_s: for how long.
    leases: engines that this agent processes. taken_over: engines that it took over since it began. answered: questions
    of hubs, by outcome.
    """

    agent: str
    tenant: str
    connected: bool
    error: str
    away_s: float
    spooled: int
    spooled_bytes: int
    published: dict[str, int]
    dropped: dict[str, int]
    leases: int = 0
    taken_over: int = 0
    answered: dict[str, int] = {}
