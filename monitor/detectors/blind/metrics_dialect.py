"""Which engine's metrics a ledger has: shared by the codes about metrics pages."""

from __future__ import annotations

from kvscope.monitor.ledger.engine_ledger import EngineLedger


def metrics_dialect(ledger: EngineLedger) -> str:
    """Return vllm, sglang or kvscope."""
    fact = ledger.facts.get("exposition")
    return str(fact.value) if fact is not None else "vllm"


def has_metrics_page(ledger: EngineLedger) -> bool:
    """Return whether a metrics page, or Prometheus, is all that there is."""
    return not ledger.has_stream and bool(ledger.samples) and ledger.samples[-1].source != "log"
