"""A step's plan: which requests it computes, and how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvscope.engine.requests.request import Request
from kvscope.monitor.events.kinds import Cause, Limit


class Share(NamedTuple):
    """A request's part of a step: `num_tokens` tokens from `start` on. `samples` if its next token comes of it."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_preemptions: int = 0
    """How often the request had been preempted when this was planned."""


@dataclass
class SchedulerOutput:
    """One step: what to compute of each request, in order."""

    step: int
    shares: list[Share] = field(default_factory=list)
    limit: Limit = Limit.NONE

    def add(self, request: Request, num_tokens: int) -> None:
        """Compute `num_tokens` more of a request in this step."""
        request.cause, request.times_passed_over = Cause.NONE, 0
        start = request.num_scheduled_tokens
        samples = start + num_tokens == request.num_tokens + request.num_output_placeholders
        self.shares.append(Share(request, start, num_tokens, samples, request.num_preemptions))

    def drop(self, victim: Request) -> int:
        """Take a preempted request out of the plan and return the tokens that this frees of the budget."""
        for place, share in enumerate(self.shares):
            if share.request is victim:
                del self.shares[place]
                return share.num_tokens
        return 0
