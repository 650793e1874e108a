"""What the scheduler asks of a KV connector. It imports no torch; implementations may."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from engine.request import Request


class KVLoad(NamedTuple):
    """A copy to be made before a step: the KV stored under each digest goes into the block beside it."""

    request: int
    digests: list[bytes]
    blocks: list[int]


class KVConnector(Protocol):
    """Stores the KV of finished requests outside the pool, and finds it again."""

    polls: int
    """How often `completed` was asked: heartbeats say it, so that an engine that stopped asking is seen."""

    def find(self, digests: list[bytes]) -> int:
        """How many of these consecutive blocks it could load, from the first on."""
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
