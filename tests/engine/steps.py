"""Steps put together by hand, where a test wants no scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from kvscope.engine.execution.model_runner import ModelRunner
from kvscope.engine.execution.sampler import choose, lay_out_sampling
from kvscope.engine.execution.upload import Upload
from kvscope.engine.requests.request import Request, Sampled
from kvscope.engine.scheduling.scheduler_state import SchedulerOutput, Share


def plan(*shares: tuple[Request, int]) -> SchedulerOutput:
    """A step that computes so many tokens more of each."""
    return SchedulerOutput(
        0, [Share(r, r.num_computed_tokens, n, r.num_computed_tokens + n == r.num_tokens) for r, n in shares]
    )


def execute(run: ModelRunner, step: SchedulerOutput, tables: Mapping[int, list[int]]) -> list[Sampled]:
    """Run it at once, with one block table for each request."""
    return run.run(run.prepare(step, {number: [table] for number, table in tables.items()}))()


def sample(logits: Tensor, requests: Sequence[Request], seed: int, eos: Collection[int] = ()) -> list[Sampled]:
    """Choose a token for each row of the logits."""
    upload = Upload()
    sampling = lay_out_sampling(requests, range(len(requests)), seed, eos, logits.shape[1], upload, {})
    laid_out = sampling(upload.send("cpu"))
    return choose(logits, laid_out).home(laid_out)()
