"""Other explanations of what each code sees in the event stream, and the evidence that excludes each.

A rule's own conditions exclude most of them. The others (`Unless`) remain while a verdict is *likely*: the signal that
would exclude them is absent. A *confirmed* finding has none that remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.detectors.judgement import Alternative, Judgement
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class Unless(NamedTuple):
    """An alternative that the rule excludes only where the verdict is confirmed, by this evidence."""

    name: str
    excluded_by: str


UNSEEN_CAUSE: Final = "a cause that this source does not expose"
"""An alternative of a finding from metrics, a log or a report, whose `missing` names the source that would show it."""
NO_EVENT_IS_MISSING: Final = "no event of the stream is missing"
NAMED_SINCE: Final = "events received since the loss name its blocks and requests"
_LIVE_REQUEST: Final = Alternative("a live request holds the blocks", "no table of a live request names them")
_SLOW_TRANSFER: Final = Unless("a large transfer over a slow link", "the connector reported that the transfer ended")
_NO_WORK: Final = Alternative("the scheduler makes no pass", "scheduler passes since then, from the heartbeats")
_NO_ROOM: Final = Alternative("too few free blocks", "blocks are free while it waits")
_ENGINE_PAUSED: Final = Alternative("the engine is paused or asleep", "its mode is unpaused")
_ORDINARY_LOAD: Final = Alternative("a normal load on a full pool", "the share of recomputed work")

ALTERNATIVES: Final[Mapping[str, tuple[Alternative | Unless, ...]]] = {
    "leak.remote-load-lost": (_LIVE_REQUEST, _SLOW_TRANSFER),
    "leak.finished-held": (
        _LIVE_REQUEST,
        Alternative("a transfer of normal duration", "the connector's lease, or the pending period, has passed"),
        Unless("a slow transfer that no lease bounds", "the connector's lease has passed"),
        Unless("a consumer that renews its lease while its own queue is long", "the leases that the connector shows"),
    ),
    "leak.idle-not-polled": (
        _LIVE_REQUEST,
        Alternative(
            "a transfer that is still running",
            "the engine has not polled its connector since, or was told of the end as soon as it did",
        ),
    ),
    "leak.lease-burst": (
        Alternative(
            "one client that disconnected, with few blocks",
            "the leases of several requests expired, or they kept much of the pool",
        ),
    ),
    "leak.deferred-free-stalled": (
        _LIVE_REQUEST,
        Alternative("the step that the blocks wait for still runs", "that step is complete"),
    ),
    "leak.session-pinned": (Alternative("a session in use", "no input for longer than the allowed idle time"),),
    "leak.external-pins": (
        Unless("pins that are still needed", "no request is being fetched from that tier"),
        Alternative("pins of usual length", "the age of the oldest pin"),
    ),
    "leak.encoder-cache": (_NO_ROOM, Unless("one item larger than the encoder cache", "the cache's own contents")),
    "leak.rising-floor": (
        _LIVE_REQUEST,
        Alternative("one leak that is over", "the floor rose at each of the last drains"),
        Unless("an unreported free", "an audit of the engine's own reference counts since then"),
    ),
    "leak.unaccounted": (
        _LIVE_REQUEST,
        Alternative("a connector or a step keeps the blocks", "no deferral was announced for them"),
        Unless("an unreported free", "an audit of the engine's own reference counts since then"),
    ),
    "stuck.never-fits": (
        Alternative("blocks that others hold", "it needs more than the whole pool has"),
        Unless("blocks that a connector still returns", "no connector holds any of them"),
    ),
    "stuck.head-of-line": (
        _NO_WORK,
        Alternative("no room for any request", "requests behind it fit in the free blocks"),
    ),
    "stuck.parked-loads": (
        _NO_WORK,
        Alternative("a running fetch that will free blocks", "no fetch is under way"),
        Alternative("a running request that will free blocks", "no request runs"),
    ),
    "stuck.remote-load": (
        _SLOW_TRANSFER,
        Alternative("a fetch that ended without the engine noticing", "no end was reported"),
    ),
    "stuck.lost-wakeup": (
        Alternative("the fetch has not ended", "the connector reported its end"),
        Alternative("a long step", "no step is in flight"),
    ),
    "stuck.promotion-starved": (
        _NO_WORK,
        Alternative(
            "the head of the queue is rejected before it",
            "later requests were admitted, none is refused, or each pass would put it back in the queue",
        ),
    ),
    "stuck.grammar": (
        Alternative("no place in the batch", "the scheduler reached the request and found no grammar"),
        Unless("a compiler that is still running", "a stack of the process"),
    ),
    "stuck.zero-token": (_NO_WORK, _NO_ROOM),
    "stuck.encoder-budget": (
        _NO_ROOM,
        Unless("other requests keep the encoder cache full", "the cache's own contents"),
    ),
    "stuck.self-preempt": (
        Alternative("others take its blocks", "it was alone in the pool at each preemption"),
        Alternative("progress between the preemptions", "no output token in between"),
    ),
    "stuck.lost-request": (
        Alternative("events later than the heartbeat", "the same in several passes in a row"),
        Unless("an end that the stream missed", "the engine's own report of requests in no queue"),
    ),
    "stuck.front-end": (_NO_WORK, Unless("input processing of a large prompt", "a stack of the front end")),
    "stuck.engine-stalled": (
        _ENGINE_PAUSED,
        Unless("a slow but sound step", "the model of this engine's own step times"),
        Unless("a reader that is late", "heartbeats that show the step in flight"),
    ),
    "stuck.rank-diverged": (
        _ENGINE_PAUSED,
        Unless("a slow but sound step", "the other ranks completed steps meanwhile"),
    ),
    "thrash.preemption": (
        _ORDINARY_LOAD,
        Alternative("a reset of the prefix cache", "the reason of each preemption"),
    ),
    "thrash.cascade": (Alternative("preemptions that freed room", "the free blocks before and after each"),),
    "thrash.after-retract": (
        _NO_ROOM,
        Unless("a lower limit set on purpose", "the limit that the engine allows itself"),
    ),
    "collapse.lockstep": (
        Alternative("requests that end together by chance", "their number, and how close together they ended"),
        Alternative("preemptions", "no preemption freed these blocks"),
        Alternative("a load that has ended", "the next wave was queued"),
    ),
    "collapse.preempt-all": (Alternative("one large prompt", "the share of the running that lost their blocks"),),
    "collapse.prefix-hits": (
        Alternative("prompts without a common prefix", "the same content was stored again while cached"),
    ),
    "collapse.cache-flushed": (
        Alternative("prefixes that no request asks for", "evicted blocks were recomputed"),
        Alternative("live requests that need the pool", "the share of the pool that was cached and idle"),
    ),
    "corrupt.double-free": (Alternative("a shared block", "its known references before the free"),),
    "corrupt.use-after-free": (Alternative("a step that had ended", "the step in flight that may write to it"),),
    "corrupt.counter-drift": (Alternative("a count at another time", "the counters come with the events"),),
    "corrupt.conservation": (Alternative("a block counted twice", "each block is counted under one owner"),),
    "sizing.kv-too-small": (
        Alternative("a leak that fills the pool", "no finding about blocks that do not return"),
        Alternative("a few long requests", "the number of preemptions, and the recomputed work"),
    ),
    "sizing.block-inflated": (Alternative("short requests by chance", "the mean over all requests"),),
}
"""By code. The text of a log or a report, and metrics, exclude nothing: see `alternatives_of`."""


def alternatives_of(ledger: EngineLedger, judged: Judgement) -> tuple[Alternative, ...]:
    """Return the other explanations of a judgement. excluded_by is empty for those that remain."""
    confirmed = judged.verdict == "confirmed"
    table = ALTERNATIVES.get(judged.code, ()) if ledger.has_stream else ()
    found = [
        Alternative(one.name, one.excluded_by if confirmed or isinstance(one, Alternative) else "") for one in table
    ]
    if table:
        lost = (
            NAMED_SINCE if ledger.state.damaged and confirmed else "" if ledger.state.damaged else NO_EVENT_IS_MISSING
        )
        found.append(Alternative("events that were lost", lost))
    if not confirmed and all(one.excluded_by for one in found):
        found.append(Alternative(UNSEEN_CAUSE, ""))
    return tuple(found)


def with_alternatives(ledger: EngineLedger, judged: Judgement) -> Judgement:
    """Return the judgement with its alternatives, unless its detector has named them."""
    found = judged.alternatives or alternatives_of(ledger, judged)
    return msgspec.structs.replace(judged, alternatives=found) if found else judged
