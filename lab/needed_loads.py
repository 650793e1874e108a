"""Bounds of a drawn engine and its load, and what a fault needs to do harm, where a plain draw hardly ever has it.

All is drawn still: how large the pool is, how many requests fill it, how long that takes. Only what the mechanism needs
is seen to, in as few steps as the engine makes while it is watched: that the requests outgrow the pool, that prompts
are computed while others decode, that what is fetched was there before and is gone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .client_load import Clients

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


FILLING_THE_POOL: Final = frozenset(
    ("thrash.cascade", "thrash.after-retract", "collapse.preempt-all", "corrupt.use-after-free", "sizing.kv-too-small")
)
"""Preemption is where the harm begins: requests that were admitted together outgrow the pool."""
ADMITTED_IN_CHUNKS: Final = frozenset(("thrash.preemption",))
"""A prompt is preempted before it is computed: it takes several steps, while others decode and the pool is full."""
OUTGROWING: Final = frozenset(("stuck.self-preempt",))
PARKING: Final = frozenset(("stuck.parked-loads",))
"""Fetched prefixes fill the pool up to one block, and each request needs one more for its own tokens."""
FETCHED_AGAIN: Final = frozenset(("stuck.lost-wakeup", "leak.remote-load-lost"))
IDLE_BETWEEN: Final = frozenset(("leak.idle-not-polled",))
"""The engine has nothing to run when a copy ends."""
SIDE_BY_SIDE: Final = frozenset(("collapse.lockstep",))
"""Some decode while others' prompts are computed."""

LARGE_AMONG_PREFIXES: Final = "load.large-among-prefixes"
"""Not a fault but a load: now and then two large prompts push out the prefixes that small ones share."""
FLUSHING: Final = frozenset((LARGE_AMONG_PREFIXES,))

MOST_TOKENS: Final = 300_000
"""Of a pool that is to be filled: half of what all prompts of a brief watch may have."""
MOST_FETCHED_TOKENS: Final = 60_000
MOST_BLOCKS_AGAIN: Final = 250
"""Blocks that a step allocates in vain: a request that preempts itself does so in hundreds of steps of a run."""
FEW_FETCHES: Final = 40
MOST_TOGETHER: Final = 32
LEAST_TOGETHER: Final = 3
FEWEST_ENDING: Final = 4
"""Requests of a wave, of which some leave blocks to be copied."""


def size_for_fault(sizes: Sizes) -> None:
    """Change the drawn engine, and the lengths of its requests, to what its fault needs."""
    if sizes.has(FILLING_THE_POOL):
        _fill_the_pool(sizes)
    elif "num_gpu_blocks_override" not in sizes.engine:
        return  # a memory plan sizes the pool
    elif sizes.has(ADMITTED_IN_CHUNKS):
        _admit_in_chunks(sizes)
    elif sizes.has(OUTGROWING):
        _outgrow_the_pool(sizes)
    elif sizes.has(PARKING):
        _park(sizes)
    elif sizes.has(FETCHED_AGAIN):
        _bound_pool(sizes, MOST_FETCHED_TOKENS)
        _compute_within(sizes, sizes.pool, sizes.full_steps / 12)
    elif sizes.has(IDLE_BETWEEN):
        _end_early(sizes)
    elif sizes.has(FLUSHING):
        _bound_pool(sizes, MOST_TOKENS)
        _compute_within(sizes, sizes.pool, sizes.full_steps / 12)
    elif sizes.has(SIDE_BY_SIDE):
        _run_side_by_side(sizes)


