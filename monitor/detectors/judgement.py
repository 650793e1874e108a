"""What a detector says, and the catalogue of the codes that it may say."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

Severity = Literal["info", "warning", "error", "critical"]
Verdict = Literal["confirmed", "likely", "cannot-tell"]

SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "error", "critical")


class Entry(NamedTuple):
    """A class of incident: how grave, and its name in words."""

    severity: Severity
    title: str


CATALOGUE: Final[dict[str, Entry]] = {
    "leak.finished-held": Entry("error", "Finished requests keep their blocks"),
    "leak.remote-load-lost": Entry("error", "Blocks of aborted requests wait for a fetch that never reports"),
    "leak.idle-not-polled": Entry("warning", "An idle engine does not ask its KV connector for what is done"),
    "leak.lease-burst": Entry("warning", "Blocks come back only as their leases run out"),
    "leak.deferred-free-stalled": Entry("error", "Freed blocks wait for a step that is over"),
    "leak.session-pinned": Entry("warning", "Idle sessions keep their blocks"),
    "leak.external-pins": Entry("warning", "Blocks of an outer tier stay pinned and cannot be evicted"),
    "leak.encoder-cache": Entry("error", "Waiting requests hold the encoder's cache against one another"),
    "leak.rising-floor": Entry("warning", "Each drain to idle leaves more blocks in use than the one before"),
    "leak.unaccounted": Entry("error", "Blocks in use that nobody owns"),
    "stuck.never-fits": Entry("error", "A request needs more blocks than the pool has"),
    "stuck.self-preempt": Entry("error", "A request fills the pool, preempts itself and starts again"),
    "stuck.parked-loads": Entry("error", "Requests whose KV was fetched hold what the head of the queue lacks"),
    "stuck.head-of-line": Entry("warning", "One request that needs many blocks holds back others that would fit"),
    "stuck.remote-load": Entry("error", "Requests wait for a fetch of KV that does not end"),
    "stuck.lost-wakeup": Entry("error", "Fetched KV is there and the engine sleeps"),
    "stuck.promotion-starved": Entry("error", "Requests that are ready are not looked at"),
    "stuck.grammar": Entry("error", "Requests wait for a grammar that does not come"),
    "stuck.zero-token": Entry("error", "A running request is given no token at any step"),
    "stuck.encoder-budget": Entry("error", "A request is passed over for room in the encoder's cache"),
    "stuck.front-end": Entry("error", "Requests were received and never reach the scheduler"),
    "stuck.engine-stalled": Entry("critical", "Steps have stopped with work pending"),
    "stuck.rank-diverged": Entry("critical", "One rank of a data-parallel server has stopped"),
    "thrash.preemption": Entry("warning", "Requests are preempted again and again before they give a token"),
    "thrash.cascade": Entry("warning", "One pass preempts many, and nothing becomes free by it"),
    "thrash.after-retract": Entry("warning", "Long after a preemption far fewer requests run than could"),
    "collapse.lockstep": Entry("warning", "Requests in lock-step finish together and the next wave queues"),
    "collapse.preempt-all": Entry("error", "All running requests are preempted at once"),
    "collapse.prefix-hits": Entry("warning", "Prompts are computed again though their prefixes are in the cache"),
    "collapse.cache-flushed": Entry("warning", "Prefixes that were needed are pushed out of the cache"),
    "corrupt.double-free": Entry("critical", "A block was freed that was not held"),
    "corrupt.use-after-free": Entry("critical", "A block was handed out while it was held"),
    "corrupt.counter-drift": Entry("critical", "The engine's own accounts disagree"),
    "sizing.kv-too-small": Entry("warning", "The pool holds fewer requests than may run, and preemptions pay for it"),
    "sizing.kv-too-large": Entry("warning", "The pool leaves hardly any memory free beside the graphs"),
    "sizing.overreserved": Entry("warning", "Far more memory is kept for graphs than they take"),
    "sizing.bad-suggestion": Entry("warning", "The engine's advice on its pool is wrong"),
    "sizing.block-inflated": Entry("warning", "Blocks are so large that most of each stays empty"),
    "sizing.elsewhere": Entry("warning", "Much device memory is in use that the bill does not name"),
    "held.prefix-cache": Entry("info", "Cached blocks that no request uses"),
    "held.pool-reserved": Entry("info", "Memory that is the pool, taken at the start by design"),
    "held.long-request": Entry("info", "One request needs much of the pool, and uses it"),
    "blind.stream-gap": Entry("info", "Events were lost"),
    "blind.log-silence": Entry("info", "The log has fallen silent about an engine that had work"),
    "blind.not-exposed": Entry("info", "Figures that this engine's metrics do not have"),
    "blind.counter-lag": Entry("info", "What the engine's own counters say late, or never"),
}


class Evidence(msgspec.Struct, frozen=True):
    """A number that made a judgement. `source` tells where it was read (stream, audit, log, metrics, prometheus,
    kv-events, or report: told by a person), `position` where in it: of a stream the event (epoch/sequence/event) by
    which it became so, of a log the line; empty where there is none, as on a metrics page.
    """

    name: str
    value: float | int | str
    unit: str = ""
    source: str = "stream"
    position: str = ""


class Judgement(msgspec.Struct, frozen=True):
    """A detector's word about one engine at one moment.

    `key` tells one trouble from another of the same code and engine. `pending` is a trouble still within its grace.
    `since_ns` is wall time (0: not known), `position` the place in the stream or log where it began.
    `missing` names the signal that would raise the verdict to confirmed.
    """

    code: str
    engine: str
    verdict: Verdict
    explanation: str
    key: str = ""
    pending: bool = False
    since_ns: int = 0
    position: str = ""
    requests: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    do_now: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    wont_help: tuple[str, ...] = ()
    missing: str = ""
