"""Sizes that are wrong."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients
from ..simulated_run import exactly, leaked, no_requests, preempted, preemptions
from .scenario import Way, incident
from .shapes import AHEAD, BUSY, CHAT, FINE, MEDIUM, NO_PREFIXES, SMALL

MIB: Final = 1 << 20
CAPTURING: Final = {
    "memory_budget": 420 * MIB,
    "enforce_eager": False,
    "max_model_len": 512,
    "max_num_seqs": 256,
    "block_size": 4,
}
"""A device so small that the inputs of its graphs, a fraction of a MiB, count."""
CAPTURING_FEWER: Final = {**CAPTURING, "max_num_seqs": 128, "max_num_batched_tokens": 512}
CAPTURING_AHEAD: Final = {**CAPTURING, **AHEAD, "memory_budget": 450 * MIB}
MUCH_MEMORY: Final = {"memory_budget": 1024 * MIB, "max_model_len": 512}
BY_BYTES: Final = {"kv_cache_memory_bytes": 13 * MIB, "max_num_batched_tokens": 512}
CROWD: Final = (Clients(at_once=12, prompt=(60, 120), output=(40, 80)),)

SIZING: Final = (
    *incident(
        "sizing.kv-too-small",
        Way("hits", {**BY_BYTES, "max_num_seqs": 16}, CROWD),
        Way("bare", {**BY_BYTES, **NO_PREFIXES, "max_num_seqs": 12}, CROWD),
        Way("ahead", {**BY_BYTES, **AHEAD, "block_size": 8, "max_num_seqs": 16}, CROWD),
        grace=("sizing.kv-too-small.over_s",),
        onset=preemptions(3),
        requests=exactly(preempted(1)),
    ),
    *incident(
        "sizing.kv-too-large",
        Way("all", {**CAPTURING, "gpu_memory_utilization": 1.0}, (CHAT,)),
        Way("fewer", {**CAPTURING_FEWER, "gpu_memory_utilization": 1.0}, (CHAT,)),
        Way("ahead", {**CAPTURING_AHEAD, "gpu_memory_utilization": 1.0}, (BUSY,)),
        requests=exactly(no_requests),
    ),
    *incident(
        "sizing.overreserved",
        Way("all", CAPTURING, (CHAT,)),
        Way("more", {**CAPTURING, "max_num_seqs": 384, "memory_budget": 600 * MIB}, (CHAT,)),
        Way("ahead", CAPTURING_AHEAD, (BUSY,)),
        requests=exactly(no_requests),
    ),
    *incident(
        "sizing.bad-suggestion",
        Way("all", CAPTURING, (CHAT,)),
        Way("fewer", CAPTURING_FEWER, (CHAT,)),
        Way("ahead", CAPTURING_AHEAD, (BUSY,)),
        requests=exactly(no_requests),
    ),
    *incident(
        "sizing.elsewhere",
        Way("small", {**SMALL, **MUCH_MEMORY}, (BUSY,)),
        Way("medium", {**MEDIUM, **MUCH_MEMORY}, (BUSY,), ":after=50"),
        Way("fine", {**FINE, **MUCH_MEMORY}, (BUSY, CHAT), ":every=2"),
        waits_s=5,  # the engine measures so often
        onset=leaked(1024 * MIB // 20),
        requests=exactly(no_requests),
    ),
)