def _bound_pool(sizes: Sizes, tokens: int) -> None:
    if "num_gpu_blocks_override" in sizes.engine:
        blocks = max(DRAWN_POOL_BLOCKS[0], min(sizes.blocks, tokens // sizes.block_size))
        sizes.set_engine(num_gpu_blocks_override=blocks)


def _compute_within(sizes: Sizes, tokens: int, steps: float) -> None:
    """Let so many tokens of prompts be computed in so many steps."""
    sizes.set_engine(max_num_batched_tokens=max(sizes.budget, round(tokens / max(steps, 1))))


def _let_run(sizes: Sizes, least: int) -> None:
    sizes.set_engine(max_num_seqs=max(sizes.running, least), max_num_batched_tokens=max(sizes.budget, least))


def _fill_the_pool(sizes: Sizes) -> None:
    """Let requests that fit into the pool together outgrow it after some steps."""
    rng = sizes.rng
    _bound_pool(sizes, MOST_TOKENS)
    _let_run(sizes, LEAST_TOGETHER + 1)
    usable = sizes.blocks - 1
    together = round(log_uniform(rng, LEAST_TOGETHER + 1, min(sizes.running, usable // 4, MOST_TOGETHER)))
    share = usable // together * sizes.block_size
    if "num_gpu_blocks_override" in sizes.engine:  # the first ones are short of a block, and others have some
        left = rng.randint(0, together - LEAST_TOGETHER)
        sizes.set_engine(num_gpu_blocks_override=usable // together * together + left + 1)
    grown = min(round(log_uniform(rng, 1, sizes.steps / 6)), share // 2)
    filled = round(log_uniform(rng, 1, sizes.full_steps / 6))
    _compute_within(sizes, sizes.pool, filled)
    sizes.prompt = max(1, share - grown)
    sizes.least_prompt = max(1, sizes.prompt - grown // 2)
    sizes.least_output = 2 * grown + filled + 2
    sizes.output = sizes.least_output + round(log_uniform(rng, 2, sizes.steps / 6))


def _admit_in_chunks(sizes: Sizes) -> None:
    """Let prompts of several chunks each be as many that they do not fit into the pool together, and the others take
    the last block as often as the one that is computed.
    """
    rng, steps = sizes.rng, sizes.full_steps
    _let_run(sizes, LEAST_TOGETHER + 1)
    together = round(log_uniform(rng, 2, min(sizes.running - 1, 12, max(2, steps / 12))))
    filled = steps // 4
    decoded = filled * together
    while sizes.block_size > 1 and DRAWN_POOL_BLOCKS[0] * sizes.block_size > filled * decoded:
        sizes.block_size //= 2
    sizes.set_engine(block_size=sizes.block_size)
    if rng.random() < 0.9:  # what a prompt finds again does not fit into what is left
        sizes.engine |= {"enable_prefix_caching": False, "kv_connector": "", "kv_lease_seconds": 0.0}
    least = max(sizes.block_size / 2, DRAWN_POOL_BLOCKS[0] * sizes.block_size / filled)
    chunk = max(1, round(log_uniform(rng, least, 2 * sizes.block_size)))
    _bound_pool(sizes, min(MOST_TOKENS, filled * chunk))
    left = log_uniform(rng, min(0.6, 1.5 * chunk * together / sizes.pool), 0.9)  # of a prompt's room, when others run
    sizes.prompt = max(3, round(sizes.pool / (together + left)))
    sizes.least_prompt = sizes.prompt
    budget = together + min(chunk, max(1, sizes.prompt // 3))
    sizes.set_engine(max_num_batched_tokens=budget, max_num_seqs=min(sizes.running, budget))
    sizes.least_output = sizes.pool // (budget - together) + 2
    sizes.output = sizes.least_output + round(log_uniform(rng, 2, steps / 2))


def _outgrow_the_pool(sizes: Sizes) -> None:
    """Let a step compute no more than half of a pool, so that what fills it is computed in chunks again and again."""
    chunks = round(log_uniform(sizes.rng, 3, sizes.steps / 6))
    _bound_pool(sizes, min(MOST_TOKENS, chunks * MOST_BLOCKS_AGAIN * sizes.block_size))
    budget = max(1, min(max(sizes.budget, sizes.pool // chunks), sizes.pool // 2))
    sizes.set_engine(max_num_batched_tokens=budget, max_num_seqs=min(sizes.running, budget))
    sizes.prompt = min(sizes.prompt, max(1, sizes.pool // 8))
    sizes.output = min(sizes.output, max(2, sizes.steps // 8))


def _park(sizes: Sizes) -> None:
    _bound_pool(sizes, MOST_FETCHED_TOKENS)
    sizes.together = sizes.rng.choice((2, 2, 3))
    sizes.set_engine(num_gpu_blocks_override=(sizes.blocks - 2) // sizes.together * sizes.together + 2)
    _compute_within(sizes, sizes.pool, sizes.steps / 10)
    sizes.prompt = min(sizes.prompt, max(1, sizes.pool // 16))
    sizes.output = min(sizes.output, max(2, sizes.steps // 16))


def _end_early(sizes: Sizes) -> None:
    """Let requests have a full block to copy, and end long before the watch does."""
    sizes.prompt = max(sizes.prompt, min(2 * sizes.block_size, int(0.8 * sizes.pool)))
    sizes.least_prompt = min(sizes.prompt, sizes.block_size + 1)
    _compute_within(sizes, sizes.prompt, sizes.steps / 16)
    sizes.output = min(sizes.output, max(2, sizes.steps // 12))
    sizes.least_output = 1


def _run_side_by_side(sizes: Sizes) -> None:
    rng = sizes.rng
    _let_run(sizes, 2)
    sizes.set_engine(max_num_seqs=min(sizes.running, 2 * MOST_TOGETHER))
    sizes.prompt = min(sizes.prompt, max(1, sizes.pool // 4))
    sizes.output = min(round(log_uniform(rng, 4, sizes.steps / 4)), max(4, sizes.pool // 8))
    _compute_within(sizes, sizes.prompt, sizes.steps / 16)


# -------------------------------------------------------------------- clients


def needed_load(sizes: Sizes, common: Mapping[str, Any], most: int, duty: float) -> Clients | None:
    """Return the clients that its fault needs, None if it needs no others than drawn. most: requests at once.

    common: what is drawn of them. duty: the share of the time in which steps may be made.
    """
    until_s = common["until_s"]
    together = max(1, min(sizes.running, sizes.pool // (sizes.prompt + sizes.output)))
    if sizes.has(IDLE_BETWEEN):
        waves = sizes.rng.randint(1, 3)
        chunks = -(-sizes.prompt // sizes.budget)
        clients = max(FEWEST_ENDING, min(together, most // waves, sizes.steps // (12 * waves * chunks)))
        return _waves(clients, waves, {**common, "until_s": until_s / 2})
    if sizes.has(PARKING):
        return Clients("p", rate=6 / until_s, **{**common, "until_s": until_s / 3})
    if sizes.has(FLUSHING):
        return _sharing_prefixes(sizes, common)
    if sizes.has(FETCHED_AGAIN) and sizes.rng.random() < 0.6:  # few enough for a fetch to end while none runs
        return Clients("p", rate=6 / until_s, **common)
    if not sizes.has(FILLING_THE_POOL | ADMITTED_IN_CHUNKS | SIDE_BY_SIDE):
        return None
    if sizes.has(ADMITTED_IN_CHUNKS) or sizes.rng.random() < 0.7:  # what they share leaves room
        common = {**common, "prefixes": 0, "prefix": 0}
    if "prefix" in common and sizes.least_prompt > common["prefix"]:  # a part of the prompt, not more of it
        common = {**common, "prompt": tuple(tokens - common["prefix"] for tokens in common["prompt"])}
    if sizes.has(FILLING_THE_POOL) and "leave" in common:  # before they have grown
        common = {**common, "leave": common["leave"] / 4}
    clients = max(2, min(2 * together + LEAST_TOGETHER, most))
    if duty < 0.9:
        chunks = -(-clients * sizes.prompt // sizes.budget)
        waves = max(1, min(6, sizes.steps // (4 * (chunks + sizes.output))))
        return _waves(clients, waves, common)
    return Clients("c", at_once=clients, **common)


def _waves(clients: int, waves: int, common: Mapping[str, Any]) -> Clients:
    return Clients(
        "b", times=tuple(common["until_s"] * n / waves for n in range(waves) for _ in range(clients)), **common
    )


def needed_clients(sizes: Sizes, seconds: float) -> list[Clients]:
    """Return the clients that its fault needs beside the others."""
    if sizes.has(OUTGROWING):
        return [_endless(sizes, seconds)]
    if sizes.has(PARKING):
        return _parking(sizes, seconds)
    if sizes.has(FLUSHING):
        return [_large_ones(sizes, seconds)]
    return _fetched_again(sizes, seconds) if sizes.has(FETCHED_AGAIN) else []


def _sharing_prefixes(sizes: Sizes, common: Mapping[str, Any]) -> Clients:
    """Return clients whose few prefixes have room in the pool, beside all that runs."""
    rng, size = sizes.rng, sizes.block_size
    prefixes = rng.randint(1, 5)
    prefix = max(1, round(log_uniform(rng, 1, (sizes.blocks - 1) / (3 * prefixes)))) * size
    rate = min(60 / common["until_s"], 0.15 / sizes.step_s)
    habits = {"priority": common["priority"]} if "priority" in common else {}
    shared: dict[str, Any] = {"prefixes": prefixes, "prefix": prefix, "family": "f", **habits}
    return Clients("p", rate=rate, until_s=common["until_s"], prompt=(1, 2 * size), output=(1, 6), **shared)


def _large_ones(sizes: Sizes, seconds: float) -> Clients:
    """Return prompts of which two fill the pool more than once, so that neither leaves room for what was cached."""
    rng = sizes.rng
    pairs = rng.randint(1, 4)
    times = tuple(seconds * (0.25 + 0.5 * n / pairs) for n in range(pairs) for _ in range(2))
    most = max(1, int(0.9 * sizes.pool))
    return Clients("large", times=times, prompt=(max(1, int(0.6 * sizes.pool)), most), output=(1, 3))


def _endless(sizes: Sizes, seconds: float) -> Clients:
    """Return a client whose prompt nearly fills the pool, and whose output cannot fit."""
    start = seconds * sizes.rng.uniform(0.02, 0.2)
    grows = min(round(log_uniform(sizes.rng, 2, sizes.steps / 6)), sizes.pool // 2)
    own = sizes.pool - grows
    return Clients("endless", times=(start,), prompt=(own, own), output=(grows + 400, grows + 800))


def _parking(sizes: Sizes, seconds: float) -> list[Clients]:
    """Return rounds in which the same prompts are asked for together, after one that makes the pool forget them."""
    rng, size = sizes.rng, sizes.block_size
    rounds = rng.randint(2, 4) if sizes.steps > 3 * FEWEST_STEPS else 2
    times = tuple(seconds * (0.35 + 0.5 * n / rounds) for n in range(rounds))
    own = size - rng.randint(0, min(size - 1, 3))
    prefix = (sizes.blocks - 2) // sizes.together * size
    common: dict[str, Any] = {"times": times, "prompt": (own, own), "output": (size - own + 2, size - own + 8)}
    asked = [Clients("f", **common, prefixes=1, prefix=prefix, family=f"parked {n}") for n in range(sizes.together)]
    all_of_it = max(1, sizes.pool - 2)
    later = tuple(at_s + 0.01 for at_s in times)
    return [*asked, Clients("flush", times=later, prompt=(all_of_it, all_of_it), output=(2, 2))]


def _fetched_again(sizes: Sizes, seconds: float) -> list[Clients]:
    """Return clients with more beginnings than the pool keeps: they are fetched from the host again."""
    rng = sizes.rng
    rate = min(60 / seconds, 0.2 / sizes.step_s)
    prefixes = rng.randint(3, 10) if rate * seconds > FEW_FETCHES else 3
    prefix = max(sizes.block_size, sizes.pool * 5 // (3 * prefixes))
    own = max(1, sizes.block_size)
    common: dict[str, Any] = {"prompt": (1, own), "output": (2, 10), "prefixes": prefixes, "prefix": prefix}
    found = [Clients("f", rate=rate, until_s=seconds * 0.8, **common)]
    if "leak.remote-load-lost" in sizes.codes:
        found.append(Clients("g", rate=rate / 2, until_s=seconds * 0.8, leave_fetching=True, **common))
    return found
