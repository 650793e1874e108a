"""Recomputed tokens: after preemptions, and though the prefix cache had them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from kvscope.monitor.state.records import ComputedPrompt, Preemption

MAX_RECOMPUTED: Final = 4_096


class Recompute:
    """Tokens of one engine, since we have listened."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        """Computed tokens that preemptions took, by their reason."""
        self.after_preemption = 0
        """Those of them that had to be computed again, since the prefix cache did not have them any more either."""
        self.recent: deque[tuple[int, int]] = deque(maxlen=MAX_RECOMPUTED)
        """Wall times at which requests were admitted again, with the tokens that had to be computed again then."""
        self.though_cached = 0
        """Prompt tokens, as a lower bound, whose very content was cached when the request was admitted."""

    def since(self, wall_ns: int) -> int:
        """Return the tokens that had to be computed again after preemptions since then."""
        return sum(tokens for at_ns, tokens in self.recent if at_ns >= wall_ns)

    def recomputed(self, at_ns: int, tokens: int) -> None:
        """Add what the batch of that wall time showed to be computed again after preemptions."""
        self.after_preemption += tokens
        if tokens:
            self.recent.append((at_ns, tokens))

    def add(self, preempted: Iterable[Preemption], prompts: Iterable[ComputedPrompt], block_size: int) -> None:
        """Add what the last batch showed."""
        for preemption in preempted:
            self.lost[preemption.reason] = self.lost.get(preemption.reason, 0) + preemption.tokens_lost
        for prompt in prompts:
            self.though_cached += prompt.again * block_size
