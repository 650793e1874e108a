"""The bounds of an engine and its load, before they are put together."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Final

STEP_S: Final = (1e-3, 30.0)
DRAWN_POOL_BLOCKS: Final = (32, 500_000)
LONGEST_PROMPT: Final = 1_000_000
COSTLY: Final = 16
"""Most steps with all the tokens that they may have take no more than so many times the fixed part."""
FEWEST_STEPS: Final = 24
"""Steps of the slowest engine while it is watched."""


@dataclass(frozen=True)
class WatchRange:
    """For how long an engine is watched, and how much it is given to do, which bounds the time that a run takes.

    seconds, steps: from least to most, of the engine's own time. most_steps: of an engine with quick steps, so that it
    is watched for more than a moment. requests, prompt_tokens: of all clients together, at most.
    """

    seconds: tuple[float, float]
    steps: tuple[int, int]
    most_steps: int
    requests: int
    prompt_tokens: int


@dataclass
class Sizes:
    """The bounds of an engine and its load, before they are put together."""

    rng: random.Random
    codes: frozenset[str]
    watched: WatchRange
    blocks: int = 0
    block_size: int = 0
    running: int = 0
    budget: int = 0
    step_s: float = 0.0
    prompt: int = 0
    output: int = 0
    together: int = 0
    """Requests that the fault needs at the same time."""
    least_prompt: int = 0
    """Above 0, prompts and outputs are about alike, as the fault needs them: no prompt is shorter."""
    least_output: int = 0
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def pool(self) -> int:
        """Tokens that the pool holds."""
        return (self.blocks - 1) * self.block_size

    @property
    def steps(self) -> int:
        """Steps that fit into the watch at the least, where tokens and context make each longer than the fixed part."""
        quick = min(round(self.watched.seconds[0] / self.step_s), self.watched.most_steps)
        slow = round(self.watched.seconds[1] / (2 * self.step_s))
        return max(FEWEST_STEPS, min(max(self.watched.steps[0], quick), slow))

    @property
    def full_steps(self) -> int:
        """The same where each step computes as many tokens as it may, which takes many times the fixed part."""
        least, most = self.watched.seconds
        seconds = min(max(1.5 * self.watched.steps[0] * self.step_s, least), most)
        return max(FEWEST_STEPS, min(round(seconds / min(COSTLY * self.step_s, STEP_S[1])), self.steps))

    def has(self, codes: frozenset[str]) -> bool:
        """Whether the draw includes one of these incidents."""
        return bool(self.codes & codes)

    def set_engine(self, **settings: int) -> None:
        """Change settings of the engine, and the bounds with them. A pool that a memory plan sizes stays as it is."""
        self.running = settings.get("max_num_seqs", self.running)
        self.budget = settings.get("max_num_batched_tokens", self.budget)
        self.engine |= settings
        if "num_gpu_blocks_override" in self.engine:
            self.blocks = self.engine["num_gpu_blocks_override"]


def log_uniform(rng: random.Random, least: float, most: float) -> float:
    """Draw between the two, every factor equally likely."""
    return math.exp(rng.uniform(math.log(least), math.log(max(least, most))))
