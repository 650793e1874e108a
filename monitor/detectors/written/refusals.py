"""Failed starts and devices that ran out of memory, by the engine's own lines.

A memory profile that leaves something out is computed again from its own lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import percent
from ...contract.samples import ReportedEvent
from ...ledger.memory_breakdown import (
    GIB_B,
    HEADROOM,
    MeasuredMemory,
    NoBreakdown,
    breakdown_of,
    fit_requested,
    over_requested,
    rounding,
    use_all,
)
from ..judgement import Evidence, TextJudgement
from ..shared_thresholds import MOST_ELSEWHERE
from .planned_settings import planned_pool
from .written_view import WrittenView, number_of, quotes

REFUSAL_LINES: Final = ("refused_for_length", "refused_without_pool", "refused_for_other_processes")


def printed_numbers(line: ReportedEvent) -> tuple[Evidence, ...]:
    """Return the numbers of the engine's own line as evidence."""
    units = {"gib": "GiB", "len": "tokens", "tokens": "tokens", "blocks": "blocks"}
    return tuple(
        Evidence(name, value, units.get(name.rpartition("_")[2], ""), "log", line.position)
        for name, value in line.fields.items()
        if not isinstance(value, str)
    )


def held_by_others(line: ReportedEvent) -> float:
    """Return the share of the device that is neither free nor this process's, if the error has the numbers."""
    total, free = number_of(line, "total_gib"), number_of(line, "free_gib")
    own = number_of(line, "this_process_gib") or (
        number_of(line, "in_use_gib") if line.fields.get("processes") == 1 else None
    )
    if not total or free is None or own is None:
        return 0.0
    return max(0.0, (total - free - own) / total)


