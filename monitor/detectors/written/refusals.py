"""Failed starts, and devices that ran out of memory, according to the engine's own lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, TextJudgement
from kvscope.monitor.detectors.thresholds import Threshold
from kvscope.monitor.detectors.written.planned_settings import remedies_of
from kvscope.monitor.detectors.written.written_view import WrittenView, number_of, quotes
from kvscope.monitor.events.samples import ReportedEvent

REFUSAL_LINES: Final = ("refused_for_length", "refused_without_pool", "refused_for_other_processes")
MOST_ELSEWHERE: Final = Threshold(
    0.1, "of the device", "what a CUDA context and a display take beside the engine is less"
)
"""A threshold of sizing.other-process."""

LEAST_WORKERS: Final = 2
"""Not a threshold: a single worker has no other to differ from."""
MUCH_LARGER: Final = Threshold(
    1.5, "times", "pipeline stages differ by a layer or an embedding, devices of another size by more"
)
"""A threshold of sizing.smallest-worker."""


def refused_start(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a start that the engine refused, naming the shortage of one request or of the pool."""
    lines = view.lines(*REFUSAL_LINES)
    if not lines or view.samples:
        return
    exact = next((line for line in lines if _lacks(line)), None)
    line = exact or lines[0]
    yield TextJudgement(
        code="sizing.refused-start",
        engine=view.engine,
        verdict="confirmed" if exact is not None else "likely",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(*_printed_numbers(line), *quotes(lines)),
        explanation=_why_refused(line),
        do_now=remedies_of(view, line),
        change=(
            "Leave more memory for the pool: a higher --gpu-memory-utilization (SGLang: --mem-fraction-static), a"
            " lower --max-num-batched-tokens, weights or KV in 8 bits, or more devices.",
        ),
        wont_help=("Restarting with the same arguments: the sums stay the same.",),
        missing="" if exact is not None else "the memory profile above the error: what weights and activations took",
    )


def _lacks(line: ReportedEvent) -> bool:
    """Whether its own two numbers show that it cannot start."""
    needed, available = number_of(line, "needed_gib"), number_of(line, "available_gib")
    length, pool = number_of(line, "max_len"), number_of(line, "pool_tokens")
    free, desired = number_of(line, "free_gib"), number_of(line, "desired_gib")
    below_zero = (number_of(line, "pool_gib") or 0) < 0 or (
        "pool_blocks" in line.fields and (number_of(line, "pool_blocks") or 0) <= 0
    )
    return (
        below_zero
        or (needed is not None and available is not None and needed > available)
        or (length is not None and pool is not None and length > pool)
        or (free is not None and desired is not None and free < desired)
    )


def _why_refused(line: ReportedEvent) -> str:
    needed, available = number_of(line, "needed_gib"), number_of(line, "available_gib")
    length, pool = number_of(line, "max_len"), number_of(line, "pool_tokens")
    if needed is not None and available is not None:
        return (
            f"The engine refused to start: one request of {length or 0:,.0f} tokens needs {needed:g} GiB of KV"
            f" cache and"
            f" the pool has {available:g} GiB, {needed - available:.2f} GiB too little. The numbers are the"
            f" engine's own."
        )
    if pool is not None and length is not None:
        return (
            f"The engine refused to start: a request may have {length:,.0f} tokens and the pool holds {pool:,.0f}."
            " The numbers are the engine's own."
        )
    if (desired := number_of(line, "desired_gib")) is not None:
        return (
            f"The engine refused to start: it needed {desired:g} GiB of the device and"
            f" {number_of(line, 'free_gib'):g} GiB were free. Another process holds the rest."
        )
    return (
        "The engine refused to start: weights, activations and other device memory leave nothing for the KV pool"
        " within its share."
    )


def _printed_numbers(line: ReportedEvent) -> tuple[Evidence, ...]:
    units = {"gib": "GiB", "len": "tokens", "tokens": "tokens", "blocks": "blocks"}
    return tuple(
        Evidence(name, value, units.get(name.rpartition("_")[2], ""), "log", line.position)
        for name, value in line.fields.items()
        if not isinstance(value, str)
    )


