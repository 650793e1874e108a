"""What the scheduler asks of a KV connector. It imports no torch; implementations may."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvscope.engine.requests.request import Request


class KVLoad(NamedTuple):
    """A fetch: the KV of the request's tokens from block `first` of its table on goes into these blocks."""

    request: Request
    first: int
    blocks: list[int]


class KVConnector(Protocol):
    """Keeps KV outside the pool, and brings it back. Its methods are for the engine's thread; none of them waits."""

    polls: int
    """How often `completed` was asked: heartbeats say it, so that an engine that stopped asking is seen."""

    def find(self, request: Request, first: int, end: int) -> int:
        """How many blocks it could load from block `first` of the request's table on, before `end`."""
        ...

    def start_load(self, load: KVLoad) -> None:
        """Begin to fetch what `find` found; `loaded` will name the request, whatever comes of it."""
        ...

    def loaded(self) -> list[tuple[int, bool]]:
        """Numbers of the requests whose fetch has ended since last asked, each with whether the KV is there."""
        ...

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """The request is over. True: it needs the blocks for a while, and `completed` will name the request."""
        ...

    def completed(self) -> list[int]:
        """Numbers of the requests whose blocks it needs no longer, since last asked."""
        ...

    def lease_ended(self, number: int) -> None:
        """This request's blocks were taken back: what is still read of them is worth nothing, and is not completed."""
        ...

    def close(self) -> None:
        """Stop working."""
        ...
