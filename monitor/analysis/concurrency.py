"""The demand of a load on the pool: how many blocks a request of a length has at its peak.

    blocks in a group              = ⌈(prompt + generated) / block size⌉
    in one with a sliding window   ≤ ⌈(window + tokens of a step - 2) / block size⌉ + 1

as engines count what a request needs to finish. The second bound: what the window reaches back from the first token of
a step, with all that the step computes, wherever that begins in a block.
"""

from __future__ import annotations

from kvscope.monitor.events.description import EngineDescription


def blocks_of_request(tokens: int, block_size: int, described: EngineDescription) -> int:
    """How many blocks it has at its most, in all KV groups."""
    blocks = -(-tokens // block_size)
    step = described.max_num_batched_tokens
    most = [
        -(-(group.window + step - 2) // block_size) + 1 if group.window and step else blocks
        for group in described.groups
    ]
    return sum(min(blocks, bound) for bound in most) if most else blocks
