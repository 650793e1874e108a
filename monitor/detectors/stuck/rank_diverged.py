"""stuck.rank-diverged: one data-parallel rank of a server stands still while others of it go on."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import listed
from ...ledger.engine_ledger import EngineLedger
from ..detector import FromSamples, Settings, StreamDetector
from ..judgement import ENGINE_PAUSED, Evidence, Judgement, Unless
from ..runbook_files import FindingFields
from .engine_stalled import NOTHING_MOVES, ranks_going_on, stall_of
from .step_expectation import AFTER_S, last_step_ns


class RankDiverged(StreamDetector[Judgement]):
    """A rank that stands still while others of its server go on.

    Sees: a stall as in stuck.engine-stalled, of one rank, while others launch steps well after it began.
    Confirmed when: the rank's own event stream confirms its stall.
    Likely when: the rank sends nothing, events were lost, or no earlier step was like this one.
    Not when: the ranks wait for one another in each step and all stop: that is stuck.engine-stalled, of each.
    """

    code = "stuck.rank-diverged"
    severity = "critical"
    title = "One rank of a data-parallel server has stopped"

    after_s = AFTER_S
    alternatives = (ENGINE_PAUSED, Unless("a slow but sound step", "the other ranks completed steps meanwhile"))
    causes = NOTHING_MOVES

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the stall of a rank beside others that go on."""
        stall = stall_of(ledger, settings) if ledger.siblings else None
        if stall is None:
            return
        if going_on := ranks_going_on(ledger, stall, settings):
            yield self.finding(ledger, **self._beside(ledger, stall, going_on))

    def _beside(self, ledger: EngineLedger, stall: FindingFields, going_on: list[EngineLedger]) -> FindingFields:
        _, _, rank = ledger.engine.rpartition("/")
        ranks = sorted(other.engine.rpartition("/")[2] for other in going_on)
        latest = max(going_on, key=last_step_ns)
        ahead_s, source = (last_step_ns(latest) - stall["since_ns"]) / 1e9, stall["evidence"][0].source
        stepped_at = latest.at(latest.state.places.launched)  # in the stream of that rank
        return {
            **stall,
            "evidence": (
                *stall["evidence"],
                Evidence("ranks_stepping", ", ".join(ranks), "", source, stepped_at),
                Evidence("other_ranks_stepping_s", round(ahead_s, 1), "s", source, stepped_at),
                Evidence("ranks_known", 1 + len(ledger.siblings), "ranks", source, stepped_at),
            ),
            "explanation": (
                f"Rank {rank} has stopped, while {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)} of the same"
                f" server {'keeps' if len(ranks) == 1 else 'keep'} running. {stall['explanation']}"
            ),
            "case": "",
        }


class RankDivergedFromSamples(FromSamples, RankDiverged):
    """A rank whose metrics stand still while others of its server go on.

    Sees: the values of one rank do not change from sample to sample while the steps of others count on.
    Likely when: for a minute, on a page that exposes all of them and whose server does not compute.
    Cannot tell: a value is not exposed, or the server computes.
    Not when: all ranks stop.
    """
