"""Holders of the pool, their residency, and the effect of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries

from . import panels
from .panels import BLOCKS, BLOCKS_S, GRID_WIDTH, SELECTED, Panel

HOLDER_COLOURS: Final = {
    "running": "green",
    "waiting": "yellow",
    "finished": "orange",
    "cached_idle": "blue",
    "free": "#4d5866",
    "reserved": "#8e8e8e",
    "unaccounted": "red",
}


def kv_cache_page() -> Dashboard:
    """Return the page of the KV cache."""
    return panels.grafana_page(
        "kv-cache", "kvscope / KV cache", "Who holds the pool, and for how long.", _panels(), view="blocks"
    )


def balance_panel() -> TimeSeries:
    """Return the panel of the pool by holder."""
    panel = panels.stacked(
        "Balance of the pool, by holder",
        "Every block of the pool, counted once under its most active holder. The bands add up to the pool while the"
        " ledger is exact. finished: an announced deferral keeps it after its request ended. cached_idle: evictable"
        " content that a later request may reuse. It does not show which request holds which block: the web app"
        " does.",
        (f"sum by (holder) (kvscope_blocks{{{SELECTED}}})", "{{holder}}"),
        unit=BLOCKS,
    )
    return panels.with_colours(panel, HOLDER_COLOURS)


def _panels() -> Iterator[Panel | Row]:
    yield Row("Who holds the pool")
    yield balance_panel()
    yield _held_panel()
    yield Row("Age of blocks")
    yield from _age_panels()
    yield Row("Prefix cache")
    yield from _prefix_cache_panels()


def _held_panel() -> Panel:
    older = [
        (
            f'sum by (engine) (kvscope_block_age_seconds_bucket{{{SELECTED}, state="held", le="+Inf"}})'
            f' - sum by (engine) (kvscope_block_age_seconds_bucket{{{SELECTED}, state="held", le="{bound}.0"}})',
            f"longer than {bound} s, {{{{engine}}}}",
        )
        for bound in (1, 60, 900, 3600)
    ]
    return panels.lines(
        "Held blocks by time held",
        "Blocks in continuous use, by duration. A leak is a step that moves on to the next line and never falls. A"
        " long request looks similar until it ends, and so does a prefix that is always in use.",
        *older,
        unit=BLOCKS,
        width=GRID_WIDTH // 2,
    )


def _age_panels() -> Iterator[Panel]:
    for state, words in (("held", "Held blocks by age"), ("cached_idle", "Cached, idle blocks by age")):
        yield panels.heatmap(
            words,
            "Blocks by their time in this state: blocks that are never freed form a climbing band. The web app"
            " shows which request holds them.",
            panels.now_in_buckets("kvscope_block_age_seconds", f', state="{state}"'),
            counted=BLOCKS,
            width=GRID_WIDTH // 2,
        )
    for title, about, histogram in (
        (
            "Lifetime of evicted blocks",
            "The time from a block's allocation until its content was evicted. Blocks still in use are not"
            " included, so leaks appear only in the panels of held blocks.",
            "kvscope_block_lifetime_seconds",
        ),
        (
            "Idle before eviction",
            "How long cached blocks were idle before eviction. A short time means that the cache turns over. It"
            " does not show whether the evicted content was needed again.",
            "kvscope_block_idle_before_evict_seconds",
        ),
        (
            "Gap before reuse",
            "How long cached blocks were idle before a prefix hit. If this approaches the idle time before"
            " eviction, a larger cache would serve more. Hits on used blocks are not included.",
            "kvscope_block_reuse_gap_seconds",
        ),
    ):
        median, most = panels.quantile(0.5, histogram), panels.quantile(0.95, histogram)
        yield panels.lines(title, about, (median, "p50, {{engine}}"), (most, "p95, {{engine}}"), unit="s")


def _prefix_cache_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Prefix cache hits",
        "The prefix cache's hit rate by tokens. It does not show how much prompts share: a low rate may be all that"
        " is possible.",
        (
            f"{panels.rate('kvscope_prefix_cache_hit_tokens_total')}"
            f" / {panels.rate('kvscope_prefix_cache_queried_tokens_total')}",
            "{{engine}}",
        ),
        unit="percentunit",
    )
    yield panels.lines(
        "Prefix cache turnover, blocks per second",
        "Blocks cached, hit and evicted. It does not show which request evicted which block: findings and a block's"
        " event history do.",
        (panels.rate("kvscope_blocks_cached_total"), "cached, {{engine}}"),
        (panels.rate("kvscope_blocks_reused_total"), "reused, {{engine}}"),
        (panels.rate("kvscope_blocks_evicted_total"), "evicted, {{engine}}"),
        unit=BLOCKS_S,
    )
    yield panels.lines(
        "Blocks allocated and released, per second",
        "Allocated blocks, and released references by reason. The two need not be equal: each holder of a shared"
        " block releases it once.",
        (panels.rate("kvscope_blocks_allocated_total"), "allocated, {{engine}}"),
        (panels.rate("kvscope_block_references_released_total", "reason"), "released, {{reason}}"),
        unit=BLOCKS_S,
    )
