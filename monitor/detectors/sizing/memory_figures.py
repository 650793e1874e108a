"""The memory breakdown in bytes, from an event or from log lines. kvscope.monitor.ledger.memory_breakdown sums it."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...ledger.engine_ledger import EngineLedger
from ...ledger.memory_breakdown import (
    GIB_B,
    HEADROOM,
    NoBreakdown,
    breakdown_of,
    fit_requested,
    measured,
    parts,
    rounding,
)
from ..judgement import Evidence

MEBIBYTE: Final = 1 << 20
GRAPHS_ESTIMATE: Final = "memory_graphs_estimated_gib"


class MemoryFigures(NamedTuple):
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
    """The right value to advise, or None where it is unknown."""
    slack: int

    def evidence(self, **sizes: int) -> tuple[Evidence, ...]:
        """Return sizes in bytes, by their names, as evidence from there."""
        return tuple(Evidence(name, size, "bytes", self.source, self.position) for name, size in sizes.items())


def memory_figures(ledger: EngineLedger) -> MemoryFigures | None:
    """Return the breakdown from the stream where there is one, or else from the log. Return None where it is not
    complete.
    """
    return _of_event(ledger, measured(ledger.state.memory)) if ledger.has_stream else _figures_of_log(ledger)


def _of_event(ledger: EngineLedger, known: dict[str, int]) -> MemoryFigures | None:
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
    return MemoryFigures(
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


def _figures_of_log(ledger: EngineLedger) -> MemoryFigures | None:
    facts = ledger.facts
    if "memory_total_gib" not in facts:
        return None
    try:
        breakdown, _ = breakdown_of(facts.values())
    except NoBreakdown:
        return None
    advised = facts.get("suggested_fit_requested_bytes")
    estimate = facts.get(GRAPHS_ESTIMATE) if "memory_graphs_not_reserved" not in facts else None
    return MemoryFigures(
        "log",
        facts["memory_total_gib"].position,
        breakdown.device_total,
        parts(breakdown)["left free"] if breakdown.kv_cache is not None else breakdown.device_total,
        breakdown.kv_cache or 0,
        breakdown.graphs,
        round(float(estimate.value) * GIB_B) if estimate is not None else 0,
        int(advised.value) if advised is not None else None,
        fit_requested(breakdown).kv_cache_memory,
        rounding(breakdown),
    )


def size_text(size: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / GIB_B:.2f} GiB" if abs(size) >= GIB_B / 10 else f"{size / MEBIBYTE:.1f} MiB"
