"""The Python API: `open_target` opens what `monitor doctor` takes, and a `Session` answers questions about it.

kvscope.open is `open_target`. docs/python-api.md is the guide. A session returns frozen structs of
kvscope.monitor.questions.schema: copies, which nothing changes later.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal

import msgspec
from msgspec import inspect

from ..base.errors import CannotTell, NotKnown
from ..base.text import install_hint, moment
from ..detectors.detector import Settings
from ..detectors.findings import FindingReport
from ..detectors.registry import parse_settings
from . import schema
from .observe import WATCH_S, Observation, Window, observe
from .query import Query

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

    def engines(self) -> list[schema.EngineView]:
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

    def finding(self, id: str) -> schema.FindingDetail:
        """Return one finding by its id, with the pool and the queues around it."""
        return self.query.finding(id)

    def requests(self, engine: str = "") -> list[schema.RequestView]:
        """Return the requests that are active or hold blocks, then those that ended recently."""
        return self.query.requests(self._engine(engine), self._until)

    def request(self, id: str, engine: str = "") -> schema.RequestDetail:
        """Return one request by its id or `#number`, with its phases, its wait tree and its event history."""
        return self.query.request(self._engine(engine), id, self._until)

    def block(self, number: int, engine: str = "") -> schema.BlockDetail:
        """Return one block, with its ownership chains and its event history."""
        return self.query.block(self._engine(engine), number, self._until)

    def retained_blocks(self, since: str = "", engine: str = "") -> schema.RetainedBlocksView:
        """Return the blocks that were allocated since a time (ten minutes ago by default) and not freed."""
        return self.query.retained_blocks(self._engine(engine), since, self._until)

    def points(self, since: str = "", engine: str = "") -> list[schema.PointView]:
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
    ) -> list[schema.EventView]:
        """Return events in order, from a time or from the beginning on: all of them, or the last `limit`.

        `kinds`, `request` and `block` select events as in the API's `events`.
        """
        name = self._engine(engine)
        first = since or EARLIEST_TIME
        pages: list[list[schema.EventView]] = []
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
    "events": schema.EventView,
    "requests": schema.RequestView,
    "points": schema.PointView,
    "findings": FindingReport,
    "engines": schema.EngineView,
}
"""The type of a row, by table."""


# -------------------------------------------------------------------- Arrow tables


TIMES: Final = frozenset({"at", "since", "until", "arrived", "resolved_at", "uncertain_since"})
"""Fields that hold RFC 3339 times: they become timestamps in nanoseconds, UTC."""


def arrow_table(rows: Sequence[msgspec.Struct], kind: type[msgspec.Struct]) -> Any:
    """Return a pyarrow.Table of structs of one type. A value of any type becomes JSON text.

    Raises CannotTell where pyarrow is not installed.
    """
    pa = _pyarrow()
    fields = _struct_fields(kind)
    columns = {
        name: pa.array([_arrow_value(getattr(row, name), info, name) for row in rows], _arrow_type(pa, info, name))
        for name, info in fields.items()
    }
    return pa.table(columns)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise CannotTell(f"Arrow tables need pyarrow: {install_hint('history')} ({error})") from error
    return pyarrow


@functools.cache
def _struct_fields(kind: type[msgspec.Struct]) -> dict[str, inspect.Type]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.name: _required(field.type) for field in info.fields}


def _required(info: inspect.Type) -> inspect.Type:
    """Return the type of a value that is there, where it may be None."""
    if isinstance(info, inspect.UnionType):
        types = [each for each in info.types if not isinstance(each, inspect.NoneType)]
        return types[0] if len(types) == 1 else inspect.AnyType()
    return info


def _arrow_type(pa: Any, info: inspect.Type, name: str) -> Any:
    match info:
        case inspect.StrType() if name in TIMES:
            return pa.timestamp("ns", "UTC")
        case inspect.StrType() | inspect.LiteralType():
            return pa.string()
        case inspect.BoolType():
            return pa.bool_()
        case inspect.IntType():
            return pa.int64()
        case inspect.FloatType():
            return pa.float64()
        case inspect.BytesType():
            return pa.binary()
        case inspect.CollectionType():
            return pa.list_(_arrow_type(pa, _required(info.item_type), ""))
        case inspect.DictType() if not isinstance(info.value_type, inspect.AnyType):
            return pa.map_(pa.string(), _arrow_type(pa, _required(info.value_type), ""))
        case inspect.StructType():
            return pa.struct(
                [(field, _arrow_type(pa, each, field)) for field, each in _struct_fields(info.cls).items()]
            )
    return pa.string()


def _arrow_value(value: Any, info: inspect.Type, name: str) -> Any:
    """Return a value as Arrow takes it."""
    if value is None or value is msgspec.UNSET:
        return None
    match info:
        case inspect.StrType() if name in TIMES:
            return moment(value, 0)
        case inspect.CollectionType():
            return [_arrow_value(each, _required(info.item_type), "") for each in value]
        case inspect.DictType() if not isinstance(info.value_type, inspect.AnyType):
            return [(key, _arrow_value(each, _required(info.value_type), "")) for key, each in value.items()]
        case inspect.StructType():
            return {
                field: _arrow_value(getattr(value, field), each, field)
                for field, each in _struct_fields(info.cls).items()
            }
        case inspect.AnyType() | inspect.DictType():
            return msgspec.json.encode(value).decode()
    return value
