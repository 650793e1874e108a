"""What a detector says about an engine: a judgement with its evidence, and the ties between two of them.

Judgements are typed by the data that a cause and its effect share. A tie decides whether one finding may be the effect
of another: the numbers must fit, so that what a leak holds is enough for what the head of the queue is short of. It
reads attributes of judgements and never evidence by name.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Required, TypedDict

import msgspec

from ..ledger.pool_forecast import PoolForecast

Severity = Literal["none", "info", "warning", "error", "critical"]
"""A hypothesis, for which nothing was measured, has none."""
Verdict = Literal["confirmed", "likely", "cannot-tell"]
SEVERITIES: Final[tuple[Severity, ...]] = ("none", "info", "warning", "error", "critical")
VERDICTS: Final[tuple[Verdict, ...]] = ("cannot-tell", "likely", "confirmed")
"""From the weakest on."""


class Evidence(msgspec.Struct, frozen=True):
    """A number that made a judgement. `source` names where it was read (stream, audit, log, metrics, prometheus,
    kv-events, or report: written by a person), and `position` the place in it: for a stream the event
    (epoch/sequence/event) that made it so, for a log the line. It is empty where there is none, as on a metrics page.
    """

    name: str
    value: float | int | str
    unit: str = ""
    source: str = "stream"
    position: str = ""


def seen(name: str, value: float | str, unit: str = "", at: str = "") -> Evidence:
    """Return a number of the event stream, with the event that made it so."""
    return Evidence(name, value, unit, position=at)


class FindingHarm(msgspec.Struct, frozen=True):
    """The cost of a finding: its share of the pool, the requests that wait for it now, these as a share of all live
    ones, and how long they have waited for it together (request-seconds).

    forecast: when blocks that do not return will have filled the pool, if they go on as they have.
    None for numbers that metrics do not show.
    """

    share_of_pool: float | None
    requests_waiting: int | None
    share_of_requests: float | None
    lost_s: float | None
    forecast: PoolForecast | None = None


class Alternative(msgspec.Struct, frozen=True):
    """Another explanation of what was seen, and the evidence that excludes it: empty while nothing does."""

    name: str
    excluded_by: str


class Unless(NamedTuple):
    """An alternative that the rule excludes only where the verdict is confirmed, by this evidence."""

    name: str
    excluded_by: str


LIVE_REQUEST: Final = Alternative("a live request holds the blocks", "no table of a live request names them")
SLOW_TRANSFER: Final = Unless("a large transfer over a slow link", "the connector reported that the transfer ended")
NO_WORK: Final = Alternative("the scheduler makes no pass", "scheduler passes since then, from the heartbeats")
NO_ROOM: Final = Alternative("too few free blocks", "blocks are free while it waits")
ENGINE_PAUSED: Final = Alternative("the engine is paused or asleep", "its mode is unpaused")
ORDINARY_LOAD: Final = Alternative("a normal load on a full pool", "the share of recomputed work")


class Judgement(msgspec.Struct, frozen=True):
    """A detector's word about one engine at one moment.

    `key` separates problems of the same code and engine. `pending` is a problem still within its pending period.
    `since_ns` is wall time (0: not known), `position` the place in the stream or log where it began. `missing` names
    the signal that would raise the verdict to confirmed. `severity` and `harm` follow from what is measured of its
    effect (None: not measured, the catalogue's severity holds), `alternatives` from the verdict.
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
    severity: Severity | None = None
    harm: FindingHarm | None = None
    alternatives: tuple[Alternative, ...] = ()


class JudgementFields(TypedDict, total=False):
    """The fields of a judgement that a detector fills in: see `Detector.finding`."""

    verdict: Verdict
    explanation: Required[str]
    key: str
    pending: bool
    since_ns: int
    position: str
    requests: tuple[str, ...]
    blocks: tuple[int, ...]
    evidence: tuple[Evidence, ...]
    do_now: tuple[str, ...]
    change: tuple[str, ...]
    wont_help: tuple[str, ...]
    missing: str
    severity: Severity | None
    alternatives: tuple[Alternative, ...]


class TextJudgement(Judgement, frozen=True):
    """The evidence in the text of a log or a report, beside its statistics.

    `rank` is how probable a hypothesis is: 1 first, and 0 for what is none.
    """

    rank: int = 0


class HoldsBlocks(Judgement, frozen=True, kw_only=True):
    """Blocks of the pool are held and do not return. `share_of_pool` is None where only metrics are known."""

    share_of_pool: float | None


class ShortOfBlocks(Judgement, frozen=True, kw_only=True):
    """A request needs more blocks than are free for it. Both are 0 where only metrics are known."""

    blocks_needed: int
    blocks_free_for_it: int


MIN_SHARE: Final = 0.2
"""A share of the pool. Preemptions are put down to blocks that do not come back if these are so many: with less gone, a
load that thrashes is one that hardly fitted before.
"""


def holds_what_it_needs(cause: Judgement, effect: ShortOfBlocks) -> bool:
    """Whether the blocks of the cause are enough for what the effect is short of."""
    return 0 < effect.blocks_needed - effect.blocks_free_for_it <= len(cause.blocks)


def holds_much(cause: HoldsBlocks, effect: Judgement) -> bool:
    """Whether the cause holds much of the pool, and began first."""
    return cause.share_of_pool is not None and cause.share_of_pool >= MIN_SHARE and began_later(cause, effect)


def began_later(cause: Judgement, effect: Judgement) -> bool:
    """Whether the effect began after the cause, and when the cause began is known."""
    return effect.since_ns >= cause.since_ns > 0


def hits_its_requests(cause: Judgement, effect: Judgement) -> bool:
    """Whether the effect concerns requests of the cause only."""
    return set(effect.requests) <= set(cause.requests)


def hits_mostly_its_requests(cause: Judgement, effect: Judgement) -> bool:
    """Whether half of the effect's requests or more are requests of the cause."""
    return 2 * len(set(effect.requests) & set(cause.requests)) >= len(effect.requests)


def hits_its_blocks(cause: Judgement, effect: Judgement) -> bool:
    """Whether the two have a block in common."""
    return not set(cause.blocks).isdisjoint(effect.blocks)
