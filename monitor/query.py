"""The one interface that doctor, web and API read: `Query`. In process it is a Watch; over HTTP, a RemoteQuery.

`counted`, `duration` and `percent` are how figures are written wherever answers are shown.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from monitor.findings import FindingReport
from monitor.ledger.drops import Drop
from monitor.ledger.words import counted as counted
from monitor.ledger.words import duration as duration
from monitor.ledger.words import percent as percent
from monitor.views import BlockDetail, BlockMap, EngineView, FindingState, PointView, RequestDetail, RequestView
from monitor.watch import NotKnown as NotKnown

T = TypeVar("T")


class Query(Protocol):
    """What can be asked. An engine, request or block that is not known raises NotKnown."""

    def engines(self) -> list[EngineView]:
        """Every engine at a glance, by name."""
        ...

    def find(self, state: FindingState | None = None) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved: the worst first."""
        ...

    def points(self, engine: str, seconds: float = 600.0, most: int = 600) -> list[PointView]:
        """The recent past, at most `most` moments of it."""
        ...

    def requests(self, engine: str) -> list[RequestView]:
        """Requests that live or hold blocks, the longest in their state first; then those that ended of late."""
        ...

    def request(self, engine: str, name: str) -> RequestDetail:
        """One request by its id or `#number`, with its story."""
        ...

    def block(self, engine: str, block: int) -> BlockDetail:
        """One block, why it is held, and its story."""
        ...

    def block_map(self, engine: str) -> BlockMap:
        """What every block is now."""
        ...

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, around the time `at`; where usage fell furthest without one."""
        ...


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

    def engines(self) -> list[EngineView]:
        """Every engine at a glance, by name."""
        return self._get("/api/engines", list[EngineView])

    def find(self, state: FindingState | None = None) -> list[FindingReport]:
        """Findings in that state, or those firing and resolved."""
        return self._get("/api/findings", list[FindingReport], state=state or "")

    def points(self, engine: str, seconds: float = 600.0, most: int = 600) -> list[PointView]:
        """The recent past."""
        return self._get("/api/points", list[PointView], engine=engine, seconds=seconds, most=most)

    def requests(self, engine: str) -> list[RequestView]:
        """Requests that live or hold blocks, then those that ended of late."""
        return self._get("/api/requests", list[RequestView], engine=engine)

    def request(self, engine: str, name: str) -> RequestDetail:
        """One request, with its story."""
        return self._get("/api/request", RequestDetail, engine=engine, id=name)

    def block(self, engine: str, block: int) -> BlockDetail:
        """One block, with its story."""
        return self._get("/api/block", BlockDetail, engine=engine, id=block)

    def block_map(self, engine: str) -> BlockMap:
        """What every block is now."""
        return self._get("/api/block_map", BlockMap, engine=engine)

    def drop(self, engine: str, at: str = "", window_s: float = 10.0) -> Drop:
        """What made usage fall, or throughput vanish, in a window."""
        return self._get("/api/drop", Drop, engine=engine, at=at, window=window_s)

    def _get(self, path: str, answer: type[T], **params: Any) -> T:
        try:
            response = self._client.get(path, params=params)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{self.url} does not answer ({type(error).__name__}): is `monitor serve` running there?"
            ) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise Unreachable(f"{self.url} wants a token: give it with --token or KVSCOPE_TOKEN")
        if response.status_code == httpx.codes.NOT_FOUND and response.headers.get("x-kvscope") == "not-known":
            raise NotKnown(response.json()["detail"])
        try:
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=answer)
        except (httpx.HTTPStatusError, msgspec.DecodeError) as error:
            raise Unreachable(f"{self.url} does not answer as a kvscope service does: {error}") from error
