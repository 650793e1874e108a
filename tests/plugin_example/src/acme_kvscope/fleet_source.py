"""A source for acme://HOST: what Acme's own agent would report of an engine there."""

from __future__ import annotations

import time

from kvscope.monitor.contract.samples import Record, Sample
from kvscope.monitor.sources.source import Source, SourceOptions, SourceStatus

EVERY_S = 0.2


class FleetSource(Source):
    """Brings a sample of one engine, which keeps blocks though nothing runs."""

    def __init__(self, target: str, options: SourceOptions) -> None:
        self.target = target
        self.engine = f"acme@{target.removeprefix('acme://')}/0"
        self.records = 0

    def poll(self, timeout_s: float = 0.1) -> list[Record]:
        """Return the engine's figures now."""
        time.sleep(EVERY_S)
        self.records += 1
        return [
            Sample(
                self.engine, f"poll {self.records}", time.time_ns(), running=0, waiting=0, usage=0.4, source="metrics"
            )
        ]

    def status(self) -> SourceStatus:
        """Report how it is."""
        return SourceStatus(target=self.target, kind="acme", engines=(self.engine,), in_step=self.records > 0)
