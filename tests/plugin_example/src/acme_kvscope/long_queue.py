"""acme.long-queue: more requests wait than Acme's service level allows."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from kvscope import Detector, EngineLedger, Evidence, Judgement, Settings, Threshold


class LongQueue(Detector[Judgement]):
    """Queues that are longer than the service level allows."""

    code = "acme.long-queue"
    severity = "warning"
    title = "More requests wait than the service level allows"
    requires = ("stream", "metrics", "log")
    runbook = files("acme_kvscope") / "acme.long-queue.md"

    max_waiting = Threshold(50, "requests", "Acme's service level: the fifty-first request waits for over a minute")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield one judgement while the queue is too long."""
        if ledger.has_stream:
            waiting = sum(record.is_waiting for record in ledger.state.requests.values())
            source, position = "stream", ledger.at(ledger.state.places.moved)
        elif ledger.samples and ledger.samples[-1].waiting is not None:
            last = ledger.samples[-1]
            waiting, source, position = ledger.samples[-1].waiting, last.source, last.position
        else:
            return
        most = settings(self.max_waiting)
        if waiting <= most:
            return
        yield self.finding(
            ledger,
            position=position,
            evidence=(Evidence("requests_waiting", waiting, "requests", source, position),),
            explanation=f"{waiting} requests wait, and the service level allows {most:g}.",
        )
