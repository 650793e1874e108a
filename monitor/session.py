"""The Python API: `open_target` opens what `monitor doctor` takes, and a `Session` answers questions about it.

kvscope.open is `open_target`. docs/python-api.md is the guide. A session returns frozen structs of
kvscope.monitor.schema: copies, which nothing changes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal

import msgspec

from kvscope.monitor.arrow_tables import arrow_table
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.observe import WATCH_S, Observation, observe
from kvscope.monitor.doctor.time_window import Window
from kvscope.monitor.errors import NotKnown
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.query import Query
from kvscope.monitor.schema import (
    BlockDetail,
    EngineView,
    EventView,
    FindingDetail,
    PointView,
    RequestDetail,
    RequestView,
    RetainedBlocksView,
)

TableName = Literal["events", "requests", "points", "findings", "engines"]
"""A table of `Session.to_arrow`."""
PAGE: Final = 10_000
MAX_SESSION_POINTS: Final = 10_000
EARLIEST_TIME: Final = "1970-01-01T00:00:00Z"


def open_target(
    target: str,
    *,
    since: str = "",
    until: str = "",
    watch_s: float = WATCH_S,
    timeout_s: float = 10.0,
    token: str = "",
    thresholds: Settings | Iterable[str] = (),
) -> Session:
    """Open a target and judge it: a recording, a log, a bundle, a metrics page, an event stream or a kvscope service.

    since, until   the part of its past to judge: a time, or how long before its end (30m)
    watch_s        how long a live target is watched, in seconds
    timeout_s      how long to wait for a live target to send, or for a service to answer, in seconds
    token          the token of a kvscope service
    thresholds     changed thresholds, as `--set` takes them: CODE.NAME=VALUE

    Raises BadTarget for what cannot be opened, CannotTell for what cannot be read or lacks the signal that is needed,
    Unreachable for a service that does not answer, and ValueError for a threshold that does not exist.
    """
    settings = thresholds if isinstance(thresholds, Settings) else parse_settings(thresholds)
    observation = observe(
        target, settings, timeout_s=timeout_s, watch_s=watch_s, token=token, window=Window(since, until)
    )
    return Session(observation)


class Session:
    """One opened target, in its current state or, after `at`, in that of a past time.

    Close it, or use it in a `with` statement. Methods that are about one engine take its name as `engine`. Leave it
    out where the target has one engine.

    Methods raise NotKnown for what is not there or not kept, BadQuestion for what makes no sense, and BadTime for a
    text that is not a time.
    """

    def __init__(self, observation: Observation, at: str = "") -> None:
        self._observation = observation
        self._at = at

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to a service. Other targets hold none."""
        self._observation.close()

    @property
    def target(self) -> str:
        """The target, without a password."""
        return self._observation.target

    @property
    def notes(self) -> Sequence[str]:
        """The limits of the answers: lines left out, batches lost, scrapes that failed."""
        return tuple(self._observation.notes)

    @property
    def query(self) -> Query:
        """All questions of the HTTP API, with their parameters."""
        return self._observation.query

    def at(self, time: str) -> Session:
        """Return a session as of a time (RFC 3339, or 14:02:11 in UTC) or a position (epoch/sequence/event).

        Both sessions share the target: closing one closes the other. Raises NotKnown for a time that is not kept.
        """
        session = Session(self._observation, time)
        session.engines()  # raises for a time that is not kept
        return session

    def engines(self) -> list[EngineView]:
        """Return every engine at a glance, by name."""
        if not self._at:
            return self._observation.engines()
        own = self._observation.engine
        return [view for view in self.query.engines(self._at) if own in ("", view.engine)]

    def findings(self, engine: str = "") -> list[FindingReport]:
        """Return the findings, the most severe first.

        For a live target: those that fire. For a recording, a log or another past: also those that were resolved by its
        end. As of a time: those that were active then.
        """
        if not self._at:
            return [each for each in self._observation.findings() if engine in ("", each.engine)]
        then = max((view.at or "" for view in self.engines()), default="")
        found = self.query.findings(None, engine or self._observation.engine, self._at, self._at)
        return [
            msgspec.structs.replace(each, state="firing", resolved_at=None)
            if each.resolved_at and each.resolved_at > then
            else each
            for each in found
        ]

    def finding(self, id: str) -> FindingDetail:
        """Return one finding by its id, with the pool and the queues around it."""
        return self.query.finding(id)

    def requests(self, engine: str = "") -> list[RequestView]:
        """Return the requests that are active or hold blocks, then those that ended recently."""
        return self.query.requests(self._engine(engine), self._until)

    def request(self, id: str, engine: str = "") -> RequestDetail:
        """Return one request by its id or `#number`, with its phases, its wait tree and its event history."""
        return self.query.request(self._engine(engine), id, self._until)

    def block(self, number: int, engine: str = "") -> BlockDetail:
        """Return one block, with its ownership chains and its event history."""
        return self.query.block(self._engine(engine), number, self._until)

    def retained_blocks(self, since: str = "", engine: str = "") -> RetainedBlocksView:
        """Return the blocks that were allocated since a time (ten minutes ago by default) and not freed."""
        return self.query.retained_blocks(self._engine(engine), since, self._until)

    def points(self, since: str = "", engine: str = "") -> list[PointView]:
        """Return the pool and the queues over time, from a time or from the beginning on."""
        first = since or EARLIEST_TIME
        return self.query.points(self._engine(engine), limit=MAX_SESSION_POINTS, since=first, until=self._until)

    def events(
        self,
        since: str = "",
        *,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
        limit: int | None = None,
        engine: str = "",
    ) -> list[EventView]:
        """Return events in order, from a time or from the beginning on: all of them, or the last `limit`.

        `kinds`, `request` and `block` select events as in the API's `events`.
        """
        name = self._engine(engine)
        first = since or EARLIEST_TIME
        pages: list[list[EventView]] = []
        until, left = self._until, limit
        while left is None or left > 0:
            wanted = PAGE if left is None else min(PAGE, left)
            page = self.query.events(name, first, until, limit=wanted, kinds=kinds, request=request, block=block)
            pages.append(page)
            if len(page) < wanted:
                break
            until = page[0].position
            left = None if left is None else left - len(page)
        return [event for page in reversed(pages) for event in page]

    def to_arrow(self, table: TableName = "events", engine: str = "") -> Any:
        """Return a table as a pyarrow.Table, with an `engine` column where the rows have none. `.to_pandas()` converts.

        events, requests, points   of one engine, or of all
        findings, engines          of all engines

        Raises CannotTell where pyarrow is not installed, and ValueError for another name.
        """
        if table not in ROWS:
            raise ValueError(f"{table!r} is not a table; there are: {', '.join(ROWS)}")
        kind = ROWS[table]
        if table == "engines":
            return arrow_table(self.engines(), kind)
        if table == "findings":
            return arrow_table(self.findings(engine), kind)
        names = [engine] if engine else [view.engine for view in self.engines() if view.signal == "stream"]
        ask: Mapping[str, Any] = {"events": self.events, "requests": self.requests, "points": self.points}
        rows = [(name, ask[table](engine=name)) for name in names]
        of_all = arrow_table([row for _, some in rows for row in some], kind)
        return of_all.add_column(0, "engine", [[name for name, some in rows for _ in some]])

    @property
    def _until(self) -> str:
        return self._at or self._observation.until

    def _engine(self, name: str) -> str:
        """Return the engine that is meant. Raises NotKnown where none is named and there is not one."""
        if name or self._observation.engine:
            return name or self._observation.engine
        names = [view.engine for view in self.engines()]
        if len(names) != 1:
            raise NotKnown(f"{self.target} has {len(names)} engines. Name one: {', '.join(names)}")
        return names[0]


ROWS: Final[dict[str, type[msgspec.Struct]]] = {
    "events": EventView,
    "requests": RequestView,
    "points": PointView,
    "findings": FindingReport,
    "engines": EngineView,
}
"""The type of a row, by table."""
