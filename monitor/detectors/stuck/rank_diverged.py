"""stuck.rank-diverged: one data-parallel rank of a server stands still while others of it go on.

One ledger shows the same as in stuck.engine-stalled. Only the ledgers beside it separate the two. Where the ranks wait
for one another in each step, all of them stop with the first: that stays stuck.engine-stalled, of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.engine_stalled import STALLED_DO_NOW, EngineStalled
from kvscope.monitor.detectors.stuck.rank_steps import AFTER_S, last_step_ns
from kvscope.monitor.detectors.stuck.stall_effects import NOTHING_MOVES
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import listed

DIVERGED_CHANGE: Final = (
    "Let the load balancer check the progress of each rank (kvscope's /metrics has a series for each): the server's"
    " /health covers only the front end, and the tokens of other ranks hide the one that stopped.",
    "vLLM: upgrade to a release that wakes a rank left behind by others (PR #39366, #45223).",
)


DIVERGED_WONT_HELP: Final = (
    "Aborting its requests, or sending it fewer: it starts no step for later requests either.",
    "Watching the server's totals of tokens or running requests: the other ranks keep them moving.",
)


class RankDiverged(Detector[Judgement]):
    """A rank that stands still while others of its server go on."""

    code = "stuck.rank-diverged"
    severity = "critical"
    title = "One rank of a data-parallel server has stopped"
    requires = ("stream", "metrics", "log")
    position = 297

    after_s = AFTER_S

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield nothing: a rank by itself cannot diverge."""
        return iter(())

    def detect_rank(
        self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
    ) -> Iterator[Judgement]:
        """Yield the stall of a rank beside others that go on."""
        stalls = EngineStalled()
        for stall in stalls.detect(ledger, settings):
            going_on = stalls.ranks_going_on(stall, siblings, settings)
            if going_on:
                yield self._beside(stall, going_on, len(siblings))

    def _beside(self, stall: Judgement, going_on: list[EngineLedger], siblings: int) -> Judgement:
        _, _, rank = stall.engine.rpartition("/")
        ranks = sorted(other.engine.rpartition("/")[2] for other in going_on)
        latest = max(going_on, key=last_step_ns)
        last_ns, source = last_step_ns(latest), stall.evidence[0].source
        stepped_at = latest.at(latest.state.places.launched)  # in the stream of that rank
        return msgspec.structs.replace(
            stall,
            code=self.code,
            evidence=(
                *stall.evidence,
                Evidence("ranks_stepping", ", ".join(ranks), "", source, stepped_at),
                Evidence("other_ranks_stepping_s", round((last_ns - stall.since_ns) / 1e9, 1), "s", source, stepped_at),
                Evidence("ranks_known", 1 + siblings, "ranks", source, stepped_at),
            ),
            explanation=(
                f"Rank {rank} has stopped, while {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)} of the"
                f" same server {'keeps' if len(ranks) == 1 else 'keep'} running. {stall.explanation}"
            ),
            do_now=STALLED_DO_NOW,
            change=DIVERGED_CHANGE,
            wont_help=DIVERGED_WONT_HELP,
        )

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return NOTHING_MOVES
