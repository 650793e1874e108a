"""One engine at a glance: pool, queue, work, memory, and how far to trust the figures."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from ..objectives import MISSED_AFTER_S
from . import panels
from .kv_cache_page import balance_panel
from .panels import BAD, GRID_WIDTH, SELECTED, STEPS_S, TARGETS, TOKENS_S, Panel
from .requests_page import by_state


def engine_page() -> Dashboard:
    """Return the page of one engine."""
    return panels.grafana_page("engine", "kvscope / Engine", "One engine at a glance.", _panels(), view="engine")


def _panels() -> Iterator[Panel | Row]:
    yield Row("Now")
    yield from _state_panels()
    yield Row("Pool and queue")
    yield balance_panel()
    yield by_state()
    yield Row("Work")
    yield from _work_panels()
    yield Row("Memory, GPU and stream")
    yield from _memory_panels()


def _state_panels() -> Iterator[Panel]:
    yield panels.stat(
        "Findings here, warning or worse",
        "Findings that fire now. 0 means that kvscope detects none, not that none exists. No data: kvscope watches"
        " no engine.",
        (
            f"sum(kvscope_findings{{{SELECTED}, {BAD}}}) or 0 * count(kvscope_engine_info{{{SELECTED}}})",
            "",
        ),
        bad_from=1,
    )
    yield panels.stat(
        "Pool in use now",
        "Used blocks as a share of usable blocks, as the engine counts them: idle cached blocks are free. Usage"
        " does not distinguish load from a leak.",
        (panels.POOL_USAGE, "{{engine}}"),
        unit="percentunit",
    )
    yield panels.stat(
        "UNACCOUNTED",
        "Used blocks without an owner, and references that no live request and no announced deferral explains. Any"
        " value other than 0 is a leak or an accounting error. The web app lists the blocks. The value may be wrong"
        " for a moment after lost events.",
        (f'sum by (engine) (kvscope_blocks{{{SELECTED}, holder="unaccounted"}})', "blocks, {{engine}}"),
        (f"sum by (engine) (kvscope_unexplained_references{{{SELECTED}}})", "references, {{engine}}"),
        bad_from=1,
    )
    yield panels.stat(
        "Ledger is exact",
        "1: every value here is based on the complete event stream. 0: events were lost, and the engine's next"
        " complete audit is pending.",
        (f"min by (engine) (kvscope_ledger_exact{{{SELECTED}}})", "{{engine}}"),
        good_from=1,
    )


def _work_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Tokens per second",
        "Generated tokens, and computed tokens: prompts, output and recomputation. It does not show how many of"
        " them a client still waited for.",
        (panels.rate("kvscope_output_tokens_total"), "generated, {{engine}}"),
        (panels.rate("kvscope_computed_tokens_total"), "computed, {{engine}}"),
        unit=TOKENS_S,
    )
    yield panels.stacked(
        "Steps by limit",
        "Steps per second by their binding limit: KV means that blocks ran out, NONE that there was no more work. A"
        " step has only one limit, even if a second one was close.",
        (panels.rate("kvscope_steps_total", "limit"), "{{limit}}"),
        unit=STEPS_S,
        width=GRID_WIDTH // 3,
    )
    yield panels.lines(
        "Seconds per step",
        "Average wall time of a step. A hanging step is not included until it ends. Findings report it.",
        (f"{panels.rate('kvscope_step_seconds_total')} / {panels.rate('kvscope_steps_total')}", "{{engine}}"),
        unit="s",
    )


def _memory_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Memory breakdown",
        "Device memory by purpose, as the engine measured it at startup. device_total and device_free come from the"
        " device. Parts that the engine did not measure are absent, not 0.",
        (f"sum by (engine, part) (kvscope_memory_bytes{{{SELECTED}}})", "{{part}}"),
        unit="bytes",
        width=GRID_WIDTH // 2,
    )
    yield panels.lines(
        "Time since an engine's last event",
        "Seconds since the engine's last event. An idle engine sends a heartbeat each second. Silence alone does"
        " not distinguish a dead engine from a broken stream, or from a Prometheus that cannot reach kvscope.",
        (f"clamp_min(time() - kvscope_engine_last_heard_timestamp_seconds{{{SELECTED}}}, 0)", "{{engine}}"),
        unit="s",
        width=GRID_WIDTH // 2,
        bad_from=MISSED_AFTER_S,
    )
    yield panels.stacked(
        "GPU memory by process",
        "As the driver of each GPU on kvscope's own machine counts it: watched engines with their workers, and"
        " other processes. In a container, it cannot distinguish them. No data: no GPU.",
        (f"sum by (gpu, owner) (kvscope_gpu_process_memory_bytes{{{TARGETS}}})", "GPU {{gpu}}, {{owner}}"),
        unit="bytes",
    )
    yield panels.lines(
        "GPU busy",
        "Share of time in which the GPU ran a kernel or moved memory. A waiting kernel also counts as busy, so this"
        " does not show how well the GPU is used. No data: no GPU on kvscope's own machine.",
        (f"max by (gpu, of) (kvscope_gpu_utilization_ratio{{{TARGETS}}})", "GPU {{gpu}}, {{of}}"),
        unit="percentunit",
        width=GRID_WIDTH // 2,
    )
