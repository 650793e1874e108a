"""What is computed a second time: after preemptions, and though the prefix cache had it."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope.monitor.state.records import ComputedPrompt, Preemption


class Recompute:
    """Tokens of one engine, since we have listened."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        """Computed tokens that preemptions took, by their reason."""
        self.after_preemption = 0
        """Of them: those that had to be computed again, since the prefix cache did not have them any more either."""
        self.though_cached = 0
        """Of prompts, at least, whose very content was cached when the request was let in."""

    def add(
        self, preempted: Iterable[Preemption], prompts: Iterable[ComputedPrompt], recomputed: int, block_size: int
    ) -> None:
        """Add what the last batch showed, with `recomputed` tokens after preemptions."""
        self.after_preemption += recomputed
        for preemption in preempted:
            self.lost[preemption.reason] = self.lost.get(preemption.reason, 0) + preemption.tokens_lost
        for prompt in prompts:
            self.though_cached += prompt.again * block_size
