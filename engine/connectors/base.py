"""The interface of a KV connector to the scheduler. It imports no torch, though implementations may."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..requests.request import Request


class KVLoad(NamedTuple):
    """A fetch: the KV of the request's tokens from block `first` of its table on goes into these blocks."""

    request: Request
    first: int
    blocks: list[int]


class KVConnector(Protocol):
    """Keeps KV outside the pool, and brings it back. Its methods are for the engine's thread, and none of them
    waits.
    """

    polls: int
    """The polls of `completed` so far: heartbeats carry them, which shows an engine that has stopped polling."""

    def find(self, request: Request, first: int, end: int) -> int:
        """Return how many blocks it could load from block `first` of the request's table on, before `end`."""
        ...

    def start_load(self, load: KVLoad) -> None:
        """Begin to fetch the blocks that `find` found. `loaded` will name the request in every case."""
        ...

    def loaded(self) -> list[tuple[int, bool]]:
        """Return by number the requests whose fetch has ended since the last call, and whether the KV is there."""
        ...

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        """Note that the request is over. True: it needs the blocks for a while, and `completed` will name the
        request.
        """
        ...

    def completed(self) -> list[int]:
        """Return the requests whose blocks it needs no longer, by number, since the last call."""
        ...

    def lease_ended(self, number: int) -> None:
        """Note that this request's blocks were freed: later reads of them are worthless, and not completed."""
        ...

    def close(self) -> None:
        """Stop working."""
        ...