def other_process(view: WrittenView) -> Iterator[TextJudgement]:
    """Less of the device was free than the engine's share, or an out-of-memory error counts others."""
    refused = view.lines("refused_for_other_processes", "profile_disturbed")
    crowded = [line for line in view.lines("out_of_memory") if _held_by_others(line) > view.settings(MOST_ELSEWHERE)]
    lines = refused or crowded
    if not lines:
        return
    line = lines[0]
    held = _held_by_others(line)
    yield TextJudgement(
        code="sizing.other-process",
        engine=view.engine,
        verdict="likely",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(*_printed_numbers(line), *quotes(lines)),
        explanation=(
            f"Other processes hold {100 * held:.0f} % of the device, by the sums of the error."
            if crowded and not refused
            else "Another process holds device memory that the engine needs: less was free than its share, or free"
            " memory changed while the engine measured."
        ),
        do_now=("List the processes on the device: nvidia-smi --query-compute-apps=pid,used_memory --format=csv.",),
        change=(
            "End the other process, give the engine a device of its own, or lower --gpu-memory-utilization to what"
            " is left. A share refers to the whole device, including the memory of other processes.",
        ),
        wont_help=("A shorter --max-model-len: the memory is missing before the pool is sized.",),
        missing="which process holds it: nvidia-smi at that time. An engine that did not exit looks the same",
    )


def _held_by_others(line: ReportedEvent) -> float:
    """Return the share of the device that is neither free nor this process's, if the error has the numbers."""
    total, free = number_of(line, "total_gib"), number_of(line, "free_gib")
    own = number_of(line, "this_process_gib") or (
        number_of(line, "in_use_gib") if line.fields.get("processes") == 1 else None
    )
    if not total or free is None or own is None:
        return 0.0
    return max(0.0, (total - free - own) / total)


def smallest_worker(view: WrittenView) -> Iterator[TextJudgement]:
    """Workers that print pools of very different sizes: the smallest is everyone's."""
    lines = [line for line in view.lines("worker_pool") if (number_of(line, "pool_gib") or 0) > 0]
    sizes = [number_of(line, "pool_gib") or 0.0 for line in lines]
    if len(sizes) < LEAST_WORKERS or max(sizes) < view.settings(MUCH_LARGER) * min(sizes) or view.lines("start_up")[2:]:
        return
    yield TextJudgement(
        code="sizing.smallest-worker",
        engine=view.engine,
        verdict="likely",
        position=lines[sizes.index(min(sizes))].position,
        evidence=(
            Evidence("smallest_pool", min(sizes), "GiB", "log", lines[sizes.index(min(sizes))].position),
            Evidence("largest_pool", max(sizes), "GiB", "log", lines[sizes.index(max(sizes))].position),
            *quotes(lines),
        ),
        explanation=(
            f"Workers have room for pools from {min(sizes):g} to {max(sizes):g} GiB, and all get the smallest:"
            f" each keeps"
            f" the same number of blocks. {max(sizes) - min(sizes):.2f} GiB of the roomiest device stay unused."
            f" Lines of two"
            " starts in one text look the same."
        ),
        do_now=("Find what takes the memory of the smallest worker: nvidia-smi on that device.",),
        change=("Use devices of one size, or give the smallest fewer layers (VLLM_PP_LAYER_PARTITION).",),
        wont_help=("A higher --gpu-memory-utilization, once the smallest device is full.",),
        missing="the worker of each line, if the text does not show it",
    )


def ran_out_of_memory(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield an out-of-memory error, by the phase of the engine: loading, profiling, capturing graphs or serving."""
    lines = view.lines("out_of_memory")
    if not lines or any(_held_by_others(line) > view.settings(MOST_ELSEWHERE) for line in lines):
        return
    code, sure, why = _phase_of_failure(view, lines)
    line = lines[0]
    after_pool = code == "sizing.kv-too-large"
    yield TextJudgement(
        code=code,
        engine=view.engine,
        verdict="likely" if sure else "cannot-tell",
        since_ns=line.at_ns or 0,
        position=line.position,
        evidence=(*_printed_numbers(line), *quotes(lines)),
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
    yield TextJudgement(
        code="sizing.kv-too-large",
        engine=view.engine,
        verdict="likely",
        position=captured[0].position,
        evidence=(
            Evidence("kv_pool", rest, "GiB", "log", view.facts["kv_cache_reserved_gib"].position),
            *quotes([*phrases, *captured]),
        ),
        explanation=(
            f"The memory profile gives all that is left, {rest:g} GiB, to the pool and has no line for graphs, which"
            " are captured after it: they come on top of the share. The report says that memory ran out during"
            " capture."
        ),
        do_now=("Lower --gpu-memory-utilization by what the graphs take, or start with --enforce-eager.",),
        change=("Upgrade: vLLM 0.21 and later keep an estimate for graphs out of the pool.",),
        wont_help=("More --swap-space: it is host memory.",),
        missing="the out-of-memory error itself, with its sums",
    )
