"""Watches what is live until Ctrl-C, and reports what changes and is worth a line: `monitor doctor --watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Final, Literal, Protocol

import msgspec

from ..base.errors import BadTarget, CannotTell, Unreachable
from ..base.text import clock_time, counted, percent, timestamp
from ..contract.samples import Record
from ..contract.wire import ContractError
from ..detectors.detector import Settings
from ..detectors.findings import FindingReport
from ..questions.client import ServiceClient
from ..questions.observe import SCRAPE_EVERY_S, is_one_stream
from ..questions.pipeline import Pipeline
from ..questions.query import Query
from ..questions.schema import EngineView
from ..sources.source import READ_ERRORS, Source, SourceOptions, SourceSilent, until_in_step
from ..sources.source_registry import is_service, open_source

GROWS_BY: Final = 2
"""A finding is reported again when its requests or blocks have grown by this factor since its last report: a leak grows
by a little with each check.
"""


class Change(msgspec.Struct, frozen=True):
    """One finding began to fire, is surer or about more than it was, or is over. `at` is RFC 3339."""

    at: str | None
    what: Literal["fires", "grows", "resolved"]
    finding: FindingReport


class Changes:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self._reported: dict[str, FindingReport] = {}

    def since(self, findings: Iterable[FindingReport], at: str | None) -> list[Change]:
        """Return the changes by this check, at that time. `findings`: those that fire and those that are resolved."""
        changes = []
        now = {finding.id: finding for finding in findings}
        for id_, finding in now.items():
            if finding.state != "firing":
                continue
            reported = self._reported.get(id_)
            if reported is None:
                changes.append(Change(at, "fires", finding))
            elif finding.verdict != reported.verdict or _finding_size(finding) >= GROWS_BY * max(
                _finding_size(reported), 1
            ):
                changes.append(Change(at, "grows", finding))
            else:
                continue
            self._reported[id_] = finding
        for id_, reported in list(self._reported.items()):
            over = now.get(id_, reported)
            if id_ not in now or over.state != "firing":
                del self._reported[id_]
                changes.append(Change(at, "resolved", over))
        return changes

    @property
    def firing(self) -> list[FindingReport]:
        """The findings that were reported and are not over, as of their last report."""
        return list(self._reported.values())


def _finding_size(finding: FindingReport) -> int:
    return max(len(finding.culprits.requests), len(finding.culprits.blocks))


ROUND_S = 1.0
"""The time for one check of all targets."""


class Live(Protocol):
    """A target that goes on."""

    @property
    def query(self) -> Query:
        """The queries of the target."""
        ...

    @property
    def engine(self) -> str:
        """The engine that it is about, though `query` knows others. Empty means all that `query` knows."""
        ...

    @property
    def unheard(self) -> str:
        """Why nothing was ever received of it, or an empty string."""
        ...

    def listen(self, timeout_s: float) -> str:
        """Receive events within that time. Return why nothing can be received just now, or an empty string."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class FollowedSource:
    """A source that is followed. An event stream of one engine goes into `streams`, which watches the others too: a
    rank that stands still is known by its siblings. One that is silent is waited for: a frozen engine may go on.
    Raises SourceError and ContractError.
    """

    def __init__(self, source: Source, streams: Pipeline, settings: Settings, timeout_s: float) -> None:
        self._source = source
        self._watch = streams
        self._is_shared = True
        self._settings = settings
        self.unheard = ""
        try:
            for records in until_in_step(source, timeout_s):
                self._feed(records)
        except SourceSilent as error:
            self.unheard = str(error)
        except BaseException:
            source.close()
            raise

    @property
    def query(self) -> Query:
        """The queries of the target."""
        return self._watch

    @property
    def engine(self) -> str:
        """The engine of a stream that shares its watch with others, or else empty."""
        return self._source.status().engine if self._is_shared else ""

    def listen(self, timeout_s: float) -> str:
        """Apply the records that come within the time. Return why nothing can be read now, or an empty string."""
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            try:
                self._feed(self._source.poll(left_s))
            except READ_ERRORS as error:
                time.sleep(max(until - time.monotonic(), 0))
                return str(error)
            if self._source.has_events:
                break
        if not self._is_shared:
            self._watch.settle()
        status = self._source.status()
        self.unheard = "" if status.in_step else self.unheard
        return status.error or self.unheard

    def close(self) -> None:
        """Disconnect."""
        self._source.close()

    def _feed(self, records: Sequence[Record]) -> None:
        if records and self._is_shared and not is_one_stream(self._source, records):
            self._watch, self._is_shared = Pipeline(self._settings), False
        self._watch.feed(records)


