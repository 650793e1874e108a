"""Draws the settings of random runs of the bare scheduler, of what a release of vLLM has."""

from __future__ import annotations

import random
from typing import Any

from tests.probes.connector_settings import CONNECTOR

STEPS = 90
FIRST_SEED = 1500
NEWEST = (99,)
"""For the release that the Python with vLLM has: it is among the newest."""


def draw_runs(count: int, release: str) -> dict[str, dict[str, Any]]:
    """By name, so that equal numbers draw equal runs."""
    version = tuple(int(part) for part in release.split(".")) if release else NEWEST
    return {f"run {number}": draw_run(FIRST_SEED + number, version) for number in range(count)}


def draw_run(seed: int, version: tuple[int, ...]) -> dict[str, Any]:
    """One run. What a release does not have is drawn and left out, so that the rest is the same in all."""
    rng = random.Random(seed)
    run: dict[str, Any] = {
        "steps": STEPS,
        "seed": seed,
        "block_size": rng.choice((16, 16, 32, 48, 128)),
        "max_num_seqs": rng.choice((3, 7, 12, 19)),
        "max_tokens": rng.choice((64, 200, 512, 1000)),
        "a_step_ahead": rng.random() < 0.35,
        "resets": rng.choice((0.003, 0.02)),
        "loads": [name for name in ("sessions", "grammars", "pins", "evictions", "pauses") if rng.random() < 0.4],
    }
    tokens = rng.choice((1300, 2200, 6000))
    if rng.random() < 0.3:
        run["scheduling_policy"] = "priority"
    if rng.random() < 0.25:
        run["loras"] = 2
    if rng.random() < 0.25:
        run["image_tokens"] = rng.choice((40, 48))
    run["preempts_within"] = rng.random() < 0.15 and not run["a_step_ahead"]
    kind = rng.choice(
        ("plain", "drafts", "connector", "connector", "windows", "windows", "mamba", "aligned", "uncached")
    )
    drafts = rng.choice((1, 3))
    fails, groups = rng.random() < 0.5, draw_groups(rng, kind, run["block_size"], version)
    if kind == "drafts" or (kind == "aligned" and fails):
        run["drafts"], run["a_step_ahead"] = drafts, False
    if kind == "connector":
        run["kv_transfer_config"] = CONNECTOR | ({"kv_load_failure_policy": "recompute"} if version >= (0, 13) else {})
        run["failing_loads"] = fails and version >= (0, 13)
        run["loads"] = [name for name in run["loads"] if name != "sessions"]
        tokens += 1500
    if kind in ("mamba", "uncached"):
        run["enable_prefix_caching"] = False
        run["loads"] = [name for name in run["loads"] if name not in ("pins", "evictions")]
    if groups:
        run["groups"] = groups
    run["blocks"] = 8 + max(1, len(groups)) * tokens // run["block_size"]
    return run if version >= (0, 13) else without_new(run)


def draw_groups(rng: random.Random, kind: str, block_size: int, version: tuple[int, ...]) -> list[list[Any]]:
    """The KV cache groups of a run of this kind; none for one of full attention."""
    windows = [["sliding", 64], ["sliding", 200], ["chunked", 128]]
    if kind == "windows":
        # Up to 0.10 vLLM shares prefixes among at most one group of each kind.
        chosen = rng.sample(windows, rng.randrange(1, 4))
        return [["full"], *chosen] if version >= (0, 13) else [["full"], chosen[0]]
    if kind == "mamba":
        return [["mamba", "none"], *([["full"]] if rng.random() < 0.6 else [])]
    if kind == "aligned" and version >= (0, 18):
        own = 64 if version >= (0, 30) and block_size == 16 else block_size
        return [["full"], ["mamba", "align", own]]
    return []


def without_new(run: dict[str, Any]) -> dict[str, Any]:
    """What releases up to 0.12 do not have, or fail at themselves: sessions, pauses, evictions."""
    run["loads"] = [name for name in run["loads"] if name in ("grammars", "pins")]
    return run