def ran_out_of_memory(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield an out-of-memory error, by the phase of the engine: loading, profiling, capturing graphs or serving."""
    lines = view.lines("out_of_memory")
    if not lines or any(held_by_others(line) > view.settings(MOST_ELSEWHERE) for line in lines):
        return
    code, sure, why = _phase_of_failure(view, lines)
    line = lines[0]
    after_pool = code == "sizing.kv-too-large"
    yield view.finding(
        code,
        line,
        verdict="likely" if sure else "cannot-tell",
        evidence=(*printed_numbers(line), *quotes(lines)),
        explanation=_sums(line) + why,
        do_now=(
            "Start it again with a lower --gpu-memory-utilization (0.05 less leaves as much of the device free), or"
            " --enforce-eager to do without graphs."
            if after_pool
            else "Start it with fewer weights a device (quantized, or --tensor-parallel-size), or a lower"
            " --max-num-batched-tokens if it is the profile that fails.",
        ),
        change=(
            "Give the pool a size in bytes that leaves room for graphs and the sampler (--kv-cache-memory-bytes); a"
            " lower --max-num-seqs makes both smaller.",
        ),
        wont_help=(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, unless much is reserved and unallocated.",
            *(() if after_pool else ("A smaller pool: it does not exist yet at that time.",)),
        ),
        missing="" if sure else "the traceback above the error: loading, profiling, capturing or serving",
    )


def _phase_of_failure(view: WrittenView, lines: Sequence[ReportedEvent]) -> tuple[str, bool, str]:
    """Return the code, whether the text shows the phase, and the sentence on it."""
    if view.lines("frame_of_weights"):
        return (
            "sizing.elsewhere",
            True,
            " It loaded weights: the pool did not exist yet, so the KV cache is not the cause.",
        )
    if view.lines("frame_of_profile"):
        return "sizing.elsewhere", True, " It measured activations: the pool did not exist yet."
    if view.lines("frame_of_graphs", "frame_of_pool", "graphs_captured"):
        return (
            "sizing.kv-too-large",
            True,
            " The pool had been sized already: it leaves too little for what comes after.",
        )
    if any(number_of(line, "graphs_gib") for line in lines) or view.samples or view.lines("frame_of_step"):
        return (
            "sizing.kv-too-large",
            True,
            " Graphs were captured or requests ran, so the pool was there: it leaves too little beside it.",
        )
    if view.number("available_kv_cache_gib") or view.number("kv_cache_size_tokens") or view.number("num_gpu_blocks"):
        return "sizing.kv-too-large", True, " The pool's size is printed before it: it leaves too little beside it."
    return "sizing.kv-too-large", False, " The text does not show whether the pool existed by then."


def _sums(line: ReportedEvent) -> str:
    tried, total, free = number_of(line, "tried_gib"), number_of(line, "total_gib"), number_of(line, "free_gib")
    if tried is None or total is None or free is None:
        return "The device ran out of memory."
    return f"The device ran out of memory: {tried:.2f} GiB were requested, {free:.2f} of {total:.2f} GiB were free."


def graphs_beside_the_pool(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a profile without graphs with a person's report of a failed capture."""
    rest, taken = view.number("kv_cache_reserved_gib"), view.number("memory_graphs_gib")
    phrases = view.phrases("out_of_memory")
    captured = view.lines("graphs_captured")
    if (
        view.lines("out_of_memory")
        or not (phrases and view.states("graphs") and captured and rest)
        or taken is not None
    ):
        return
    yield view.finding(
        "sizing.kv-too-large",
        position=captured[0].position,
        evidence=(
            Evidence("kv_pool", rest, "GiB", "log", view.facts["kv_cache_reserved_gib"].position),
            *quotes([*phrases, *captured]),
        ),
        explanation=(
            f"The memory profile gives all that is left, {rest:g} GiB, to the pool and has no line for graphs, which"
            " are captured after it: they come on top of the share. The report says that memory ran out during capture."
        ),
        do_now=("Lower --gpu-memory-utilization by what the graphs take, or start with --enforce-eager.",),
        change=("Upgrade: vLLM 0.21 and later keep an estimate for graphs out of the pool.",),
        wont_help=("More --swap-space: it is host memory.",),
        missing="the out-of-memory error itself, with its sums",
    )


PURPOSES_OF_SUGGESTIONS: Final = {
    "suggested_fit_requested_bytes": "to fit into the requested share",
    "suggested_use_all_bytes": "to use all of the device",
}


def graphs_above_the_share(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a report on missing memory with a profile whose pool left no room for graphs within the share.

    The sums alone are no problem: most devices have that room outside the share.
    """
    if not view.states("out_of_memory") or view.lines("out_of_memory"):
        return
    try:
        breakdown, _ = breakdown_of(view.facts.values())
    except NoBreakdown:
        return
    over, slack = over_requested(breakdown), rounding(breakdown)
    if over is None or breakdown.kv_cache is None or over <= slack or breakdown.graphs <= slack:
        return
    position = view.facts["memory_total_gib"].position
    fits, largest = fit_requested(breakdown).kv_cache_memory, use_all(breakdown).kv_cache_memory
    yield view.finding(
        "sizing.kv-too-large",
        position=position,
        evidence=(
            Evidence("graphs_actual", breakdown.graphs, "bytes", "log", position),
            Evidence("kv_pool", breakdown.kv_cache, "bytes", "log", position),
            Evidence("above_the_share", over, "bytes", "log", position),
            *_recomputed_suggestions(view, breakdown, position),
            *quotes(view.phrases("out_of_memory", "graphs")),
        ),
        explanation=(
            "The profile sized the pool before graphs were captured and left them out: they took"
            f" {breakdown.graphs / GIB_B:.2f} GiB, and the engine is {over / GIB_B:.2f} GiB above the"
            f" {breakdown.requested / GIB_B:.2f} GiB that it was to take. {_recomputed(view, breakdown)} With a share"
            " near 1 the same omission runs out of memory."
        ),
        do_now=(
            f"Start with --kv-cache-memory-bytes {fits}: the pool and the graphs then fit into the share, with"
            f" {HEADROOM >> 20} MiB to spare.",
            f"Graphs take {breakdown.graphs / GIB_B:.2f} GiB, {percent(breakdown.graphs / breakdown.device_total)} of"
            " the device: as a share, --gpu-memory-utilization"
            f" {(breakdown.requested - over) / breakdown.device_total:.4f} leaves room for them.",
            *planned_pool(view, fits, position),
        ),
        change=(
            f"At most --kv-cache-memory-bytes {largest} fits the device, if nothing else uses it.",
            "Upgrade: vLLM 0.21 and later keep an estimate for graphs out of the pool. Or start with --enforce-eager.",
        ),
        wont_help=("A higher --gpu-memory-utilization: the pool grows with it, and the graphs stay outside.",),
        missing="the out-of-memory error itself, with its sums, and what else used the device then",
    )


def _recomputed_suggestions(view: WrittenView, breakdown: MeasuredMemory, position: str) -> Iterator[Evidence]:
    """Both suggestions as printed and as the profile's own lines add up to."""
    computed = {
        "suggested_fit_requested_bytes": fit_requested(breakdown).kv_cache_memory,
        "suggested_use_all_bytes": use_all(breakdown).kv_cache_memory,
    }
    for name, value in computed.items():
        if (printed := view.number(name)) is not None:
            yield Evidence(name.removesuffix("_bytes"), round(printed), "bytes", "log", view.facts[name].position)
        yield Evidence(name.removesuffix("_bytes").replace("suggested", "computed"), value, "bytes", "log", position)


def _recomputed(view: WrittenView, breakdown: MeasuredMemory) -> str:
    """Name the suggestion that takes more than the share, or more than the device has free."""
    sentences = []
    for name, purpose in PURPOSES_OF_SUGGESTIONS.items():
        printed = view.number(name)
        if printed is None:
            continue
        whole = breakdown.without_kv + printed
        beyond_device, beyond_share = whole - breakdown.free_at_start, whole - breakdown.requested
        if beyond_device > rounding(breakdown):
            words = f"overcommits the device by {beyond_device / GIB_B:.2f} GiB"
        elif beyond_share > rounding(breakdown):
            words = (
                f"takes {beyond_share / GIB_B:.2f} GiB more than the share and leaves {-beyond_device / GIB_B:.2f} GiB"
                " of the device free"
            )
        else:
            words = f"adds up, {-beyond_share / GIB_B:.2f} GiB below the share"
        sentences.append(f"The suggestion {purpose} {words}.")
    return " ".join(sentences)
