"""The ledgers of all engines, by name."""

from __future__ import annotations

from kvscope.monitor.events.samples import Record
from kvscope.monitor.ledger.engine_ledger import EngineLedger


class Fleet:
    """The ledgers of all engines, by name."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineLedger] = {}

    def apply(self, record: Record) -> EngineLedger:
        """Fold a record into the ledger of the engine it names, which it returns."""
        ledger = self.engines.get(record.engine)
        if ledger is None:
            ledger = self.engines[record.engine] = EngineLedger(record.engine)
        ledger.apply(record)
        return ledger

    def siblings(self, ledger: EngineLedger) -> list[EngineLedger]:
        """Return the other data-parallel ranks of its server: NAME@HOST:PORT is the same."""
        server, rank, _ = ledger.engine.rpartition("/")
        others = (other for other in self.engines.values() if rank and other is not ledger)
        return [other for other in others if other.engine.rpartition("/")[0] == server]
