"""An engine's own sizes that cannot all be right: tokens, blocks, concurrency, and the memory they are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kvscope.monitor.analysis.demand import number_fact
from kvscope.monitor.analysis.memory_breakdown import GIB_B, ROUNDED_TO
from kvscope.monitor.analysis.partial_breakdown import SETS_THE_POOL, stated_bytes
from kvscope.monitor.events.samples import Fact

HALF_A_HUNDREDTH: Final = 0.005
"""Concurrency is printed with two decimals."""
RESIDENT: Final = ("weights", "non-torch")


def size_contradictions(facts: Mapping[str, Fact], are_graphs_counted: bool) -> list[str]:
    """Return a sentence for each pair of sizes that differ by more than their rounding."""
    return [
        *_tokens_and_concurrency(facts),
        *_blocks_and_tokens(facts),
        *_share_gap(facts),
        *_profile_gap(facts, are_graphs_counted),
    ]


def _tokens_and_concurrency(facts: Mapping[str, Fact]) -> Iterator[str]:
    tokens, times = number_fact(facts, "kv_cache_size_tokens"), number_fact(facts, "max_concurrency")
    each = number_fact(facts, "max_concurrency_tokens")
    if not (tokens and times and each):
        return
    slack = each * HALF_A_HUNDREDTH + max(number_fact(facts, "block_size") or 0, tokens * HALF_A_HUNDREDTH)
    if abs(times * each - tokens) > slack:
        yield (
            f"{times:g} requests of {each:,.0f} tokens are {times * each:,.0f} tokens, and the engine prints"
            f" {tokens:,.0f}: vLLM before 0.20 divides the tokens of a model with several KV cache groups by their"
            " number. Plan with the concurrency"
        )


def _blocks_and_tokens(facts: Mapping[str, Fact]) -> Iterator[str]:
    blocks = number_fact(facts, "num_gpu_blocks_override") or number_fact(facts, "num_gpu_blocks")
    size, tokens = number_fact(facts, "block_size"), number_fact(facts, "kv_cache_size_tokens")
    if blocks and size and tokens and abs(blocks * size - tokens) > max(size, tokens * HALF_A_HUNDREDTH):
        yield (
            f"{blocks:,.0f} blocks of {size:,.0f} tokens are {blocks * size:,.0f} tokens, and the engine prints"
            f" {tokens:,.0f}: with several KV cache groups a request takes blocks in each of them, and a block with"
            " room for a state has more tokens than --block-size"
        )


def _share_gap(facts: Mapping[str, Fact]) -> Iterator[str]:
    device, requested = number_fact(facts, "memory_total_gib"), number_fact(facts, "memory_requested_gib")
    share = number_fact(facts, "memory_requested_share")
    if device and requested and share and abs(device * share - requested) > ROUNDED_TO * 2 + HALF_A_HUNDREDTH * device:
        yield (
            f"{share:g} of {device:.2f} GiB are {device * share:.2f} GiB, and the engine prints {requested:.2f}: the"
            " lines may be from two devices"
        )


def _profile_gap(facts: Mapping[str, Fact], are_graphs_counted: bool) -> Iterator[str]:
    if any(name in facts for name in SETS_THE_POOL):
        return
    resident = stated_bytes(facts, "weights and non-torch")
    parts: list[int | None] = [resident] if resident is not None else [stated_bytes(facts, name) for name in RESIDENT]
    parts.append(stated_bytes(facts, "peak activations"))
    if are_graphs_counted and resident is None:  # from 0.27 on the printed activations contain the estimate
        parts.append(stated_bytes(facts, "graphs"))
    requested, available = stated_bytes(facts, "requested"), stated_bytes(facts, "KV cache")
    taken = [size for size in parts if size is not None]
    if requested is None or available is None or len(taken) < len(parts):
        return
    left = requested - sum(taken)
    if abs(left - available) > (len(parts) + 2) * ROUNDED_TO * GIB_B:
        yield (
            f"the profile leaves {left / GIB_B:.2f} GiB of the {requested / GIB_B:.2f} GiB requested, and the engine"
            f" prints {available / GIB_B:.2f} GiB for KV: the lines may be from two workers or two starts"
        )
