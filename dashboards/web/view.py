"""The interface of a view: a function of the query object and of the place, to sections of HTML."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import EngineView

from .links import PagePlace, PageWindow, wall_ns

OVERVIEW_ENGINES: Final = 30
"""With more of them, the overview is the fleet view."""
FLEET_PATH: Final = "fleet"
Tree = Any
"""A component of dash.html or dash.dcc, a text, or a list of these. assets/kvscope.js renders it."""


class Here(NamedTuple):
    """Where one is, and what is there now. `place` has the engine's name filled in."""

    place: PagePlace
    window: PageWindow
    engine: EngineView
    engines: list[EngineView]
    """The worst off first."""
    open_since_ns: int = 0
    """When the first of the engine's open findings began that need action (wall), 0 without any."""

    @property
    def is_fleet(self) -> bool:
        """Whether the page is of many engines at a glance."""
        return self.place.view == FLEET_PATH or (not self.place.view and len(self.engines) > OVERVIEW_ENGINES)

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine.engine

    @property
    def moment(self) -> str:
        """The time at which a view of a state shows it, as the query interface takes it, or empty for now."""
        if self.place.at:
            return self.place.at
        return "" if self.window.live else self.window.until

    @property
    def replayed_since(self) -> str:
        """The beginning of the window where its events are replayed one by one, empty for the last ten minutes. The
        default window may begin hours ago, with a finding: too many events.
        """
        return self.window.since if self.place.since or not self.window.live else ""


class PageView(NamedTuple):
    """The content of a view: sections from top to bottom, each under a name of its own, and its side panel, if any. A
    section that is as it was a second ago is not sent again, so what changes often is best a section of its own.
    """

    sections: Mapping[str, Tree]
    aside: Tree = ""


class ViewEntry(NamedTuple):
    """A view in the table: the path of its address, its name in the navigation (empty: it is not in it, but under
    `tab`), and what makes it. It is in the navigation of engines that are attached by one of `signals`.
    """

    path: str
    label: str
    make: Callable[[Query, Here], PageView]
    tab: str = ""
    signals: tuple[str, ...] = ("stream", "metrics")


UNSERVED: Final = ("stuck", "silent", "stopped")
"""Statuses in which clients of an engine get nothing."""


def worst_first(engines: Sequence[EngineView]) -> list[EngineView]:
    """Return engines in need of attention before others: by their open findings, then those that serve no client, then
    slow ones, then by their queues and names, and those that only history knows last.
    """

    def need(engine: EngineView) -> tuple[Any, ...]:
        grave = tuple(-engine.findings.get(severity, 0) for severity in ("critical", "error", "warning"))
        served = 0 if engine.status in UNSERVED else 1 if engine.slow is not None else 2
        return engine.status == "gone", *grave, served, -(engine.waiting or 0), engine.engine

    return sorted(engines, key=need)


def open_findings(engine: EngineView) -> int:
    """Return how many of its findings need action."""
    return sum([count for severity, count in engine.findings.items() if severity_at_least(severity, "warning")])


def engine_now_ns(engine: EngineView) -> int:
    """Now, by the engine's own stream: that of a recording has ended long ago."""
    return wall_ns(engine.at, 0) if engine.at else time.time_ns()


def engine_then(query: Query, here: Here) -> EngineView:
    """Return the engine as it was at the time of the page. Raises NotKnown."""
    if not here.moment:
        return here.engine
    for engine in query.engines(here.moment, here.name):
        return engine
    raise NotKnown(f"{here.name} was not there yet at {here.moment}")
