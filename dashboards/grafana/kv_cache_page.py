"""Who holds the pool, for how long, and what the prefix cache does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries

from kvscope.dashboards.grafana.dashboard_frame import grafana_page
from kvscope.dashboards.grafana.panels import (
    BLOCKS,
    BLOCKS_S,
    GRID_WIDTH,
    SELECTED,
    Panel,
    heatmap,
    lines,
    now_in_buckets,
    quantile,
    rate,
    row_heading,
    stacked,
    with_colours,
)

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
    """The page."""
    return grafana_page(
        "kv-cache", "kvscope / KV cache", "Who holds the pool, and for how long.", _kv_cache_panels(), view="blocks"
    )


def balance_panel() -> TimeSeries:
    """The pool by holder."""
    panel = stacked(
        "Balance of the pool, by holder",
        "Every block of the pool, counted once, under the liveliest that holds it; the bands add up to the pool (but"
        " for the moments in which the ledger is not exact). finished: kept after its request's end by a deferral"
        " that was announced. cached_idle: content that a later request may reuse, free to be taken. It does not tell"
        " which request holds which block: the web app does.",
        (f"sum by (holder) (kvscope_blocks{{{SELECTED}}})", "{{holder}}"),
        unit=BLOCKS,
    )
    return with_colours(panel, HOLDER_COLOURS)


def _kv_cache_panels() -> Iterator[Panel | Row]:
    yield row_heading("Who holds the pool")
    yield balance_panel()
    yield _held_panel()
    yield row_heading("Age of blocks")
    yield from _block_age_panels()
    yield row_heading("Prefix cache")
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
    return lines(
        "Blocks held for so long",
        "Blocks that have been in use without a break, by how long. A leak is a step here that moves on to the next"
        " line and never comes down; a long request looks alike until it ends, and so does a prefix that is always in"
        " use.",
        *older,
        unit=BLOCKS,
        width=GRID_WIDTH // 2,
    )


def _block_age_panels() -> Iterator[Panel]:
    for state, words in (("held", "Held blocks by age"), ("cached_idle", "Cached, idle blocks by age")):
        yield heatmap(
            words,
            "How many blocks have been in this state for how long, at each moment: what is never freed is a band that"
            " climbs. It does not tell which request holds them: the web app does.",
            now_in_buckets("kvscope_block_age_seconds", f', state="{state}"'),
            counted=BLOCKS,
            width=GRID_WIDTH // 2,
        )
    for title, says, histogram in (
        (
            "Lifetime of blocks that are over",
            "From when a block was handed out until its content was gone. Blocks that are still there are not in it:"
            " what leaks is beside it, under how long blocks are held.",
            "kvscope_block_lifetime_seconds",
        ),
        (
            "Idle before eviction",
            "How long cached blocks lay unused before their content made room. Short means that the cache turns over;"
            " it does not tell whether what went was needed again.",
            "kvscope_block_idle_before_evict_seconds",
        ),
        (
            "Gap before reuse",
            "How long cached blocks lay unused before a prefix hit took them. Longer than the idle time before eviction"
            " would be: a larger cache would serve more. Hits on blocks in use have no gap and are not in it.",
            "kvscope_block_reuse_gap_seconds",
        ),
    ):
        median, most = quantile(0.5, histogram), quantile(0.95, histogram)
        yield lines(title, says, (median, "p50, {{engine}}"), (most, "p95, {{engine}}"), unit="s")


def _prefix_cache_panels() -> Iterator[Panel]:
    yield lines(
        "Prefix cache hits",
        "Share of the tokens looked up that the prefix cache had. It does not tell whether prompts have anything in"
        " common: a low share may be all there is.",
        (
            f"{rate('kvscope_prefix_cache_hit_tokens_total')} / {rate('kvscope_prefix_cache_queried_tokens_total')}",
            "{{engine}}",
        ),
        unit="percentunit",
    )
    yield lines(
        "Prefix cache turnover, blocks per second",
        "Blocks whose content entered the cache, that hits took, and that lost their content. It does not tell who"
        " evicted whom: findings and stories do.",
        (rate("kvscope_blocks_cached_total"), "cached, {{engine}}"),
        (rate("kvscope_blocks_reused_total"), "reused, {{engine}}"),
        (rate("kvscope_blocks_evicted_total"), "evicted, {{engine}}"),
        unit=BLOCKS_S,
    )
    yield lines(
        "Blocks handed out and given back, per second",
        "Blocks handed out, and references given back by reason. The two need not be equal: a shared block is given"
        " back once by each that had it.",
        (rate("kvscope_blocks_allocated_total"), "handed out, {{engine}}"),
        (rate("kvscope_block_references_released_total", "reason"), "back, {{reason}}"),
        unit=BLOCKS_S,
    )
