"""stuck.outer-tier: the engine waits for memory of an outer tier."""

from __future__ import annotations

from collections.abc import Iterator

from ..judgement import Evidence, TextJudgement
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
    title = "The engine waits for memory in an outer tier"

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
