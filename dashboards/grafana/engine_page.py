"""One engine at a glance: pool, queue, work, memory, and how far to trust the figures."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from kvscope.dashboards.grafana import panels
from kvscope.dashboards.grafana.dashboard_frame import grafana_page
from kvscope.dashboards.grafana.kv_cache_page import balance_panel
from kvscope.dashboards.grafana.panels import (
    BAD,
    GRID_WIDTH,
    SELECTED,
    STEPS_S,
    TARGETS,
    TOKENS_S,
    Panel,
    lines,
    rate,
    row_heading,
    stacked,
    stat,
)
from kvscope.dashboards.grafana.requests_page import by_state
from kvscope.dashboards.objectives import MISSED_AFTER_S


def engine_page() -> Dashboard:
    """The page."""
    return grafana_page("engine", "kvscope / Engine", "One engine at a glance.", _engine_panels(), view="engine")


def _engine_panels() -> Iterator[Panel | Row]:
    yield row_heading("Now")
    yield from _engine_state_panels()
    yield row_heading("Pool and queue")
    yield balance_panel()
    yield by_state()
    yield row_heading("Work")
    yield from _engine_work_panels()
    yield row_heading("Memory, GPU and stream")
    yield from _engine_memory_panels()


def _engine_state_panels() -> Iterator[Panel]:
    yield stat(
        "Findings here, warning or worse",
        "Troubles that fire now. 0 means that kvscope sees none, not that there is none. No data: no engine is"
        " followed.",
        (
            f"sum(kvscope_findings{{{SELECTED}, {BAD}}}) or 0 * count(kvscope_ledger_exact{{{SELECTED}}})",
            "",
        ),
        bad_from=1,
    )
    yield stat(
        "Pool in use now",
        "Blocks in use as a share of those that can be, as the engine counts it: cached blocks that no request uses are"
        " free. It cannot tell use from leak.",
        (panels.POOL_USAGE, "{{engine}}"),
        unit="percentunit",
    )
    yield stat(
        "UNACCOUNTED",
        "Blocks in use that nobody legitimately holds, and references that no living request and no announced deferral"
        " explains. Anything but 0 is a leak or a broken account; which blocks they are, the web app tells. For a"
        " moment after a loss of events it may be wrong.",
        (f'sum by (engine) (kvscope_blocks{{{SELECTED}, holder="unaccounted"}})', "blocks, {{engine}}"),
        (f"sum by (engine) (kvscope_unexplained_references{{{SELECTED}}})", "references, {{engine}}"),
        bad_from=1,
    )
    yield stat(
        "Ledger is exact",
        "1: every figure here rests on the whole stream of events. 0: events were lost, and the engine's next whole"
        " audit is awaited.",
        (f"min by (engine) (kvscope_ledger_exact{{{SELECTED}}})", "{{engine}}"),
        good_from=1,
    )


def _engine_work_panels() -> Iterator[Panel]:
    yield lines(
        "Tokens per second",
        "Tokens generated, and tokens computed: prompts, output, and what had to be computed again. It does not tell"
        " how many of them a client was still waiting for.",
        (rate("kvscope_output_tokens_total"), "generated, {{engine}}"),
        (rate("kvscope_computed_tokens_total"), "computed, {{engine}}"),
        unit=TOKENS_S,
    )
    yield stacked(
        "What kept steps from being larger",
        "Steps a second by their binding limit: KV means that blocks ran out, NONE that there was no more to do. A step"
        " has one limit only, though a second may have been near.",
        (rate("kvscope_steps_total", "limit"), "{{limit}}"),
        unit=STEPS_S,
        width=GRID_WIDTH // 3,
    )
    yield lines(
        "Seconds per step",
        "Wall time of a step on average. A step that hangs is not in here before it ends; findings name it.",
        (f"{rate('kvscope_step_seconds_total')} / {rate('kvscope_steps_total')}", "{{engine}}"),
        unit="s",
    )


def _engine_memory_panels() -> Iterator[Panel]:
    yield lines(
        "Memory bill",
        "Device memory by what it went to, as the engine measured it at its start; device_total and device_free are the"
        " device's own. What the engine did not measure is absent, not 0.",
        (f"sum by (engine, part) (kvscope_memory_bytes{{{SELECTED}}})", "{{part}}"),
        unit="bytes",
        width=GRID_WIDTH // 2,
    )
    yield lines(
        "Since an engine was last heard",
        "Seconds since the engine last said anything; an idle one says a heartbeat a second. Silence alone does not"
        " tell a dead engine from a broken stream, or from a Prometheus that cannot reach kvscope.",
        (f"time() - kvscope_engine_last_heard_timestamp_seconds{{{SELECTED}}}", "{{engine}}"),
        unit="s",
        width=GRID_WIDTH // 2,
        bad_from=MISSED_AFTER_S,
    )
    yield stacked(
        "GPU memory, by who has it",
        "As the driver of each GPU of kvscope's own machine counts it: engines that are followed, with their workers,"
        " and other processes. In a container it cannot tell them apart. No data: no GPU there.",
        (f"sum by (gpu, owner) (kvscope_gpu_process_memory_bytes{{{TARGETS}}})", "GPU {{gpu}}, {{owner}}"),
        unit="bytes",
    )
    yield lines(
        "GPU busy",
        "Share of time in which the GPU ran a kernel, or moved memory. A kernel that waits is busy too: it does not"
        " tell how well the GPU is used. No data: no GPU on kvscope's own machine.",
        (f"max by (gpu, of) (kvscope_gpu_utilization_ratio{{{TARGETS}}})", "GPU {{gpu}}, {{of}}"),
        unit="percentunit",
        width=GRID_WIDTH // 2,
    )
