"""Blocks that do not come back."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import (
    affected_blocks,
    blocks_of,
    deferred,
    exactly,
    idle_with_deferrals,
    no_requests,
    ownerless_blocks,
    triggers,
)
from .scenario import Way, incident
from .shapes import (
    AHEAD,
    BUSY,
    CHAT,
    FETCHED,
    FETCHED_FINE,
    FETCHED_POOL,
    FETCHED_URGENT,
    FINE,
    GONE,
    HOST,
    LEAVING,
    MEDIUM,
    NO_PREFIXES,
    SMALL,
    URGENT,
)

SHARING: Final = Clients("s", rate=1, until_s=15, leave=0.6, prefixes=2, prefix=160)

LEAKS: Final = (
    *incident(
        "leak.finished-held",
        Way("chat", {**SMALL, **HOST}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST}, (BUSY,), ":every=3"),
        Way("urgent", {**FINE, **HOST}, (URGENT, LEAVING), ":after=5:limit=4"),
        seconds=250,
        waits_s=150,  # of four together, where few transfers have shown the pace
        blocks=exactly(affected_blocks),
    ),
    *incident(
        "leak.remote-load-lost",
        Way("all", FETCHED_POOL, (FETCHED, GONE)),
        Way("urgent", FETCHED_URGENT, (FETCHED, GONE), ":every=2"),
        Way("fine", FETCHED_FINE, (FETCHED, GONE), ":limit=2"),
        seconds=100,
        waits_s=60,  # no transfer has shown the pace
        blocks=exactly(affected_blocks),
    ),
    *incident(
        "leak.lease-burst",
        Way("chat", {**MEDIUM, **HOST, "kv_lease_seconds": 10}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST, "kv_lease_seconds": 10}, (BUSY,), ":every=2"),
        Way("urgent", {**FINE, **HOST, "kv_lease_seconds": 10}, (URGENT, LEAVING), ":after=3:limit=5"),
        waits_s=10,  # the lease
        onset=triggers(3),
        blocks=exactly(affected_blocks),
    ),
    *incident(
        "leak.idle-not-polled",
        Way("chat", {**SMALL, **HOST}, (CHAT,)),
        Way("busy", {**MEDIUM, **HOST}, (BUSY,), ":after=2"),
        Way("four at once", {**FINE, **HOST}, (Clients(times=(3.0,) * 4, prompt=(60, 60), output=(20, 20)),)),
        seconds=250,
        waits_s=150,  # of four together, where few transfers have shown the pace
        onset=idle_with_deferrals,
        requests=exactly(deferred),
        blocks=exactly(blocks_of(deferred)),
    ),
    *incident(
        "leak.unaccounted",
        Way("all", MEDIUM, (LEAVING,)),
        Way("sharing", MEDIUM, (SHARING, CHAT), ":every=3"),
        Way("urgent", FINE, (LEAVING, URGENT), ":after=2:limit=3"),
        grace=("leak.unaccounted.grace_s",),
        blocks=exactly(ownerless_blocks),
    ),
    *incident(
        "leak.rising-floor",
        Way("all", SMALL, (Clients(times=tuple(range(1, 22, 3)), output=(10, 30)),)),
        Way("slower", MEDIUM, (Clients(times=tuple(range(1, 40, 3)), output=(10, 30)),), ":every=2"),
        Way(
            "in pairs", {**FINE, **NO_PREFIXES}, (Clients(times=(*range(1, 22, 3),) * 2, output=(10, 30)),), ":every=2"
        ),
        seconds=60,
        onset=triggers(3),
        # Until it has risen often enough, what is left lies unaccounted.
        consequences=frozenset({"leak.unaccounted"}),
        blocks=exactly(ownerless_blocks),
    ),
    *incident(
        "leak.deferred-free-stalled",
        Way("all", {**MEDIUM, **AHEAD}, (LEAVING,)),
        Way("bare", {**MEDIUM, **AHEAD, **NO_PREFIXES}, (LEAVING, CHAT), ":every=3"),
        Way("urgent", {**FINE, **AHEAD}, (LEAVING, URGENT), ":limit=3"),
        grace=("leak.deferred-free-stalled.grace_s",),
        blocks=exactly(ownerless_blocks),
    ),
    *incident(
        "leak.external-pins",
        Way("all", FETCHED_POOL, (FETCHED,)),
        Way("urgent", FETCHED_URGENT, (FETCHED,), ":every=2"),
        Way("fine", FETCHED_FINE, (FETCHED,), ":after=3"),
        grace=("leak.external-pins.oldest_s",),
        requests=exactly(no_requests),
        blocks=exactly(no_requests),
    ),
)
