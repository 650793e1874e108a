"""stuck.rank-diverged: one data-parallel rank of a server stands still while others of it go on.

One ledger shows the same as in stuck.engine-stalled. Only the ledgers beside it separate the two. Where the ranks wait
for one another in each step, all of them stop with the first: that stays stuck.engine-stalled, of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ...base.text import listed
from ...ledger.engine_ledger import EngineLedger
from ..detector import Detector, Settings
from ..harm import verdict_of
from ..judgement import ENGINE_PAUSED, Evidence, Judgement, Unless
from ..runbook_files import runbook_advice
from .engine_stalled import NOTHING_MOVES, EngineStalled
from .step_expectation import AFTER_S, last_step_ns


class RankDiverged(Detector[Judgement]):
    """A rank that stands still while others of its server go on."""

    code = "stuck.rank-diverged"
    severity = "critical"
    title = "One rank of a data-parallel server has stopped"
    requires = ("stream", "metrics", "log")

    after_s = AFTER_S
    alternatives = (ENGINE_PAUSED, Unless("a slow but sound step", "the other ranks completed steps meanwhile"))
    causes = NOTHING_MOVES

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the stall of a rank beside others that go on."""
        stalls = EngineStalled()
        for stall in stalls.stalls(ledger, settings):
            going_on = stalls.ranks_going_on(stall, ledger, settings)
            if going_on:
                beside = self._beside(stall, going_on, len(ledger.siblings))
                yield verdict_of(ledger, beside, self.severity, self.alternatives)

    def _beside(self, stall: Judgement, going_on: list[EngineLedger], siblings: int) -> Judgement:
        _, _, rank = stall.engine.rpartition("/")
        ranks = sorted(other.engine.rpartition("/")[2] for other in going_on)
        latest = max(going_on, key=last_step_ns)
        last_ns, source = last_step_ns(latest), stall.evidence[0].source
        stepped_at = latest.at(latest.state.places.launched)  # in the stream of that rank
        return msgspec.structs.replace(
            stall,
            code=self.code,
            alternatives=(),
            evidence=(
                *stall.evidence,
                Evidence("ranks_stepping", ", ".join(ranks), "", source, stepped_at),
                Evidence("other_ranks_stepping_s", round((last_ns - stall.since_ns) / 1e9, 1), "s", source, stepped_at),
                Evidence("ranks_known", 1 + siblings, "ranks", source, stepped_at),
            ),
            explanation=(
                f"Rank {rank} has stopped, while {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)} of the same"
                f" server {'keeps' if len(ranks) == 1 else 'keep'} running. {stall.explanation}"
            ),
            **runbook_advice(self.code),
        )
