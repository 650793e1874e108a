"""What is computed a second time: after preemptions, and though the prefix cache had it."""

from __future__ import annotations

from collections.abc import Iterable

from monitor.events.records import Preemption, Prompt


class Recompute:
    """Tokens of one engine, since we have listened."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        """Computed tokens that preemptions took, by their reason."""
        self.after_preemption = 0
        """Of them: those that had to be computed again, since the prefix cache did not have them any more either."""
        self.though_cached = 0
        """Of prompts, at least, whose very content was cached when the request was let in."""
        self._pending: dict[int, int] = {}

    def preempted(self, number: int, tokens_lost: int) -> None:
        """A request lost its computed tokens."""
        self._pending[number] = tokens_lost

    def admitted(self, number: int, num_computed_tokens: int) -> None:
        """A request runs, and need not compute these tokens."""
        if self._pending:
            self.after_preemption += max(self._pending.pop(number, 0) - num_computed_tokens, 0)

    def ended(self, number: int) -> None:
        """A request will not run again."""
        if self._pending:
            self._pending.pop(number, None)

    def add(self, preempted: Iterable[Preemption], prompts: Iterable[Prompt], block_size: int) -> None:
        """What the books have found of late."""
        for preemption in preempted:
            self.lost[preemption.reason] = self.lost.get(preemption.reason, 0) + preemption.tokens_lost
        for prompt in prompts:
            self.though_cached += prompt.again * block_size

    def forget(self) -> None:
        """Events were lost: who was let in again meanwhile is not known."""
        self._pending.clear()
