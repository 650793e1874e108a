"""stuck.outer-tier: the engine waits for memory of an outer tier."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ...ledger.engine_ledger import EngineLedger
from ..counted_events import counted_events
from ..detector import FromSamples, Settings
from ..judgement import Evidence, Judgement, TextJudgement
from ..written.lost_blocks import HELD_LINES
from ..written.written_view import TextDetector, WrittenView, quotes


class OuterTier(TextDetector):
    """An outer tier whose buffer is full.

    Sees: lines of allocations that failed in an outer tier, again and again.
    Likely when: a person reports requests that are stuck, unserved or slow.
    Cannot tell: the lines are all there is.
    """

    code = "stuck.outer-tier"
    severity = "error"
    title = "An outer tier has no memory for the engine's KV"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Allocations in an outer tier fail, again and again."""
        lines = view.lines("tier_allocation_failed")
        if len(lines) < HELD_LINES:
            return
        yield view.finding(
            self.code,
            lines[0],
            verdict="likely" if view.states("stuck", "waits_unserved", "slow") else "cannot-tell",
            evidence=(
                Evidence("failed_allocations", view.reported.count("tier_allocation_failed"), "lines", "log"),
                *quotes(lines),
            ),
            explanation=(
                f"The outer tier could not allocate {view.reported.count('tier_allocation_failed'):,} times: its buffer"
                " is full and the engine waits in it, whatever its own pool has free."
            ),
            missing="what fills it: the tier's state line, or the stacks of the engine (py-spy dump)",
        )


class OuterTierFromCounter(FromSamples, OuterTier):
    """An outer tier without room, by the engine's own counter.

    Sees: allocations in an outer tier that failed.
    Likely when: always, since the counter does not show what pins the tier's memory.
    Not when: they are fewer than one for each hundred requests: that is information.
    """

    recurs = True

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the engine counted."""
        refused = counted_events(ledger.samples, "tier_refusals", settings)
        if refused is None:
            return
        yield self.finding(
            ledger,
            severity=refused.severity(settings) or "warning",
            since_ns=refused.since_ns(),
            position=refused.last.position,
            evidence=refused.evidence("allocations"),
            case="vLLM's offloading",
            explanation=(
                f"The engine counted {counted(refused.number, 'failed allocation')} in its outer tier"
                f" {refused.when()}{refused.of_requests()}: nothing in the tier could be evicted, because transfers in"
                " progress pin it or it is smaller than one step needs. What it refuses is not stored there, and is"
                " computed again once the pool has evicted it."
            ),
            missing="what pins the tier: how long its transfers take, and how large it is beside the KV that runs",
        )
