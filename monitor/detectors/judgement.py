"""The result of a detector: a judgement with its evidence, typed by the data that a cause and its effect share."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvscope.monitor.detectors.evidence_names import OLD_EVIDENCE_NAMES
from kvscope.monitor.ledger.pool_forecast import PoolForecast

Severity = Literal["info", "warning", "error", "critical"]
Verdict = Literal["confirmed", "likely", "cannot-tell"]

SEVERITIES: Final[tuple[Severity, ...]] = ("info", "warning", "error", "critical")
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
    alias: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Set the alias of a renamed name."""
        if self.name in OLD_EVIDENCE_NAMES:
            msgspec.structs.force_setattr(self, "alias", OLD_EVIDENCE_NAMES[self.name])


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
