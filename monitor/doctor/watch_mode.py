"""Looks on at what is live until Ctrl-C, and tells what changes: `monitor doctor --watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Protocol

from kvscope.monitor.client import ServiceClient
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.finding_changes import Change, Changes
from kvscope.monitor.doctor.observe import SCRAPE_EVERY_S, CannotTell, nothing_heard
from kvscope.monitor.errors import Unreachable
from kvscope.monitor.events.wire import ContractError
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.query import Query
from kvscope.monitor.schema import EngineView
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.targets import BadTarget, Kind, kind_of
from kvscope.monitor.text import clock_time, counted, percent, timestamp

ROUND_S = 1.0
"""All targets are looked at once in so long."""


class Live(Protocol):
    """A target that goes on."""

    @property
    def query(self) -> Query:
        """What can be asked of it."""
        ...

    @property
    def engine(self) -> str:
        """All that it is about, though `query` knows others; empty: all that `query` knows."""
        ...

    def listen(self, timeout_s: float) -> str:
        """Take in what it says within that time; why it cannot be heard just now, or nothing."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class _Stream:
    """`watch` is fed the other streams too: a rank that stands still is known by its siblings."""

    def __init__(self, target: str, watch: Pipeline, timeout_s: float) -> None:
        self.query = self._watch = watch
        self._stream = LiveStream(target)
        until = time.monotonic() + timeout_s
        while not self._stream.in_step:
            self.listen(0.1)
            if self._stream.has_kv_events:
                self.close()
                raise BadTarget(f"{target} publishes KV events, which tell of no trouble: give its /metrics page")
            if time.monotonic() > until:
                self.close()
                raise nothing_heard(target, bool(self._stream.engine), timeout_s)

    @property
    def engine(self) -> str:
        return self._stream.engine

    def listen(self, timeout_s: float) -> str:
        self._watch.feed(received.frame for received in self._stream.poll(timeout_s))
        return ""

    def close(self) -> None:
        self._stream.close()


class _Page:
    engine = ""

    def __init__(self, target: str, settings: Settings, timeout_s: float) -> None:
        from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage

        self.query = self._watch = Pipeline(settings)
        self._page = MetricsPage(target, timeout_s)
        try:
            self._watch.feed(self._page.scrape())
        except BadPage as error:
            self.close()
            raise CannotTell(str(error)) from error

    def listen(self, timeout_s: float) -> str:
        self._watch.feed(self._page.poll(timeout_s, SCRAPE_EVERY_S))
        self._watch.settle()
        return self._page.last_failure if self._page.failing else ""

    def close(self) -> None:
        self._page.close()


class _Service:
    engine = ""

    def __init__(self, target: str, token: str, timeout_s: float) -> None:
        self.query = self._remote = ServiceClient(target, token, timeout_s)
        try:
            self.query.engines()
        except Unreachable:
            self.close()
            raise

    def listen(self, timeout_s: float) -> str:
        time.sleep(timeout_s)
        return ""

    def close(self) -> None:
        self._remote.close()


def open_live(target: str, settings: Settings, timeout_s: float, token: str, streams: Pipeline | None = None) -> Live:
    """The target, which has been heard; `streams` is what watches other event streams too. Raises BadTarget for what is
    over or none, and CannotTell.
    """
    kind = kind_of(target)
    try:
        match kind:
            case Kind.STREAM:
                return _Stream(target, streams or Pipeline(settings), timeout_s)
            case Kind.METRICS:
                return _Page(target, settings, timeout_s)
            case Kind.SERVICE:
                return _Service(target, token, timeout_s)
            case Kind.KV_EVENTS:
                raise BadTarget(f"{target} has KV events, which tell of no trouble: give the server's /metrics page")
            case _:
                raise BadTarget(
                    f"{target} is over, and nothing of it changes any more: ask `monitor doctor`, without --watch"
                )
    except ImportError as error:
        raise CannotTell(
            f"{target}: a metrics page needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    except (ContractError, Unreachable) as error:
        raise CannotTell(str(error)) from error


def look_on(
    targets: Sequence[str],
    settings: Settings,
    *,
    timeout_s: float,
    token: str,
    tell: Callable[[Change], None],
    note: Callable[[str], None],
    beat: Callable[[str], None],
) -> list[FindingReport]:
    """Look on until Ctrl-C; what fired at the end. `tell` takes each change, `note` what else has to be said (that a
    target is not heard any more, and is again), `beat` a line each round on how things are. Raises as open_live does.
    """
    streams = Pipeline(settings)
    with ExitStack() as opened:
        lives = [opened.enter_context(closing(open_live(t, settings, timeout_s, token, streams))) for t in targets]
        seen = [Changes() for _ in lives]
        deaf = [""] * len(lives)
        try:
            while True:
                engines: list[EngineView] = []
                for index, live in enumerate(lives):
                    try:
                        failure = live.listen(ROUND_S / len(lives))
                        found = live.query.findings(engine=live.engine)
                        engines += [view for view in live.query.engines() if live.engine in ("", view.engine)]
                    except Unreachable as error:
                        failure, found = str(error), None
                    if bool(failure) != bool(deaf[index]):
                        note(f"{failure}" if failure else f"{targets[index]} answers again")
                    deaf[index] = failure
                    if found is not None:
                        for change in seen[index].since(found, timestamp(time.time_ns())):
                            tell(change)
                beat(_how_it_is(engines, sum(len(changes.firing) for changes in seen)))
        except KeyboardInterrupt:
            return [finding for changes in seen for finding in changes.firing]


def _how_it_is(engines: Sequence[EngineView], firing: int) -> str:
    running, waiting = (sum(getattr(engine, of) or 0 for engine in engines) for of in ("running", "waiting"))
    fullest = max((engine.usage for engine in engines if engine.usage is not None), default=None)
    usage = "" if fullest is None else f", fullest pool {percent(fullest)}"
    return (
        f"{clock_time(time.time_ns())} {counted(len(engines), 'engine')}{usage}, {running:,} running,"
        f" {waiting:,} waiting, {counted(firing, 'finding')}"
    )
