"""The memory bill: what a device's memory went to, and what that leaves for KV.

The engine prints sums of its own. This module computes them again from its numbers alone, which reveals wrong advice:
vLLM 0.27 to 0.33 subtract the memory of graphs twice (https://github.com/vllm-project/vllm/issues/57936).

    fit_requested = requested           - weights - activations - non-torch - graphs - headroom
    use_all       = free at the start   - weights - activations - non-torch - graphs - headroom

A suggestion is never negative: where nothing is left it is 0, and `short_by` is the missing amount.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events.kinds import SCHEMA, Kind
from kvscope.monitor.events.samples import Fact

GIB_B: Final = 1 << 30
HEADROOM: Final = 150 << 20
"""Kept free in both suggestions, as vLLM keeps it."""
ROUNDED_TO: Final = 0.01
"""GiB: what a log's figures are rounded to."""
BILL: Final = {
    "memory_total_gib": "Free memory on device (…/… GiB) on startup",
    "memory_free_gib": "Free memory on device (…/… GiB) on startup",
    "memory_requested_gib": "Desired GPU memory utilization is (…, … GiB)",
    "memory_weights_gib": "Actual usage is … GiB for weight (or: for consumed memory)",
    "memory_activations_gib": "… GiB for peak activation",
    "memory_graphs_gib": "… GiB for CUDAGraph memory",
}
"""The facts that there must be for a bill, and the words of the log that have them."""

GRAPH_ESTIMATE: Final = ("memory_graphs_estimated_gib", "memory_graphs_are_reserved")
"""Facts of a breakdown that stand on lines of their own."""
BY_TORCH: Final = ("weights", "activations_peak", "graphs_actual", "kv_pool")
"""The terms of a MEMORY event that add up to torch's memory, where its allocator does not report it."""


class NoBreakdown(KvscopeError):
    """The log has no bill, or not all of it. `missing`: the words that were looked for and not found."""

    def __init__(self, missing: Sequence[str]) -> None:
        super().__init__("; ".join(missing))
        self.missing = list(missing)


class MeasuredMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `non_torch` is None where the engine counts it with the weights, `kv_cache` where it does not report
    it.
    """

    device_total: int
    free_at_start: int
    requested: int
    weights: int
    activations: int
    non_torch: int | None
    graphs: int
    kv_cache: int | None

    @property
    def without_kv(self) -> int:
        """The engine's need besides KV, with graphs counted once."""
        return self.weights + self.activations + (self.non_torch or 0) + self.graphs


class Suggestion(msgspec.Struct, frozen=True):
    """A `--kv-cache-memory` in bytes, and by how many bytes it is missed if there is none."""

    kv_cache_memory: int
    short_by: int


def fit_requested(breakdown: MeasuredMemory) -> Suggestion:
    """KV that keeps the engine within the share it was given."""
    return _suggest(breakdown.requested, breakdown)


def use_all(breakdown: MeasuredMemory) -> Suggestion:
    """KV that takes all that was free on the device before the engine came."""
    return _suggest(breakdown.free_at_start, breakdown)


def _suggest(within: int, breakdown: MeasuredMemory) -> Suggestion:
    left = within - breakdown.without_kv - HEADROOM
    return Suggestion(max(left, 0), max(-left, 0))


def parts(breakdown: MeasuredMemory) -> dict[str, int]:
    """Return the device's memory by use. The parts add up to its total. The unexplained rest is `left free`.

    `left free` below 0 is the one figure here that can be: the engine took more than the device had at its start.
    """
    sizes = {
        "in use before": breakdown.device_total - breakdown.free_at_start,
        "weights" if breakdown.non_torch is not None else "weights and non-torch": breakdown.weights,
        "peak activations": breakdown.activations,
        **({"non-torch": breakdown.non_torch} if breakdown.non_torch is not None else {}),
        "graphs": breakdown.graphs,
        **({"KV cache": breakdown.kv_cache} if breakdown.kv_cache is not None else {}),
    }
    rest = "left free" if breakdown.kv_cache is not None else "KV cache and left free"
    return sizes | {rest: breakdown.device_total - sum(sizes.values())}


def over_requested(breakdown: MeasuredMemory) -> int | None:
    """Return the bytes by which the engine with its KV exceeds the share it was given, or a negative number within it.
    None if it was not reported.
    """
    return None if breakdown.kv_cache is None else breakdown.without_kv + breakdown.kv_cache - breakdown.requested


