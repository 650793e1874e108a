"""A memory breakdown of which the text states only a part: what follows from it, and bounds for what is missing.

    requested = device * share
    requested = weights + activations + non-torch (+ graphs, where the release counts them) + KV cache

Printed sizes are rounded to 0.01 GiB, so each is an interval. The two equations narrow the intervals of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from kvscope.monitor.analysis.memory_breakdown import GIB_B, ROUNDED_TO
from kvscope.monitor.events.samples import Fact

TermState = Literal["stated", "follows", "missing"]
TERM_FACTS: Final[dict[str, tuple[str, ...]]] = {
    "device": ("memory_total_gib",),
    "requested": ("memory_requested_gib",),
    "free at the start": ("memory_free_gib",),
    "weights": ("memory_weights_gib", "model_loading_gib"),
    "weights and non-torch": ("memory_consumed_gib",),
    "peak activations": ("memory_activations_gib",),
    "non-torch": ("memory_non_torch_gib",),
    "graphs": ("memory_graphs_gib", "graph_capture_gib", "memory_graphs_estimated_gib"),
    "KV cache": (
        "kv_cache_in_use_bytes",
        "kv_cache_in_use_gib",
        "available_kv_cache_gib",
        "kv_cache_reserved_gib",
        "kv_cache_memory_bytes",
    ),
}
"""The facts of a log that state each term, the most exact first."""
SETS_THE_POOL: Final = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""With either of these the pool is not what the share leaves."""
ROUNDS: Final = 6
"""Both equations settle in fewer."""
NARROW: Final = round(0.08 * GIB_B)
"""An interval this narrow follows: the widest that rounding alone makes is 0.06 GiB."""


class MemoryTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A term of the breakdown, in bytes. `high` is null where nothing bounds it from above."""

    name: str
    state: TermState
    low: int
    high: int | None


class _Bounds:
    """An interval that only becomes narrower."""

    def __init__(self, low: float = 0, high: float = float("inf")) -> None:
        self.low, self.high = low, high

    def narrow(self, low: float, high: float) -> None:
        low, high = max(self.low, low), min(self.high, high)
        if low <= high:  # figures that contradict each other narrow nothing
            self.low, self.high = low, high


def breakdown_terms(facts: Iterable[Fact], are_graphs_counted: bool) -> list[MemoryTerm]:
    """Return every term: stated, following from the others, or missing with its bounds. Empty if none is stated."""
    values = {fact.name: fact.value for fact in facts}
    stated = {name: bounds for name, sources in TERM_FACTS.items() if (bounds := _stated(values, sources)) is not None}
    if not stated:
        return []
    terms = {name: stated.get(name, _Bounds()) for name in TERM_FACTS}
    members = _members(stated, are_graphs_counted)
    share = values.get("memory_requested_share", values.get("gpu_memory_utilization"))
    pool_is_set = any(name in values for name in SETS_THE_POOL)
    for _ in range(ROUNDS):
        if isinstance(share, int | float) and 0 < share <= 1:
            _product(terms["requested"], terms["device"], float(share))
        terms["requested"].narrow(0, terms["device"].high)
        terms["free at the start"].narrow(0, terms["device"].high)
        if not pool_is_set:
            _sum(terms["requested"], [terms[name] for name in members])
        if not are_graphs_counted:  # they are captured on top of the share, and fitted if the engine started
            terms["graphs"].narrow(0, terms["device"].high - terms["requested"].low)
    shown = [name for name in TERM_FACTS if name in members or name in ("device", "requested", "free at the start")]
    shown += [name for name in TERM_FACTS if name not in shown and name in {"graphs", *stated}]
    return [_term(name, terms[name], name in stated) for name in shown]


def stated_bytes(facts: Mapping[str, Fact], term: str) -> int | None:
    """Return what the text states for the term, in bytes, or None if it does not."""
    bounds = _stated({name: fact.value for name, fact in facts.items()}, TERM_FACTS[term])
    return None if bounds is None else round((bounds.low + bounds.high) / 2)


def _members(stated: Mapping[str, _Bounds], are_graphs_counted: bool) -> list[str]:
    """Return the terms whose sum is the requested memory."""
    resident = ["weights and non-torch"] if "weights and non-torch" in stated else ["weights", "non-torch"]
    return [*resident, "peak activations", *(["graphs"] if are_graphs_counted else []), "KV cache"]


def _stated(values: Mapping[str, object], sources: tuple[str, ...]) -> _Bounds | None:
    for name in sources:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name.endswith("_bytes"):
            return _Bounds(value, value)
        half = ROUNDED_TO / 2 * GIB_B
        return _Bounds(max(0.0, value * GIB_B - half), value * GIB_B + half) if value >= 0 else None
    return None


def _product(requested: _Bounds, device: _Bounds, share: float) -> None:
    requested.narrow(device.low * share, device.high * share)
    device.narrow(requested.low / share, requested.high / share)


def _sum(total: _Bounds, members: list[_Bounds]) -> None:
    total.narrow(sum(one.low for one in members), sum(one.high for one in members))
    for one in members:
        others = [other for other in members if other is not one]
        one.narrow(total.low - sum(other.high for other in others), total.high - sum(other.low for other in others))


def _term(name: str, bounds: _Bounds, is_stated: bool) -> MemoryTerm:
    high = None if bounds.high == float("inf") else round(bounds.high)
    is_narrow = high is not None and high - bounds.low <= NARROW
    state: TermState = "stated" if is_stated else "follows" if is_narrow else "missing"
    return MemoryTerm(name=name, state=state, low=round(bounds.low), high=high)
