"""Settings with which an engine that refused to start fits, from the numbers of its error and the lines above it.

    fitting length  = what the engine estimated, or length * available / needed where KV grows evenly with length
    8-bit KV        = twice that length, where keys and values had 16 bits
    share           = (requested + missing) / device

A sentence is left out where the text lacks a number for it. The last one names that number and the flag of `monitor
plan` that takes it.
"""

from __future__ import annotations

from math import ceil, floor
from typing import Final

import msgspec

from ..base.errors import BadQuestion
from .capacity_plan import plan_capacity
from .known_models import KnownModel
from .kv_pool import EngineSettings
from .model_shape import shape_of
from .plan_types import GIB_BYTES, ExpectedLoad, MemoryBudget

EIGHT_BITS: Final = "--kv-cache-dtype fp8"
HIGHEST_SHARE: Final = 0.97
"""A larger share leaves no room for the CUDA context and graphs: the plan suggests none."""


class RefusedNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a refused start. None: the text does not state it. Sizes in GiB, lengths in tokens."""

    length: int | None = None
    needed: float | None = None
    available: float | None = None
    pool_tokens: int | None = None
    fitting: int | None = None
    device: float | None = None
    requested: float | None = None
    share: float | None = None
    free: float | None = None
    is_eight_bit: bool = False
    is_pool_empty: bool = False


def start_remedies(start: RefusedNumbers) -> tuple[str, ...]:
    """Return sentences for "Do now": lengths and shares that fit, then the one number that is missing."""
    if start.free is not None and start.requested is not None:
        return _within_free_memory(start.free, start.device, start.requested)
    if start.is_pool_empty:
        return _without_pool(start)
    return (*_lengths(start), *_larger_share(start))


def fitting_length(start: RefusedNumbers) -> int | None:
    """Return the longest request that the pool holds: the engine's own estimate first."""
    if start.fitting or start.pool_tokens:
        return start.fitting or start.pool_tokens
    if start.length and start.needed and start.available and start.available > 0:
        return floor(start.length * start.available / start.needed)
    return None


def _lengths(start: RefusedNumbers) -> tuple[str, ...]:
    fits = fitting_length(start)
    if not fits or not start.length:
        return ()
    is_estimate = not (start.fitting or start.pool_tokens)
    how = f"--max-model-len {fits}" + (" (if KV grows evenly with length)" if is_estimate else "")
    doubled = min(2 * fits, start.length)
    full = "the full " if doubled == start.length else ""
    if not start.is_eight_bit:
        how += f", or with KV in 8 instead of 16 bits ({EIGHT_BITS}) at {full}{doubled:,} tokens"
    return (f"It fits with {how}.",)


def _larger_share(start: RefusedNumbers) -> tuple[str, ...]:
    if start.needed is not None and start.available is not None:
        lacking = start.needed - start.available
    else:
        return (
            "For a share that holds the whole length the text lacks the memory for KV: give it to `monitor plan MODEL"
            " --kv-cache-memory SIZE`.",
        )
    if start.device is None or start.requested is None:
        return (
            "For a --gpu-memory-utilization that holds the whole length the text lacks the device's memory: give it to"
            " `monitor plan MODEL --device-memory SIZE`.",
        )
    return (_share_sentence(start.requested + lacking, start.device, "holds the whole length"),)


def _share_sentence(wanted: float, device: float, what: str) -> str:
    share = ceil(100 * wanted / device) / 100
    if share > HIGHEST_SHARE:
        return (
            f"No --gpu-memory-utilization {what}: it would take {wanted:.2f} of the device's {device:.2f} GiB. Add"
            " tensor-parallel ranks or quantize the weights."
        )
    return f"--gpu-memory-utilization {share:.2f} {what}: {wanted:.2f} of the device's {device:.2f} GiB."


def _within_free_memory(free: float, device: float | None, requested: float) -> tuple[str, ...]:
    lacking = requested - free
    if not device:
        return (
            f"Free {lacking:.2f} GiB on the device. For a share that fits beside it the text lacks the device's"
            " memory: give it to `monitor plan MODEL --device-memory SIZE`.",
        )
    share = floor(100 * free / device) / 100
    return (
        f"It starts with --gpu-memory-utilization {share:.2f} ({share * device:.2f} of {device:.2f} GiB), or once"
        f" {lacking:.2f} GiB more are free. `monitor plan MODEL --device-memory {device:.2f}G"
        f" --gpu-memory-utilization {share:.2f}` shows the pool that this leaves.",
    )


def _without_pool(start: RefusedNumbers) -> tuple[str, ...]:
    if start.available is None:
        return (
            "See what holds the device (nvidia-smi), then raise --gpu-memory-utilization, or give the pool a size of"
            " its own (--kv-cache-memory-bytes).",
            "For the smallest share that leaves a pool the text lacks the weights: give them to `monitor plan MODEL"
            " --device-memory SIZE --weights SIZE`.",
        )
    if start.device is None or start.requested is None:
        return (
            f"{-start.available:.2f} GiB are missing before the first block. For a share that covers them the"
            " text lacks the device's memory: give it to `monitor plan MODEL --device-memory SIZE`.",
        )
    return (
        _share_sentence(start.requested - start.available, start.device, "leaves the first block")
        + " Requests need a pool on top: `monitor plan MODEL --prompt-len N --output-len N` computes it.",
    )


def pool_sentence(name: str, model: KnownModel, kv_bytes: int, release: tuple[int, int]) -> str:
    """Return the pool that so many bytes make for a known model, or an empty text where they hold no block."""
    settings = EngineSettings(release=release, max_num_batched_tokens=8192)
    try:
        plan = plan_capacity(shape_of(model.config), settings, MemoryBudget(kv=kv_bytes), ExpectedLoad())
    except BadQuestion:
        return ""
    return (
        f"Plan for {name} on one device: {kv_bytes / GIB_BYTES:.2f} GiB are {plan.blocks:,} blocks of"
        f" {plan.block_size} tokens, and hold {plan.max_concurrency:.2f} requests of {plan.max_model_len:,} tokens."
    )
