"""The one interface that doctor, web and API read: `Query`. In process it is a Watch; over HTTP, a RemoteQuery.

`counted`, `duration` and `percent` are how figures are written wherever answers are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from kvscope.monitor.analysis.usage_drop import Drop
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.queries import BadQuestion as BadQuestion
from kvscope.monitor.queries import BadTime as BadTime
from kvscope.monitor.queries import NotKnown as NotKnown
from kvscope.monitor.schema import (
    AlertingView,
    BlockColours,
    BlockDetail,
    BlockMap,
    CalculatorView,
    Colouring,
    Diff,
    EngineView,
    EventView,
    ExplanationView,
    FindingDetail,
    FindingState,
    MemoryView,
    NeverFreedView,
    PointView,
    PrefixesView,
    RequestDetail,
    RequestView,
    SpanView,
)
from kvscope.monitor.text import counted as counted
from kvscope.monitor.text import duration as duration
from kvscope.monitor.text import percent as percent

T = TypeVar("T")


class Query(Protocol):
    """What can be asked. What is not known raises NotKnown; what makes no sense, BadQuestion.

    `at`, `since` and `until` are a time (RFC 3339, or the last 14:02:11 or 14:02:11.5 by UTC) or a position in an
    engine's stream (epoch/sequence/event: just after that event). An empty `at` and `until` mean now; an empty `since`,
    ten minutes before `until`. As of a time, what was sent until then counts; as of a position, each event until it.
    """

    def engines(self, at: str = "") -> list[EngineView]:
        """Every engine at a glance, by name."""
        ...

    def past_engines(self) -> list[EngineView]:
        """Engines that only history knows, as each was last: those that were not heard since the service began."""
        ...

    def find(
        self, state: FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved: the worst first. Only one engine's if it is named; with
        a time, only those whose life touches the window (an empty `since` is then any).
        """
        ...

    def finding(self, id: str) -> FindingDetail:
        """One finding, with what the pool was meanwhile."""
        ...

    def alerting(self, finding: str) -> AlertingView:
        """Who was told of a finding by its id, and how that went."""
        ...

    def points(
        self, engine: str, seconds: float = 600.0, most: int = 600, since: str = "", until: str = ""
    ) -> list[PointView]:
        """The past, at most `most` moments of it: from `since`, or for `seconds`, to `until`."""
        ...

    def requests(self, engine: str, at: str = "") -> list[RequestView]:
        """Requests that live or hold blocks, the longest in their state first; then those that ended of late."""
        ...

    def request(self, engine: str, name: str, at: str = "") -> RequestDetail:
        """One request by its id or `#number`, with its story."""
        ...

    def block(self, engine: str, block: int, at: str = "") -> BlockDetail:
        """One block, why it is held, and its story."""
        ...

    def block_map(self, engine: str, at: str = "") -> BlockMap:
        """What every block is."""
        ...

    def block_colours(self, engine: str, by: Colouring, at: str = "") -> BlockColours:
        """Every block by its owner, its age, its references or its prefix."""
        ...

    def events(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        most: int = 200,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
    ) -> list[EventView]:
        """What happened, in order: the last `most` events of a window, or those around a position, before and after.

        kinds: such as ("allocated", "preempted"); all but the clock's, audits, heartbeats and progress without. Only
        those about one request (id or `#number`), one block, or both, if they are named. `until` itself is left out, so
        that the position of the first event of one answer is the `until` of the one before.
        """
        ...

    def never_freed(self, engine: str, since: str = "", until: str = "") -> NeverFreedView:
        """What was handed out in a window and not free by its end, by owner and reason."""
        ...

    def prefixes(self, engine: str, at: str = "") -> PrefixesView:
        """The prefix cache as a forest, and what was evicted of late."""
        ...

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, around the time `at`; where usage fell furthest without one."""
        ...

    def explain(self, engine: str, since: str = "", until: str = "") -> ExplanationView:
        """What happened in a window, in two or three sentences."""
        ...

    def compare(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> Diff:
        """What got better and what got worse in a window of an engine, held against another of it, or of `other`.

        A window is an hour at most, and what is kept of it is measured; its findings are those that were told in it.
        Without a second one: as long a time just before the first, or of another engine the same time; where that was
        not there then, the last of it. An empty `since` leaves something to hold the rest against: it is no earlier
        than half of what is known. Raises BadTime where nothing is kept of a window.
        """
        ...

    def memory(self, engine: str) -> MemoryView:
        """The bill of the device's memory, as the engine measured it."""
        ...

    def calculator(self, engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1) -> CalculatorView:
        """What so many requests of that length ask of the pool, and how many of them fit."""
        ...

    def span(self, engine: str) -> SpanView:
        """Which past can be asked about."""
        ...


COMPARE_TIMEOUT_S = 60.0
"""All that happened in two windows is gone through."""
_REFUSALS = {"bad-time": BadTime, "bad-question": BadQuestion}


class Unreachable(Exception):
    """The service did not answer, or not as a kvscope service does; the message says what to do."""


