"""held.pool-reserved: memory that is the pool, taken at the start by design."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...base.text import percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.memory_breakdown import GIB_B, NoBreakdown, breakdown_of, measured
from ..detector import FromLog, Settings, StreamDetector, Threshold
from ..judgement import Evidence, Judgement


class ReservedPool(NamedTuple):
    """The pool's part of the memory breakdown, in bytes, and where it was read."""

    kv_pool: int
    device_total: int
    source: str
    position: str


def _pool_of_stream(ledger: EngineLedger) -> ReservedPool | None:
    known = measured(ledger.state.memory)
    if not known.get("device_total") or "kv_pool" not in known:
        return None
    return ReservedPool(known["kv_pool"], known["device_total"], "stream", ledger.at(ledger.state.places.memory))


def _pool_of_log(ledger: EngineLedger) -> ReservedPool | None:
    try:
        breakdown, _ = breakdown_of(ledger.facts.values())
    except NoBreakdown:
        return None
    if breakdown.kv_cache is None or not breakdown.device_total:
        return None
    return ReservedPool(breakdown.kv_cache, breakdown.device_total, "log", ledger.facts["memory_total_gib"].position)


class PoolReserved(StreamDetector[Judgement]):
    """Device memory that the pool took at the start.

    Sees: a pool that is a quarter of the device or more.
    Confirmed when: the engine's event has both.
    Not when: it is larger than the device.
    """

    code = "held.pool-reserved"
    severity = "info"
    title = "The memory is the KV pool, allocated at startup by design"

    min_share = Threshold(0.25, "of the device", "a smaller pool is not where most of the device's memory went")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the pool's share of the device."""
        breakdown = _pool_of_stream(ledger) if ledger.has_stream else _pool_of_log(ledger)
        share = breakdown.kv_pool / breakdown.device_total if breakdown is not None else 0.0
        if breakdown is None or not settings(self.min_share) <= share <= 1:
            return
        yield self.finding(
            ledger,
            position=breakdown.position,
            evidence=(
                Evidence("kv_pool", breakdown.kv_pool, "bytes", breakdown.source, breakdown.position),
                Evidence("device_total", breakdown.device_total, "bytes", breakdown.source, breakdown.position),
                Evidence("share_of_device", round(share, 4), "of the device", breakdown.source, breakdown.position),
            ),
            explanation=(
                f"The KV pool is {breakdown.kv_pool / GIB_B:.2f} GiB, {percent(share)} of the device. The engine"
                " allocates it once at startup and never returns it, so the process uses as much device memory idle as"
                " under load. KV cache usage is a different figure: the share of the pool in use."
            ),
        )


class PoolReservedFromLog(FromLog, PoolReserved):
    """Device memory that the pool took, by the engine's log.

    Sees: the same in the memory breakdown of a log.
    Confirmed when: the breakdown has both.
    Not when: it is larger than the device.
    """
