"""`monitor explain memory`: what a device's memory went to, and what that leaves for KV."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from ..base.errors import BadTarget, NotKnown
from ..contract.samples import Fact
from ..detectors.detector import Settings
from ..ledger.memory_breakdown import (
    BILL,
    TERM_FACTS,
    MeasuredMemory,
    MemoryTerm,
    NoBreakdown,
    breakdown_of,
    breakdown_terms,
    fit_requested,
    graph_accounting,
    over_requested,
    parts,
    rounding,
    size_contradictions,
    use_all,
)
from ..questions.observe import observe
from ..questions.schema import SCHEMA_VERSION
from ..sources.log_file import read_log
from ..sources.memory_log import MEMORY_FACTS
from ..sources.targets import TargetKind, kind_of

SIZING_CODES = (
    "kv_cache_size_tokens",
    "max_concurrency",
    "max_model_len",
    "available_kv_cache_gib",
    "kv_cache_reserved_gib",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "block_size",
    "gpu_memory_utilization",
)
"""Facts of a log that show the size of the pool, and its cause."""
TERMS_OR_SIZES = {name for sources in TERM_FACTS.values() for name in sources} | {"kv_cache_size_tokens"}
BREAKDOWN_FACTS = {name for name, _ in MEMORY_FACTS}
"""The parts of an incomplete breakdown are shown as they stand in the log."""
HOW_TO_GET_IT = (
    "vLLM logs its memory breakdown since 0.10.2, in 0.11 to 0.24 only with VLLM_LOGGING_LEVEL=DEBUG, never on the CPU."
    " kvscope's engine logs it with --memory-budget on the CPU, and always on a GPU"
)


class Suggestions(msgspec.Struct, frozen=True):
    """For `--kv-cache-memory`, in bytes. `short_by`: what is missing where there is no room for any KV."""

    fit_requested_bytes: int
    fit_requested_short_by_bytes: int
    use_all_bytes: int
    use_all_short_by_bytes: int


class Pool(msgspec.Struct, frozen=True):
    """One engine's pool: its share of the device's memory, and how much of it is in use (0 to 1)."""

    bytes: int | None
    usable_blocks: int
    block_size: int
    usage: float | None


class MemoryReport(msgspec.Struct, kw_only=True):
    """The memory of one log's engine, or of each engine at a target. All are in bytes. Unreported values are null or
    absent.

    parts: the device's memory by what it went to. They add up to its total. `devices` has the same of each engine at a
    target, where it reported enough, and `pools` what is in use of it. printed: the engine's own suggestions, to
    compare with those made here. rounding_bytes: how far off a suggestion may be, since a log's figures are rounded.
    terms: the breakdown of a log that does not state it whole. graphs_counted: whether the release keeps memory for
    graphs. contradictions: the engine's own sizes that cannot all be right. missing: the phrases that a log lacks, and
    a breakdown needs.
    """

    schema_version: str = SCHEMA_VERSION
    source: str
    breakdown: MeasuredMemory | None = None
    parts: dict[str, int] = {}
    over_requested_bytes: int | None = None
    suggestions: Suggestions | None = None
    printed_suggestions: dict[str, int] = {}
    rounding_bytes: int | None = None
    sizing: dict[str, Any] = {}
    engines: dict[str, dict[str, int]] = {}
    devices: dict[str, dict[str, int]] = {}
    pools: dict[str, Pool] = {}
    terms: list[MemoryTerm] = []
    graphs_counted: str = ""
    contradictions: list[str] = []
    notes: list[str] = []
    missing: list[str] = []


def breakdown_in_log(path: str) -> MemoryReport:
    """Return the last breakdown in the log at `path`, with its sums computed again. Raises BadTarget for what is no
    log.
    """
    if kind_of(path) is not TargetKind.LOG:
        raise BadTarget(f"{path} is not an engine's log: give it as a TARGET, without --log")
    _, records = read_log(Path(path))
    facts = [record for record in records if isinstance(record, Fact)]
    values = {fact.name: fact.value for fact in facts}
    report = MemoryReport(source=path, sizing={name: values[name] for name in SIZING_CODES if name in values})
    last = {fact.name: fact for fact in facts}
    if any(name in TERMS_OR_SIZES for name in values):
        graphs = graph_accounting(last)
        report.graphs_counted = graphs.sentence
        report.contradictions = size_contradictions(last, bool(graphs.in_pool))
    try:
        measured, notes = breakdown_of(facts)
    except NoBreakdown as error:
        report.terms = breakdown_terms(facts, bool(graph_accounting(last).in_pool))
        unstated = {words for name, words in BILL.items() if name not in values}
        report.missing = [f'"{words}"' for words in error.missing if words in unstated or words not in BILL.values()]
        report.sizing |= {name: value for name, value in values.items() if name in BREAKDOWN_FACTS}
        report.notes = [f"{HOW_TO_GET_IT}"]
        return report
    fits, all_of_it = fit_requested(measured), use_all(measured)
    report.breakdown = measured
    report.parts = parts(measured)
    report.over_requested_bytes = over_requested(measured)
    report.suggestions = Suggestions(fits.kv_cache_memory, fits.short_by, all_of_it.kv_cache_memory, all_of_it.short_by)
    report.printed_suggestions = {
        f"{name}_bytes": int(values[f"suggested_{name}_bytes"])
        for name in ("fit_requested", "use_all")
        if f"suggested_{name}_bytes" in values
    }
    report.rounding_bytes = rounding(measured)
    report.notes = notes
    return report


def breakdown_of_engines(target: str, settings: Settings, timeout_s: float, watch_s: float, token: str) -> MemoryReport:
    """Return the last reports of the engines at `target` about their memory. Raises BadTarget and CannotTell."""
    if kind_of(target) is TargetKind.LOG:
        return breakdown_in_log(target)
    observation = observe(target, settings, timeout_s=timeout_s, watch_s=min(watch_s, 1.0), token=token)
    report = MemoryReport(source=target)
    with closing(observation):
        for view in observation.query.engines():
            try:
                memory = observation.query.memory(view.engine)
            except NotKnown:
                continue
            report.engines[view.engine], report.devices[view.engine] = memory.measured, memory.parts
            size = memory.measured.get("kv_pool")
            report.pools[view.engine] = Pool(size, memory.usable_blocks, memory.block_size, view.usage)
    report.missing = [] if report.engines else ["a MEMORY event"]
    return report