class RemoteQuery:
    """The same questions, asked of a service at `url` (its base, such as http://127.0.0.1:8765)."""

    def __init__(self, url: str, token: str = "", timeout_s: float = 10.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def engines(self, at: str = "") -> list[EngineView]:
        """Every engine at a glance, by name."""
        return self._get("/api/engines", list[EngineView], at=at)

    def past_engines(self) -> list[EngineView]:
        """Engines that only history knows."""
        return self._get("/api/past_engines", list[EngineView])

    def find(
        self, state: FindingState | None = None, engine: str = "", since: str = "", until: str = ""
    ) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved."""
        window = {"engine": engine, "since": since, "until": until}
        return self._get("/api/findings", list[FindingReport], state=state or "", **window)

    def finding(self, id: str) -> FindingDetail:
        """One finding."""
        return self._get("/api/finding", FindingDetail, id=id)

    def alerting(self, finding: str) -> AlertingView:
        """Who was told of it."""
        return self._get("/api/alerting", AlertingView, finding=finding)

    def points(
        self, engine: str, seconds: float = 600.0, most: int = 600, since: str = "", until: str = ""
    ) -> list[PointView]:
        """The past."""
        window = {"seconds": seconds, "most": most, "since": since, "until": until}
        return self._get("/api/points", list[PointView], engine=engine, **window)

    def requests(self, engine: str, at: str = "") -> list[RequestView]:
        """Requests that live or hold blocks, then those that ended of late."""
        return self._get("/api/requests", list[RequestView], engine=engine, at=at)

    def request(self, engine: str, name: str, at: str = "") -> RequestDetail:
        """One request, with its story."""
        return self._get("/api/request", RequestDetail, engine=engine, id=name, at=at)

    def block(self, engine: str, block: int, at: str = "") -> BlockDetail:
        """One block, with its story."""
        return self._get("/api/block", BlockDetail, engine=engine, id=block, at=at)

    def block_map(self, engine: str, at: str = "") -> BlockMap:
        """What every block is."""
        return self._get("/api/block_map", BlockMap, engine=engine, at=at)

    def block_colours(self, engine: str, by: Colouring, at: str = "") -> BlockColours:
        """Every block by one of its properties."""
        return self._get("/api/block_colours", BlockColours, engine=engine, by=by, at=at)

    def events(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        around: str = "",
        most: int = 200,
        kinds: Sequence[str] = (),
        request: str = "",
        block: int | None = None,
    ) -> list[EventView]:
        """What happened, in order."""
        window = {"since": since, "until": until, "around": around, "most": most}
        about = {"kinds": ",".join(kinds), "request": request, **({} if block is None else {"block": block})}
        return self._get("/api/events", list[EventView], engine=engine, **window, **about)

    def never_freed(self, engine: str, since: str = "", until: str = "") -> NeverFreedView:
        """What was handed out in a window and not free by its end."""
        return self._get("/api/never_freed", NeverFreedView, engine=engine, since=since, until=until)

    def prefixes(self, engine: str, at: str = "") -> PrefixesView:
        """The prefix cache."""
        return self._get("/api/prefixes", PrefixesView, engine=engine, at=at)

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, in a window."""
        return self._get("/api/drop", Drop, engine=engine, at=at, window=window_s)

    def explain(self, engine: str, since: str = "", until: str = "") -> ExplanationView:
        """What happened in a window, in sentences."""
        return self._get("/api/explain", ExplanationView, engine=engine, since=since, until=until)

    def compare(
        self,
        engine: str,
        since: str = "",
        until: str = "",
        other: str = "",
        other_since: str = "",
        other_until: str = "",
    ) -> Diff:
        """What got better and what got worse."""
        window = {"since": since, "until": until}
        against = {"other": other, "other_since": other_since, "other_until": other_until}
        return self._get("/api/compare", Diff, COMPARE_TIMEOUT_S, engine=engine, **window, **against)

    def memory(self, engine: str) -> MemoryView:
        """The bill of the device's memory."""
        return self._get("/api/memory", MemoryView, engine=engine)

    def calculator(self, engine: str, prompt_tokens: int, max_tokens: int, concurrency: int = 1) -> CalculatorView:
        """What so many requests of that length ask of the pool."""
        load = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "concurrency": concurrency}
        return self._get("/api/calculator", CalculatorView, engine=engine, **load)

    def span(self, engine: str) -> SpanView:
        """Which past can be asked about."""
        return self._get("/api/span", SpanView, engine=engine)

    def _get(self, path: str, answer: type[T], timeout_s: float = 0.0, /, **params: Any) -> T:
        try:
            response = self._client.get(path, params=params, timeout=timeout_s or self._client.timeout)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.url} does not answer ({type(error).__name__}): is `monitor serve` running there?"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Unreachable(f"{self.url} wants a token: give it with --token or KVSCOPE_TOKEN")
        if response.status_code == httpx.codes.NOT_FOUND and response.headers.get("x-kvscope") == "not-known":
            raise NotKnown(response.json()["detail"])
        if response.status_code == httpx.codes.BAD_REQUEST and response.headers.get("x-kvscope") in _REFUSALS:
            raise _REFUSALS[response.headers["x-kvscope"]](response.json()["detail"])
        if not response.is_success:
            raise Unreachable(
                f"{self.url} answers {response.status_code} {response.reason_phrase}, as no kvscope service does. If an"
                f" engine is there, give its metrics page: {self.url}/metrics"
            )
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.DecodeError as error:
            raise Unreachable(f"{self.url} does not answer as a kvscope service does: {error}") from error
