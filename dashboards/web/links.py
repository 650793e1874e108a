"""Where on the page one is: an engine, and the request or block whose story is open. All of it is in the address.

    /                                the first engine
    /?engine=ENGINE                  that engine
    /request?engine=ENGINE&id=ID     and the story of that request
    /block?engine=ENGINE&id=NUMBER   and the story of that block
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs, quote, urlsplit


class Place(NamedTuple):
    """An empty engine is the first one; an empty `thing` is no story."""

    engine: str = ""
    thing: str = ""
    id: str = ""


def place_of(address: str) -> Place:
    """Where an address leads; one that is not the page's own leads to its start."""
    parts = urlsplit(address)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    thing = parts.path.strip("/")
    if thing in ("request", "block") and asked.get("id"):
        return Place(asked.get("engine", ""), thing, asked["id"])
    return Place(asked.get("engine", ""))


def to_engine(engine: str) -> str:
    """The address of an engine."""
    return f"/?engine={quote(engine, safe='')}"


def to_request(engine: str, request: str) -> str:
    """The address of a request's story."""
    return f"/request?engine={quote(engine, safe='')}&id={quote(request, safe='')}"


def to_block(engine: str, block: int) -> str:
    """The address of a block's story."""
    return f"/block?engine={quote(engine, safe='')}&id={block}"
