"""Where in the web app one is, all of it in the address, so that a link leads to exactly what its sender saw.

    /VIEW?engine=ENGINE&from=TIME&to=TIME&at=MOMENT&id=ID

VIEW is a path of `view_registry.TABLE`, empty for the overview. `id` is the subject of the view, such as a request or a
block. A TIME is RFC 3339 (without an offset: UTC), milliseconds since 1970, or `now` and `now-30m` as Grafana writes
them. A MOMENT is a TIME, or the position of an event, `epoch/sequence/event`. Parameters that only one view knows, such
as a filter, are in `more`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvscope.monitor.base.errors import BadTime

DEFAULT_S: Final = 600.0
BEFORE_FINDING_S: Final = 60.0
"""How much of the time before an open finding began the window shows: how the pool was when all was well."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RELATIVE: Final = re.compile(r"now(?:-(\d{1,6})([smhd]))?")
_STREAM_POSITION: Final = re.compile(r"\d+/\d+(/\d+)?")
_PARAMETERS: Final = {"engine": "engine", "from": "since", "to": "until", "at": "at", "id": "id"}


class PageWindow(NamedTuple):
    """A time window, in wall ns, with `live` if it ends now and moves on."""

    since_ns: int
    until_ns: int
    live: bool

    @property
    def since(self) -> str:
        """RFC 3339."""
        return rfc3339(self.since_ns)

    @property
    def until(self) -> str:
        """RFC 3339."""
        return rfc3339(self.until_ns)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.until_ns - self.since_ns) / 1e9


class PagePlace(NamedTuple):
    """An address, taken apart. Empty: the overview, the engine worst off, the time until now, nothing chosen."""

    view: str = ""
    engine: str = ""
    since: str = ""
    until: str = ""
    at: str = ""
    id: str = ""
    more: tuple[tuple[str, str], ...] = ()

    def to(self, view: str, **changes: str) -> str:
        """Return the address of another view, of the same engine and time but for `changes` (empty: without it)."""
        kept = {"engine": self.engine, "from": self.since, "to": self.until, "at": self.at}
        asked = {name: value for name, value in (kept | _named_parameters(changes)).items() if value}
        return f"/{view}" + (f"?{urlencode(asked)}" if asked else "")

    def but(self, **changes: str) -> str:
        """Return the address of this very place but for `changes`."""
        return self.to(self.view, **({"id": self.id} | dict(self.more) | changes))

    def get(self, name: str, default: str = "") -> str:
        """Return a parameter that only this view knows."""
        return dict(self.more).get(name, default)

    @property
    def is_live(self) -> bool:
        """Whether what it shows goes on changing."""
        return not self.at and (not self.until or _RELATIVE.fullmatch(self.until) is not None)

    def moment_ns(self, now_ns: int) -> int | None:
        """Return the chosen time when it is `now_ns`, or None: nothing is chosen, or the position of an event."""
        try:
            return wall_ns(self.at, now_ns) if self.at else None
        except BadTime:
            return None

    def window(self, now_ns: int, open_since_ns: int = 0) -> PageWindow:
        """Return the times of its window when it is `now_ns`. Raises BadTime. Where the address names no time, it is
        the last ten minutes, and all the time since shortly before a finding began that is still open
        (`open_since_ns`, 0: none).
        """
        if self.at and not (self.since or self.until) and not is_stream_position(self.at):
            at_ns, half_ns = wall_ns(self.at, now_ns), round(DEFAULT_S / 2 * 1e9)
            return PageWindow(at_ns - half_ns, min(at_ns + half_ns, max(now_ns, at_ns)), False)
        until_ns = wall_ns(self.until, now_ns) if self.until else now_ns
        if self.since:
            since_ns = wall_ns(self.since, now_ns)
        else:
            since_ns = until_ns - round(DEFAULT_S * 1e9)
            if open_since_ns and not self.until:
                since_ns = min(since_ns, open_since_ns - round(BEFORE_FINDING_S * 1e9))
        if since_ns >= until_ns:
            raise BadTime(f"from={self.since} is not before to={self.until or 'now'}")
        return PageWindow(since_ns, until_ns, self.is_live)


def place_of(address: str) -> PagePlace:
    """Where an address leads. An address without a view keeps its own path, where the page reports that there is no
    such view.
    """
    parts = urlsplit(address)
    asked = {name: value for name, value in parse_qsl(parts.query) if value and name != "token"}
    known = {field: asked.pop(name) for name, field in _PARAMETERS.items() if name in asked}
    return PagePlace(parts.path.strip("/"), **known, more=tuple(sorted(asked.items())))


def is_of_many(engine: str) -> bool:
    """Return whether an `engine` of an address stands for several, as Grafana writes All and a choice of more than one:
    `.*` and `{a,b}`.
    """
    return engine == ".*" or (engine.startswith("{") and engine.endswith("}"))


def is_stream_position(text: str) -> bool:
    """Return whether a text is the position of an event: epoch/sequence, or epoch/sequence/event."""
    return _STREAM_POSITION.fullmatch(text) is not None


def wall_ns(text: str, now_ns: int) -> int:
    """Return a TIME in ns since 1970. Raises BadTime."""
    if relative := _RELATIVE.fullmatch(text):
        at_ns = now_ns - int(relative[1] or 0) * _UNITS[relative[2] or "s"] * 1_000_000_000
        if at_ns < 0:
            raise BadTime(f"{text} is before 1970")
        return at_ns
    try:
        if text.isdecimal():
            datetime.fromtimestamp(int(text) / 1000, UTC)  # is it one?
            return int(text) * 1_000_000
        if re.fullmatch(r"\d\d:\d\d(:\d\d(\.\d+)?)?", text):  # of the selected day
            text = f"{rfc3339(now_ns)[:10]}T{text}"
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise BadTime(
            f"{text[:40]!r} is not a time: write 2026-11-21T14:02:11Z, milliseconds since 1970, or now-30m"
        ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return round(at.timestamp() * 1e6) * 1000


def rfc3339(ns: int) -> str:
    """Return a wall time as addresses carry it: UTC, to the millisecond where it is not a whole second."""
    at = datetime.fromtimestamp(ns // 1_000_000 / 1000, UTC)
    return at.isoformat(timespec="milliseconds" if ns // 1_000_000 % 1000 else "seconds").replace("+00:00", "Z")


def ago(seconds: float) -> str:
    """Return the TIME that long before now, in the largest unit that divides it: now-20m."""
    whole = max(1, round(seconds))
    unit = next(unit for unit in ("d", "h", "m", "s") if whole % _UNITS[unit] == 0)
    return f"now-{whole // _UNITS[unit]}{unit}"


def _named_parameters(changes: dict[str, str]) -> dict[str, str]:
    """Fields of a Place by the names that addresses have for them."""
    names = {field: name for name, field in _PARAMETERS.items()}
    return {names.get(field, field): value for field, value in changes.items()}