class QueriedService:
    """A kvscope service, which watches by itself. Raises Unreachable."""

    engine = ""
    unheard = ""

    def __init__(self, target: str, token: str, timeout_s: float) -> None:
        self.query = self._remote = ServiceClient(target, token, timeout_s)
        try:
            self.query.engines()
        except Unreachable:
            self.close()
            raise

    def listen(self, timeout_s: float) -> str:
        """Wait: the service reads by itself."""
        time.sleep(timeout_s)
        return ""

    def close(self) -> None:
        """Disconnect."""
        self._remote.close()


def open_live(target: str, settings: Settings, timeout_s: float, token: str, streams: Pipeline | None = None) -> Live:
    """Return the target, followed. `streams` watches other event streams too. Raises BadTarget for what is over or no
    source, and CannotTell.
    """
    try:
        if is_service(target):
            return QueriedService(target, token, timeout_s)
        source = open_source(target, SourceOptions(timeout_s=timeout_s, interval_s=SCRAPE_EVERY_S, follow=True))
        if not source.grows:
            raise BadTarget(f"{target} has ended and no longer changes: use `monitor doctor` without --watch")
        return FollowedSource(source, streams or Pipeline(settings), settings, timeout_s)
    except (ContractError, Unreachable) as error:
        raise CannotTell(str(error)) from error


def look_on(
    targets: Sequence[str],
    settings: Settings,
    *,
    timeout_s: float,
    token: str,
    report_change: Callable[[Change], None],
    note: Callable[[str], None],
    beat: Callable[[str], None],
) -> list[FindingReport]:
    """Watch until Ctrl-C. Return the findings that fire at the end. `report_change` takes each change, `note` other
    messages (such as a lost or restored target), `beat` a status line each round. Raises as open_live does, and
    CannotTell at the end for a target that was never heard.
    """
    streams = Pipeline(settings)
    with ExitStack() as opened:
        readers = [opened.enter_context(closing(open_live(t, settings, timeout_s, token, streams))) for t in targets]
        seen = [Changes() for _ in readers]
        deaf = [""] * len(readers)
        try:
            while True:
                engines: list[EngineView] = []
                for index, live in enumerate(readers):
                    try:
                        failure = live.listen(ROUND_S / len(readers))
                        found = live.query.findings(engine=live.engine)
                        engines += [view for view in live.query.engines() if live.engine in ("", view.engine)]
                    except Unreachable as error:
                        failure, found = str(error), None
                    if bool(failure) != bool(deaf[index]):
                        note(f"{failure}" if failure else f"{targets[index]} answers again")
                    deaf[index] = failure
                    if found is not None:
                        for change in seen[index].since(found, timestamp(time.time_ns())):
                            report_change(change)
                beat(_status_line(engines, sum(len(changes.firing) for changes in seen)))
        except KeyboardInterrupt:
            firing = [finding for changes in seen for finding in changes.firing]
            if not firing and (unheard := next((live.unheard for live in readers if live.unheard), "")):
                raise CannotTell(unheard) from None
            return firing


def _status_line(engines: Sequence[EngineView], firing: int) -> str:
    running, waiting = (sum(getattr(engine, of) or 0 for engine in engines) for of in ("running", "waiting"))
    fullest = max((engine.usage for engine in engines if engine.usage is not None), default=None)
    usage = "" if fullest is None else f", fullest pool {percent(fullest)}"
    return (
        f"{clock_time(time.time_ns())} {counted(len(engines), 'engine')}{usage}, {running:,} running,"
        f" {waiting:,} waiting, {counted(firing, 'finding')}"
    )
