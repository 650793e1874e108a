"""Findings from the memory breakdown, as an event or as log lines; kvscope.monitor.analysis.memory_breakdown sums it.

sizing.kv-too-large     graphs took more than was kept for them, and hardly anything is free
sizing.overreserved     far more was kept for graphs than they took
sizing.bad-suggestion   the engine's advice is not what its own figures add up to
sizing.elsewhere        much is in use that the bill does not name; from the event only
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kvscope.monitor.analysis.memory_breakdown import (
    GIB,
    HEADROOM,
    NoBill,
    bill_of,
    fit_requested,
    measured,
    parts,
    rounding,
    unnamed,
)
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import percent

KV_TOO_LARGE = "sizing.kv-too-large"
OVERRESERVED = "sizing.overreserved"
BAD_SUGGESTION = "sizing.bad-suggestion"
ELSEWHERE = "sizing.elsewhere"

MIB: Final = 1 << 20
ESTIMATE: Final = "memory_graphs_estimated_gib"


class Figures(NamedTuple):
    """A bill in bytes, from an event or a log. `kept`: for graphs, when the pool was sized. `slack`: how far off."""

    source: str
    position: str
    device_total: int
    device_free: int
    kv_pool: int
    graphs: int
    kept: int
    advised: int | None
    right: int | None
    """What should be advised; None where it cannot be told."""
    slack: int


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What one engine's bill shows."""
    if ledger.has_stream:
        known = measured(ledger.state.memory)
        figures = _of_event(ledger, known)
        yield from _elsewhere(ledger, settings, known)
    else:
        figures = _of_log(ledger)
    if figures is not None:
        yield from _kv_too_large(ledger, settings, figures)
        yield from _overreserved(ledger, settings, figures)
        yield from _bad_suggestion(ledger, figures)


def _of_event(ledger: EngineLedger, known: dict[str, int]) -> Figures | None:
    if not {"device_total", "device_free", "kv_pool", "graphs_actual"} <= known.keys():
        return None
    pool, graphs, kept = known["kv_pool"], known["graphs_actual"], known.get("graphs_estimated", 0)
    block = ledger.description.kv_bytes_per_block
    advised = known.get("fit_requested")
    # The event has no share to do the sum with. A pool that was sized by it is what fits, but for what the graphs took
    # more or less than was kept; advice that is lower by their size, as closely as this, subtracts them twice.
    fits = pool + kept - graphs
    twice = (
        graphs and advised is not None and any(abs(fits - less - graphs - advised) <= block for less in (0, HEADROOM))
    )
    right = fits if twice else None
    return Figures(
        "stream",
        ledger.at(ledger.state.places.memory),
        known["device_total"],
        known["device_free"],
        pool,
        graphs,
        kept,
        advised,
        right,
        block,
    )


def _of_log(ledger: EngineLedger) -> Figures | None:
    facts = ledger.facts
    if "memory_total_gib" not in facts:
        return None
    try:
        bill, _ = bill_of(facts.values())
    except NoBill:
        return None
    advised = facts.get("suggested_fit_requested_bytes")
    estimate = facts.get(ESTIMATE)
    return Figures(
        "log",
        facts["memory_total_gib"].position,
        bill.device_total,
        parts(bill)["left free"] if bill.kv_cache is not None else bill.device_total,
        bill.kv_cache or 0,
        bill.graphs,
        round(float(estimate.value) * GIB) if estimate is not None else 0,
        int(advised.value) if advised is not None else None,
        fit_requested(bill).kv_cache_memory,
        rounding(bill),
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / MIB:.1f} MiB"


def _kv_too_large(ledger: EngineLedger, settings: Settings, bill: Figures) -> Iterator[Judgement]:
    over = bill.graphs - bill.kept
    if over <= bill.slack or bill.device_free >= settings(KV_TOO_LARGE, "min_free_mib") * MIB:
        return
    smaller = max(bill.kv_pool - over - HEADROOM, 0)
    yield Judgement(
        code=KV_TOO_LARGE,
        engine=ledger.engine,
        verdict="confirmed" if bill.source == "stream" else "likely",
        position=bill.position,
        evidence=(
            Evidence("graphs_actual", bill.graphs, "bytes", bill.source, bill.position),
            Evidence("kept_for_graphs", bill.kept, "bytes", bill.source, bill.position),
            Evidence("device_free", bill.device_free, "bytes", bill.source, bill.position),
            Evidence("device_total", bill.device_total, "bytes", bill.source, bill.position),
            Evidence("kv_pool", bill.kv_pool, "bytes", bill.source, bill.position),
        ),
        explanation=(
            f"The pool was sized with {_gib(bill.kept)} kept for graphs, which then took {_gib(bill.graphs)}:"
            f" {_gib(bill.device_free)} of {_gib(bill.device_total)} are free, and the next larger step may fail for"
            " want of memory."
        ),
        do_now=("Nothing while it runs; do not raise the load, and do not start anything else on this device.",),
        change=(
            f"Start with --kv-cache-memory-bytes {smaller}, which leaves room for the graphs and 150 MiB; or lower"
            " --gpu-memory-utilization.",
            "Let the engine estimate its graphs before it sizes the pool (vLLM: on by default since 0.21;"
            " VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1 since 0.18), or do without (--enforce-eager).",
        ),
        wont_help=("Lowering --max-num-seqs alone: the pool then takes what is saved.",),
        missing="" if bill.source == "stream" else "what the device has free now: the log tells of the start only",
    )


