"""Ties: what must hold for one finding to be the effect of another.

A cause comes before its effects, in the same engine, and the numbers must fit: what a leak holds must be enough for
what the head of the queue is short of. A tie reads attributes of judgements and never evidence by name.
"""

from __future__ import annotations

from typing import Final

from kvscope.monitor.detectors.judgement import HoldsBlocks, Judgement, ShortOfBlocks

MIN_SHARE: Final = 0.2
"""A share of the pool. Preemptions are put down to blocks that do not come back if these are so many: with less gone, a
load that thrashes is one that hardly fitted before.
"""


def holds_what_it_needs(cause: Judgement, effect: ShortOfBlocks) -> bool:
    """Whether the blocks of the cause are enough for what the effect is short of."""
    return 0 < effect.blocks_needed - effect.blocks_free_for_it <= len(cause.blocks)


def holds_much(cause: HoldsBlocks, effect: Judgement) -> bool:
    """Whether the cause holds much of the pool, and began first."""
    return cause.share_of_pool is not None and cause.share_of_pool >= MIN_SHARE and began_later(cause, effect)


def began_later(cause: Judgement, effect: Judgement) -> bool:
    """Whether the effect began after the cause, and when the cause began is known."""
    return effect.since_ns >= cause.since_ns > 0


def hits_its_requests(cause: Judgement, effect: Judgement) -> bool:
    """Whether the effect concerns requests of the cause only."""
    return set(effect.requests) <= set(cause.requests)


def hits_mostly_its_requests(cause: Judgement, effect: Judgement) -> bool:
    """Whether half of the effect's requests or more are requests of the cause."""
    return 2 * len(set(effect.requests) & set(cause.requests)) >= len(effect.requests)


def hits_its_blocks(cause: Judgement, effect: Judgement) -> bool:
    """Whether the two have a block in common."""
    return not set(cause.blocks).isdisjoint(effect.blocks)
