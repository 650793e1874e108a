"""Queries about many engines together: the answer to `fleet_overview`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

STRIP_BUCKET_S: Final = 10.0
STRIP_BUCKETS: Final = 60
"""Buckets of a strip: ten minutes."""
UNKNOWN_USAGE: Final = -1

FleetHarm = Literal["critical", "error", "warning", "unserved", "unknown", "none"]
HARMS: Final[tuple[FleetHarm, ...]] = ("critical", "error", "warning", "unserved", "unknown", "none")
"""The worst first. unserved: no finding explains why clients get nothing. unknown: nothing is known of it now."""
KVRole = Literal["", "producer", "consumer", "both"]
HeldUpBy = Literal["none", "producers", "consumers", "transfer"]
CauseKind = Literal["release", "zone", "node", "agent", "model", "connector", "time"]


class FleetEngineView(msgspec.Struct, frozen=True):
    """One engine among many. `findings` counts those that fire by severity. `codes` are theirs, the worst first.

    agent: the service that processes it, empty where that is this one. age_s: of what is shown. usage_strip: the pool's
    usage in percent in each of the last STRIP_BUCKETS buckets, the latest last, -1 where it is not known.

    kv_role: whether it computes KV for other engines (producer) or fetches it (consumer), empty where that is unknown.
    held_blocks: of finished requests, for a KV connector. fetching: requests that wait for remote KV. Both are None
    without an event stream.
    """

    engine: str
    harm: FleetHarm
    status: str
    model: str = ""
    version: str = ""
    zone: str = ""
    node: str = ""
    agent: str = ""
    connector: str = ""
    usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    output_tokens_per_s: float | None = None
    findings: dict[str, int] = {}
    codes: list[str] = []
    age_s: float = 0.0
    usage_strip: list[int] = []
    service: str = ""
    kv_role: KVRole = ""
    held_blocks: int | None = None
    fetching: int | None = None


class FleetAgentView(msgspec.Struct, frozen=True):
    """A service that processes engines. `error` is the reason why it does not report or answer, or empty.

    age_s: since its last message was stored.
    """

    agent: str
    engines: int
    age_s: float
    error: str = ""
    zone: str = ""
    node: str = ""


class FleetCause(msgspec.Struct, frozen=True):
    """Findings of one code on several engines that have something in common: `kind` is what, `name` which.

    of_engines: engines that have it in common, found or not. `engines` are those where the code fires. since: the
    earliest. Several groups may name one finding: what its engines share is not yet what causes it.
    """

    kind: CauseKind
    name: str
    code: str
    title: str
    severity: str
    engines: list[str]
    of_engines: int
    findings: list[str]
    since: str | None
    explanation: str


class FleetService(msgspec.Struct, frozen=True):
    """The prefill (producers) and decode engines (consumers) of one service, by name.

    grouped_by: the service's name, or model and zone where engines have none. held_blocks: of all producers, of
    finished requests for transfers. fetching: requests of all consumers that wait for remote KV. held_up_by: the side
    that holds the other up, or `transfer` where no side is shown to. statement: what findings that fire show, empty
    if none does.
    """

    name: str
    grouped_by: Literal["service", "model"]
    producers: list[str]
    consumers: list[str]
    held_blocks: int | None
    fetching: int | None
    held_up_by: HeldUpBy = "none"
    verdict: Literal["", "likely", "cannot-tell"] = ""
    statement: str = ""


class FleetNote(msgspec.Struct, frozen=True):
    """A note that is no finding: about an engine, such as a change of its agent, or about a service (no engine)."""

    at: str | None
    engine: str
    kind: str
    text: str
    agent: str


class FleetView(msgspec.Struct, frozen=True):
    """Every engine, the worst first, with what processes it, causes in common, services and the latest notes.

    is_complete: whether all that is stored was read. unreadable: messages that could not be read, by reason.
    """

    engines: list[FleetEngineView]
    agents: list[FleetAgentView] = []
    causes: list[FleetCause] = []
    notes: list[FleetNote] = []
    is_complete: bool = True
    unreadable: dict[str, int] = {}
    services: list[FleetService] = []


def usage_strip(points: Iterable[tuple[int, float | None]], now_ns: int) -> list[int]:
    """Return the strip of points (wall ns, usage as a share) until now: the highest of each bucket."""
    strip = [UNKNOWN_USAGE] * STRIP_BUCKETS
    for at_ns, usage in points:
        back = int((now_ns - at_ns) / 1e9 // STRIP_BUCKET_S)
        if usage is not None and 0 <= back < STRIP_BUCKETS:
            place = STRIP_BUCKETS - 1 - back
            strip[place] = max(strip[place], min(100, round(100 * usage)))
    return strip


UNSERVED_STATUSES: Final = ("stuck", "silent", "stopped")


def harm_of(status: str, findings: dict[str, int]) -> FleetHarm:
    """Return how badly an engine is off, by its status and its findings that fire, by severity.

    A finding counts while nothing is known of its engine now: nothing shows that it is over.
    """
    for severity in ("critical", "error", "warning"):
        if findings.get(severity):
            return severity
    if status in ("unknown", "gone"):
        return "unknown"
    return "unserved" if status in UNSERVED_STATUSES else "none"


def fleet_order(engine: FleetEngineView) -> tuple[int, int, str]:
    """Order engines, the worst off first."""
    return HARMS.index(engine.harm), -(engine.waiting or 0), engine.engine


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
