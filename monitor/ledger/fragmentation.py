"""Room in blocks that no token is in: what a pool pays for being handed out by the block.

A request's last block is filled as it goes on. Until then the rest of it is reserved and unused. Where KV groups differ
in what they keep of a request, its tokens do not show how full its blocks are, and there is no value.
"""

from __future__ import annotations

from kvscope.monitor.events.description import EngineDescription
from kvscope.monitor.events.kinds import FIRST_FINISHED
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.records import RequestState


def unused_tokens(state: EngineState, description: EngineDescription, record: RequestState) -> int | None:
    """Return how many more tokens its blocks have room for, or None where that is unknown."""
    if not _by_tokens(state, description):
        return None
    return max(0, len(record.blocks) * state.block_size - record.computed_tokens) if record.blocks else 0


def unused_by_all(state: EngineState, description: EngineDescription) -> int | None:
    """Return the same over all live requests. A block that several share is full, and adds to none of them."""
    if not _by_tokens(state, description):
        return None
    size, living = state.block_size, [r for r in state.requests.values() if r.status < FIRST_FINISHED and r.blocks]
    rooms = [len(record.blocks) * size - record.computed_tokens for record in living]
    return sum([room for room in rooms if room > 0])


def tokens_in(state: EngineState, description: EngineDescription, block: int) -> int | None:
    """Return how many computed tokens a block holds: all that fit, if it is cached, or None where that is unknown."""
    if not _by_tokens(state, description):
        return None
    if state.hashes[block]:
        return state.block_size
    owners = (record for number in state.owners(block) if (record := state.requests.get(number)) is not None)
    held = (r.computed_tokens - r.blocks.index(block) * state.block_size for r in owners if block in r.blocks)
    return max((min(max(tokens, 0), state.block_size) for tokens in held), default=0)


def _by_tokens(state: EngineState, description: EngineDescription) -> bool:
    return len(description.groups) <= 1 and state.block_size > 0
