"""Memory profiles that leave something out, computed again from their own lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.analysis.memory_breakdown import (
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
from kvscope.monitor.detectors.judgement import Evidence, TextJudgement
from kvscope.monitor.detectors.written.planned_settings import planned_pool
from kvscope.monitor.detectors.written.written_view import WrittenView, quotes
from kvscope.monitor.text import percent

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
    yield TextJudgement(
        code="sizing.kv-too-large",
        engine=view.engine,
        verdict="likely",
        position=position,
        evidence=(
            Evidence("graphs_actual", breakdown.graphs, "bytes", "log", position),
            Evidence("kv_pool", breakdown.kv_cache, "bytes", "log", position),
            Evidence("above_the_share", over, "bytes", "log", position),
            *_recomputed_suggestions(view, breakdown, position),
            *quotes(view.phrases("out_of_memory", "graphs")),
        ),
        explanation=(
            f"The profile sized the pool before graphs were captured and left them out: they took"
            f" {breakdown.graphs / GIB_B:.2f} GiB, and the engine is {over / GIB_B:.2f} GiB above the"
            f" {breakdown.requested / GIB_B:.2f} GiB that it was to take. {_recomputed(view, breakdown)} With a"
            " share near 1 the same omission runs out of memory."
        ),
        do_now=(
            f"Start with --kv-cache-memory-bytes {fits}: the pool and the graphs then fit into the share, with"
            f" {HEADROOM >> 20} MiB to spare.",
            f"Graphs take {breakdown.graphs / GIB_B:.2f} GiB,"
            f" {percent(breakdown.graphs / breakdown.device_total)} of the device: as a share, --gpu-memory-utilization"
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
