"""Steps put together by hand, where a test wants no scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from kvscope.engine.execution.model_runner import ModelRunner
from kvscope.engine.requests.request import Request
from kvscope.engine.requests.request_output import Sampled
from kvscope.engine.scheduling.step_plan import SchedulerOutput, Share


def plan(*shares: tuple[Request, int]) -> SchedulerOutput:
    """A step that computes so many tokens more of each."""
    return SchedulerOutput(
        0, [Share(r, r.num_computed_tokens, n, r.num_computed_tokens + n == r.num_tokens) for r, n in shares]
    )


def execute(run: ModelRunner, step: SchedulerOutput, tables: Mapping[int, list[int]]) -> list[Sampled]:
    """Run it at once, with one block table for each request."""
    return run.run(run.prepare(step, {number: [table] for number, table in tables.items()}))
