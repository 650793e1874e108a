"""Which agent should process which engine: rendezvous hashing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranked(engine: str, agents: Iterable[str]) -> list[str]:
    """Return the agents in the order in which they should process an engine.

    Highest random weight: each agent's weight for the engine is a hash of both names, and the highest comes first. When
    an agent leaves, only its engines move, spread over the others. Thaler and Ravishankar, "Using name-based mappings
    to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998.
    """
    return sorted(set(agents), key=lambda agent: (_agent_weight(engine, agent), agent), reverse=True)


def _agent_weight(engine: str, agent: str) -> bytes:
    """Return a hash of both names. The byte between them occurs in neither."""
    return hashlib.blake2b(f"{engine}\0{agent}".encode(), digest_size=8).digest()