def _overreserved(ledger: EngineLedger, settings: Settings, bill: Figures) -> Iterator[Judgement]:
    unused = bill.kept - bill.graphs
    if (
        bill.kept <= settings(OVERRESERVED, "min_times") * bill.graphs + bill.slack
        or unused < settings(OVERRESERVED, "min_share") * bill.device_total
    ):
        return
    yield Judgement(
        code=OVERRESERVED,
        engine=ledger.engine,
        verdict="confirmed",
        position=bill.position,
        evidence=(
            Evidence("kept_for_graphs", bill.kept, "bytes", bill.source, bill.position),
            Evidence("graphs_actual", bill.graphs, "bytes", bill.source, bill.position),
            Evidence("kept_and_not_used", unused, "bytes", bill.source, bill.position),
            Evidence("kv_pool", bill.kv_pool, "bytes", bill.source, bill.position),
        ),
        explanation=(
            f"{_gib(bill.kept)} were kept for graphs, which took {_gib(bill.graphs)}: {_gib(unused)} of the device are"
            f" used by nothing, {percent(unused / bill.kv_pool) if bill.kv_pool else 'all'} of the pool's size."
        ),
        do_now=("Nothing is broken: the pool is smaller than it could be, and that is all.",),
        change=(
            f"Start with --kv-cache-memory-bytes {bill.kv_pool + unused}, which is the pool with what is not used.",
            "Or keep nothing for graphs and lower --gpu-memory-utilization by their size (vLLM:"
            " VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).",
        ),
        wont_help=("Fewer sizes to capture: what was kept shrinks with what is used.",),
    )


def _bad_suggestion(ledger: EngineLedger, bill: Figures) -> Iterator[Judgement]:
    if bill.advised is None or bill.right is None or abs(bill.right - bill.advised) <= bill.slack:
        return
    off = bill.right - bill.advised
    yield Judgement(
        code=BAD_SUGGESTION,
        engine=ledger.engine,
        verdict="confirmed" if bill.source == "log" else "likely",
        position=bill.position,
        evidence=(
            Evidence("advised", bill.advised, "bytes", bill.source, bill.position),
            Evidence("by_its_own_figures", bill.right, "bytes", bill.source, bill.position),
            Evidence("too_low_by", off, "bytes", bill.source, bill.position),
            Evidence("graphs_actual", bill.graphs, "bytes", bill.source, bill.position),
            Evidence("kv_pool", bill.kv_pool, "bytes", bill.source, bill.position),
        ),
        explanation=(
            f"The engine advises a pool of {_gib(bill.advised)}; its own figures add up to {_gib(bill.right)}. The"
            f" difference of {_gib(off)} goes with graphs of {_gib(bill.graphs)} that are subtracted twice."
        ),
        do_now=("Do not take the advice over.",),
        change=(f"If a size is to be given, give --kv-cache-memory-bytes {bill.right}.",),
        wont_help=("Starting again: the advice is made the same way (vLLM 0.27 to 0.33, #57936).",),
        missing="" if bill.source == "log" else "the share that was requested: the log's bill has it",
    )


def _elsewhere(ledger: EngineLedger, settings: Settings, known: dict[str, int]) -> Iterator[Judgement]:
    unknown = unnamed(known)
    if not unknown or unknown < settings(ELSEWHERE, "min_share") * known["device_total"]:
        return
    others = known.get("used_by_others")
    total = known["device_total"]
    theirs = others is not None and others >= unknown / 2
    position = ledger.at(ledger.state.places.memory)
    named = (
        "weights",
        "activations_peak",
        "graphs_actual",
        "non_torch",
        "kv_pool",
        "allocator_reserved",
        "allocator_allocated",
    )
    yield Judgement(
        code=ELSEWHERE,
        engine=ledger.engine,
        verdict="likely" if others is None else "confirmed",
        position=position,
        evidence=(
            Evidence("not_named_by_the_bill", unknown, "bytes", position=position),
            Evidence("share_of_the_device", round(unknown / total, 4), "of the device", position=position),
            Evidence("device_total", total, "bytes", position=position),
            Evidence("device_free", known["device_free"], "bytes", position=position),
            Evidence("used_by_others", "not known" if others is None else others, "bytes", position=position),
            *(Evidence(name, known[name], "bytes", position=position) for name in named if name in known),
        ),
        explanation=(
            f"{_gib(unknown)} of the device's {_gib(total)} ({percent(unknown / total)}) are in use and are neither KV"
            " nor anything else on the engine's bill: "
            + (
                f"other processes have {_gib(others or 0)}."
                if theirs
                else "another process has them."
                if others is None
                else "the engine itself has them, and did not have them when it was measured at its start."
            )
        ),
        do_now=(
            ("Look at who is on the device (nvidia-smi), and end what does not belong there.",)
            if theirs or others is None
            else ("If it grows, restart the engine before the device is full; drain it first.",)
        ),
        change=(
            "Leave room for what shares the device: a lower --gpu-memory-utilization, or an own device for each.",
            "If the engine itself grows: look for what keeps tensors from step to step (logits, prompt_logprobs, hooks,"
            " adapters), and for slack of the allocator (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True).",
        ),
        wont_help=("Looking at KV cache usage, or resetting the prefix cache: the pool's size never changes.",),
        missing="whose it is: the driver does not tell processes apart here" if others is None else "",
    )