def rounding(breakdown: MeasuredMemory) -> int:
    """Bytes by which a suggestion may be off because the figures were printed rounded: half a step for each."""
    figures = 4 + (breakdown.non_torch is not None)
    return round(figures * ROUNDED_TO / 2 * GIB_B)


def breakdown_of(facts: Iterable[Fact]) -> tuple[MeasuredMemory, list[str]]:
    """Return the last breakdown among a log's facts, with notes on how to read it. Raises NoBill."""
    printed = list(facts)
    line = next((fact.position for fact in reversed(printed) if fact.name == "memory_total_gib"), "")
    figures = {fact.name: fact.value for fact in printed if fact.position == line or fact.name in GRAPH_ESTIMATE}
    sized = {name: round(float(value) * GIB_B) for name, value in figures.items() if name.endswith("_gib")}
    together = "memory_consumed_gib" in sized
    missing = [words for name, words in BILL.items() if name not in sized and not (together and "weights" in name)]
    if not together and "memory_weights_gib" in sized and "memory_non_torch_gib" not in sized:
        missing.append("… GiB for non-torch memory")
    if missing:
        raise NoBreakdown(list(dict.fromkeys(missing)))
    activations, notes = _without_graphs(sized, figures, together)
    in_use = figures.get("kv_cache_in_use_bytes")
    breakdown = MeasuredMemory(
        device_total=sized["memory_total_gib"],
        free_at_start=sized["memory_free_gib"],
        requested=sized["memory_requested_gib"],
        weights=sized["memory_consumed_gib" if together else "memory_weights_gib"],
        activations=activations,
        non_torch=None if together else sized["memory_non_torch_gib"],
        graphs=max(sized["memory_graphs_gib"], 0),
        kv_cache=int(in_use) if in_use is not None else sized.get("kv_cache_in_use_gib"),
    )
    lines = len({fact.position for fact in printed if fact.name == "memory_total_gib"})
    if lines > 1:
        notes.append(f"the log has {lines} memory breakdowns, from several workers or starts. This is the last")
    return breakdown, notes


def _without_graphs(sized: Mapping[str, int], figures: Mapping[str, object], together: bool) -> tuple[int, list[str]]:
    """Return the peak of activations alone, with notes. Since 0.27 vLLM prints it with its estimate of the graphs, if
    it made one.
    """
    peak, estimate = sized["memory_activations_gib"], sized.get("memory_graphs_estimated_gib")
    reserved = "memory_graphs_are_reserved" in figures
    if together and reserved and estimate is not None and estimate <= peak:
        return peak - estimate, [
            f"the printed peak of activations holds the estimate of the graphs, {estimate / GIB_B:.2f} GiB, which is"
            " taken out of it here, so that graphs count once"
        ]
    if together and estimate is None and sized["memory_graphs_gib"] > 0:
        return peak, [
            "the printed peak of activations may hold an estimate of the graphs, which would then count twice: the log"
            ' lacks "Estimated CUDA graph memory: … GiB total", which would show it'
        ]
    return peak, []


def measured(figures: Sequence[int]) -> dict[str, int]:
    """Return the known numbers of a MEMORY event by name, and `elsewhere` if the device's own are known.

    elsewhere: bytes in use on the device that the bill does not name: another process, or what was never counted.
    """
    known = {name: value for name, value in zip(SCHEMA[Kind.MEMORY].args, figures, strict=False) if value >= 0}
    if "device_total" not in known or "device_free" not in known:
        return known
    by_torch = known.get("allocator_reserved", sum(known.get(name, 0) for name in BY_TORCH))
    in_use = known["device_total"] - known["device_free"]
    return known | {"elsewhere": max(in_use - by_torch - known.get("non_torch", 0), 0)}


def unnamed(known: Mapping[str, int]) -> int | None:
    """Bytes that no line of a MEMORY event's bill accounts for: `elsewhere`, and what torch has handed out beyond the
    bill's parts. None where the bill, or the device's figure, is not whole.
    """
    if "elsewhere" not in known or any(known.get(name, -1) < 0 for name in ("weights", "activations_peak", "kv_pool")):
        return None
    within = known.get("allocator_allocated", 0) - sum(known.get(name, 0) for name in BY_TORCH)
    return known["elsewhere"] + max(within, 0)
