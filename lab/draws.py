"""Engines and loads drawn at random from the range that people run: log-uniformly, and the same for the same number.

Not drawn, because kvscope's own engine has no such part: speculative decoding, LoRA slots, an encoder, sleep and pause,
leases that are renewed. on_vllm/vllm_draws.py adds those that vLLM's bare scheduler has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvscope.engine.bench.latencies import OutsideTimes
from kvscope.engine.bench.simulated_engine import StepTime
from kvscope.engine.faults import PLACES

from .client_load import Clients
from .needed_loads import (
    ADMITTED_IN_CHUNKS,
    DRAWN_POOL_BLOCKS,
    FETCHED_AGAIN,
    FILLING_THE_POOL,
    FLUSHING,
    IDLE_BETWEEN,
    LONGEST_PROMPT,
    OUTGROWING,
    PARKING,
    SIDE_BY_SIDE,
    STEP_S,
    Sizes,
    WatchRange,
    log_uniform,
    needed_clients,
    needed_load,
    size_for_fault,
)
from .scenarios.sizing_scenarios import BY_BYTES, CAPTURING, MUCH_MEMORY

HEALTHY_SHARE: Final = 0.4
TWO_FAULTS_SHARE: Final = 0.1
DRAWN_BLOCK_TOKENS: Final = (1, 256)
MOST_RUNNING: Final = (1, 1024)
STEP_TOKENS: Final = (32, 16_384)
SCRAPE_S: Final = (1.0, 60.0)
PLANNED_BLOCKS: Final = (10_000, 69)
"""About as many as the memory plan of such a device gives, and with a sixth of a pool given in bytes."""
MOST_CHUNKS: Final = 100
LEAST_ARRIVALS: Final = 15
"""Requests of a run, on average, that come one by one."""

FETCHING: Final = frozenset(
    (
        "leak.external-pins",
        "leak.remote-load-lost",
        "stuck.lost-wakeup",
        "stuck.parked-loads",
        "stuck.promotion-starved",
        "stuck.remote-load",
    )
)
KEEPING: Final = frozenset(("leak.finished-held", "leak.idle-not-polled", "leak.lease-burst"))
AHEAD_OF_STEPS: Final = frozenset(("leak.deferred-free-stalled", "thrash.cascade", "corrupt.use-after-free"))
BY_LEAVING: Final = frozenset(("leak.unaccounted", "leak.deferred-free-stalled", "corrupt.use-after-free"))
WITH_PREFIXES: Final = frozenset(("collapse.prefix-hits", "collapse.cache-flushed", "corrupt.counter-drift"))
ALL_ALONG: Final = (
    ADMITTED_IN_CHUNKS
    | PARKING
    | IDLE_BETWEEN
    | SIDE_BY_SIDE
    | OUTGROWING
    | frozenset(("thrash.after-retract", "sizing.kv-too-small"))
)
"""Faults whose harm lies in that they go on, or that have one chance: all is well at a chance that they leave out."""
FAULT_CODES: Final = tuple(sorted(PLACES))
PLANNING_MEMORY: Final = frozenset(code for code in PLACES if code.startswith("sizing."))


BRIEF_WATCH: Final = WatchRange((90.0, 900.0), (300, 3_000), 5_000, 400, 600_000)
"""Enough for one incident to begin and be found."""
LONG_WATCH: Final = WatchRange((900.0, 3_600.0), (3_000, 50_000), 50_000, 4_000, 6_000_000)
"""For healthy engines: the longer one is watched, the more chances there are to call it ill."""


@dataclass(frozen=True)
class Draw:
    """An engine, its clients, what is wrong with it, and for how long it is watched.

    faults: as `--fault` takes them, or empty for a healthy engine. engine: EngineConfig's fields. window: tokens that
    the layers of a second KV group see (0: one group). lost: seconds at which that many batches of the stream are lost.
    rank: its number in a server of data-parallel ranks.
    """

    number: int
    seed: int
    faults: tuple[str, ...]
    engine: Mapping[str, Any]
    load: tuple[Clients, ...]
    step_time: StepTime
    latencies: OutsideTimes
    max_model_len: int
    seconds: float
    steps: int
    scrape_s: float
    window: int = 0
    lost: tuple[tuple[float, int], ...] = ()
    plans_memory: bool = False
    rank: int = 0

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the faults."""
        return tuple(fault.partition(":")[0] for fault in self.faults)

    def undone(self) -> Draw:
        """Return the same without the faults."""
        return replace(self, faults=())

    def of_rank(self, rank: int) -> Draw:
        """Return data-parallel rank `rank` of the same server: clients of its own, and the fault only in the first."""
        if not rank:
            return self
        load = tuple(replace(clients, name=f"{clients.name}{rank}") for clients in self.load)
        return replace(self.undone(), seed=self.seed + rank, load=load, rank=rank)


def draw_run(number: int, seed: int = 0, code: str | None = None, watched: WatchRange = BRIEF_WATCH) -> Draw:
    """Draw run `number`. code: the fault to have, empty for none, or None to draw it too."""
    rng = random.Random(f"kvscope {seed} {number}")
    codes = _codes(rng, number) if code is None else tuple(filter(None, (code,)))
    sizes = Sizes(rng, frozenset(codes), watched)
    _draw_engine(sizes)
    _draw_lengths(sizes)
    steps = round(log_uniform(rng, *watched.steps))
    steps = max(steps, min(round(watched.seconds[0] / sizes.step_s), watched.most_steps))
    seconds = min(max(steps * sizes.step_s * 1.5, watched.seconds[0]), watched.seconds[1])
    load = _draw_load(sizes, seconds, min(1.0, steps * sizes.step_s / seconds))
    longest = max(clients.prompt[1] + clients.prefix + clients.output[1] + clients.context for clients in load)
    lost = ((rng.uniform(0.1, 0.9) * seconds, rng.randint(1, 3)),) if rng.random() < 0.05 else ()
    return Draw(
        number=number,
        seed=rng.randrange(1 << 30),
        faults=tuple(_with_keys(rng, each, steps) for each in codes),
        engine=sizes.engine,
        load=load,
        step_time=_draw_step_time(sizes, longest),
        latencies=_draw_latencies(sizes, longest),
        max_model_len=sizes.engine.pop("max_model_len", 0) or 1 << (longest + 1).bit_length(),
        seconds=seconds,
        steps=steps,
        scrape_s=log_uniform(rng, *SCRAPE_S),
        window=_draw_window(sizes),
        lost=lost,
        plans_memory="memory_budget" in sizes.engine,
    )


def fault_in_turn(number: int) -> str:
    """Return the fault of run `number` where each has one, and each fault its turn."""
    return FAULT_CODES[number % len(FAULT_CODES)]


def _codes(rng: random.Random, number: int) -> tuple[str, ...]:
    kind = rng.random()
    if kind < HEALTHY_SHARE:
        return ()
    first = fault_in_turn(number)
    if kind < HEALTHY_SHARE + TWO_FAULTS_SHARE:
        return first, rng.choice([code for code in FAULT_CODES if code != first])
    return (first,)


def _with_keys(rng: random.Random, code: str, steps: int) -> str:
    if code == "stuck.engine-stalled":
        return f"{code}:after={round(log_uniform(rng, 5, steps / 3))}:limit=1"
    every, after, limit = rng.choice((1, 1, 2, 3)), rng.choice((0, 0, 0, 1, 3)), rng.choice((0, 0, 0, 1, 3))
    keys = {"every": every if every > 1 else 0, "after": after, "limit": limit}
    if code in ALL_ALONG:
        keys = {}
    return code + "".join(f":{key}={value}" for key, value in keys.items() if value)


def _draw_engine(sizes: Sizes) -> None:
    rng = sizes.rng
    sizes.step_s = log_uniform(rng, *STEP_S)
    sizes.blocks = round(log_uniform(rng, *DRAWN_POOL_BLOCKS))
    sizes.block_size = 1 << round(math.log2(log_uniform(rng, *DRAWN_BLOCK_TOKENS)))
    if "stuck.never-fits" in sizes.codes:  # no model takes the prompt that a larger pool could not hold
        sizes.blocks = max(DRAWN_POOL_BLOCKS[0], min(sizes.blocks, LONGEST_PROMPT // 2 // sizes.block_size))
    sizes.running = round(log_uniform(rng, *MOST_RUNNING))
    sizes.budget = max(round(log_uniform(rng, *STEP_TOKENS)), sizes.running)
    prefixes = rng.random() < 0.8 or sizes.has(FETCHING | KEEPING | WITH_PREFIXES)
    host = sizes.has(FETCHING | KEEPING) or (prefixes and rng.random() < 0.3)
    lease = round(log_uniform(rng, 5, 480), 1) if host and rng.random() < 0.4 else 0.0
    if "leak.lease-burst" in sizes.codes:
        lease = lease or round(log_uniform(rng, 5, 480), 1)
    elif sizes.has(KEEPING):
        lease = 0.0  # a lease would end what is to be kept
    sizes.engine = {
        "num_gpu_blocks_override": sizes.blocks,
        "block_size": sizes.block_size,
        "max_num_seqs": sizes.running,
        "max_num_batched_tokens": sizes.budget,
        "async_scheduling": sizes.has(AHEAD_OF_STEPS) or rng.random() < 0.5,
        "scheduling_policy": "priority" if rng.random() < 0.3 else "fcfs",
        "enable_prefix_caching": prefixes,
        "kv_connector": "host" if host else "",
        "kv_lease_seconds": lease,
    }
    if sizes.has(PLANNING_MEMORY):
        _plan_memory(sizes)


def _plan_memory(sizes: Sizes) -> None:
    """Let a memory plan size the pool, as these faults need: on devices so small that graphs count."""
    shape = {"sizing.kv-too-small": BY_BYTES, "sizing.elsewhere": MUCH_MEMORY}
    planned = next((shape[code] for code in shape if code in sizes.codes), CAPTURING)
    kept = {"async_scheduling", "scheduling_policy", "enable_prefix_caching"}
    sizes.engine = {**{key: sizes.engine[key] for key in kept}, "max_num_seqs": 16, **planned}
    if "sizing.kv-too-large" in sizes.codes:
        sizes.engine["gpu_memory_utilization"] = 1.0
    sizes.running, sizes.budget = sizes.engine["max_num_seqs"], 2048
    sizes.block_size = sizes.engine.get("block_size", 16)
    sizes.blocks = PLANNED_BLOCKS[planned is BY_BYTES]


def _draw_lengths(sizes: Sizes) -> None:
    rng = sizes.rng
    longest = min(LONGEST_PROMPT, max(16, int(0.8 * sizes.pool)))
    if sizes.engine.get("max_model_len"):
        longest = min(longest, sizes.engine["max_model_len"] // 2)
    sizes.prompt = round(log_uniform(rng, min(16, longest), longest))
    sizes.output = round(log_uniform(rng, 2, min(1_000, max(4, 0.5 * sizes.pool))))
    size_for_fault(sizes)
    if sizes.engine.get("max_model_len"):
        sizes.prompt = min(sizes.prompt, sizes.engine["max_model_len"] // 2)
        sizes.output = min(sizes.output, sizes.engine["max_model_len"] // 4)
    else:  # a prompt is computed in a hundred chunks at most, as 1 M tokens in steps of 8,192
        sizes.budget = max(sizes.budget, -(-sizes.prompt // MOST_CHUNKS))
        sizes.engine["max_num_batched_tokens"] = sizes.budget


def _draw_step_time(sizes: Sizes, longest: int) -> StepTime:
    """Draw fixed, token and context cost in any proportion, such that they, the first steps and jitter (two deviations
    of it) together make no step longer than the longest. longest: tokens of the longest request.
    """
    rng, base = sizes.rng, sizes.step_s
    room = STEP_S[1] / base
    costs = [log_uniform(rng, 0.01, most) for most in (30, 3, 3)]
    slow = rng.random() < 0.3
    jitter = min(log_uniform(rng, 0.01, 0.5), math.log(room) / 2)
    slow_steps = rng.randint(1, 5) if slow else 0
    room /= math.exp(2 * jitter)
    slow_factor = min(log_uniform(rng, 2, 20), room) if slow else 1.0
    fitting = min(1.0, (room / slow_factor - 1) / sum(costs))
    tokens, context, attended = (max(0.0, fitting) * cost * base for cost in costs)
    return StepTime(
        base_s=base,
        per_token_s=tokens / sizes.budget,
        per_kv_token_s=context / max(sizes.pool, 1),
        per_attended_s=attended / (sizes.budget * max(longest, 1)),
        jitter=jitter,
        slow_steps=slow_steps,
        slow_factor=slow_factor,
    )


def _draw_latencies(sizes: Sizes, longest: int) -> OutsideTimes:
    """Draw latencies: the copy of the longest request takes a millisecond to a minute, a grammar a hundredth of a
    second to ten seconds. longest: its tokens.
    """
    rng = sizes.rng
    copy = log_uniform(rng, 1e-3, 60)
    blocks = -(-longest // sizes.block_size)
    share = rng.random()
    return OutsideTimes(share * copy, (1 - share) * copy / blocks, log_uniform(rng, 0.01, 10))


def _draw_window(sizes: Sizes) -> int:
    one_group = PLANNING_MEMORY | OUTGROWING | FILLING_THE_POOL | FLUSHING  # whose pool is full to the block
    if sizes.engine.get("kv_connector") or sizes.has(one_group) or sizes.rng.random() > 0.2:
        return 0
    return round(log_uniform(sizes.rng, 8, 8192))


# -------------------------------------------------------------------- clients


def _draw_load(sizes: Sizes, seconds: float, duty: float) -> tuple[Clients, ...]:
    """Draw clients. duty: the share of the time in which steps may be made, for a quick engine to be watched longer."""
    rng = sizes.rng
    together = max(1, min(sizes.running, sizes.pool // (sizes.prompt + sizes.output)))
    chunks = -(-sizes.prompt // sizes.budget)
    served_s = (sizes.output + chunks) * sizes.step_s * 2
    capacity = together / served_s
    most = min(max(4, sizes.watched.prompt_tokens // sizes.prompt), sizes.watched.requests)
    prompt = (max(1, sizes.prompt // rng.choice((1, 2, 4))), sizes.prompt)
    output = (max(1, sizes.output // rng.choice((1, 2, 8))), sizes.output)
    until = seconds * 0.9
    if sizes.least_output:
        prompt, output = (sizes.least_prompt, sizes.prompt), (sizes.least_output, max(sizes.least_output, sizes.output))
    common: dict[str, Any] = {"prompt": prompt, "output": output, "until_s": until, **_habits(sizes)}
    needed = needed_load(sizes, common, most, duty)
    if needed is not None:
        return (needed, *_special_clients(sizes, seconds))
    clients = min(round(together * rng.choice((0.5, 1, 2, 4))) or 1, most)
    kind = rng.choice(("closed", "closed", "poisson", "poisson", "bursts", "batch", "agents"))
    if duty < 0.9:
        kind, capacity = "poisson", duty * capacity / together
    if kind == "poisson":
        rate = min(capacity * log_uniform(rng, 0.1, 1.5), most / seconds)
        load = Clients("p", rate=max(rate, LEAST_ARRIVALS / seconds), **common)
    elif kind == "bursts":
        times = tuple(until * n / 3 for n in range(3) for _ in range(min(clients, most // 3 or 1)))
        load = Clients("b", times=times, **common)
    elif kind == "batch":
        load = Clients("o", times=(0.0,) * min(8 * clients, most), **common)
    elif kind == "agents":
        grown = max(4, sizes.prompt // 8)
        common |= {"prompt": (max(1, grown // 2), grown), "context": sizes.prompt, "pause_s": rng.uniform(0, 30)}
        load = Clients("a", at_once=min(clients, max(1, most // 8)), **common)
    else:
        load = Clients("c", at_once=clients, pause_s=rng.choice((0.0, 0.0, rng.uniform(0, 20))), **common)
    return (load, *_special_clients(sizes, seconds))


def _habits(sizes: Sizes) -> dict[str, Any]:
    rng = sizes.rng
    habits: dict[str, Any] = {}
    if sizes.engine["scheduling_policy"] == "priority":
        habits["priority"] = (0, rng.randint(1, 5))
    if sizes.has(BY_LEAVING) or rng.random() < 0.3:
        habits["leave"] = rng.uniform(0.1, 0.8)
    if sizes.has(WITH_PREFIXES) or (sizes.engine["enable_prefix_caching"] and rng.random() < 0.4):
        habits |= {"prefixes": rng.randint(1, 20), "prefix": max(sizes.block_size, sizes.prompt // 2), "family": "f"}
    return habits


def _special_clients(sizes: Sizes, seconds: float) -> tuple[Clients, ...]:
    """Clients that a fault needs to have a chance, beside the others."""
    rng, pool = sizes.rng, sizes.pool
    found = needed_clients(sizes, seconds)
    # More beginnings than the pool keeps: they are fetched from the host again.
    if sizes.has(FETCHING - PARKING - FETCHED_AGAIN):
        prefix = min(max(sizes.block_size, pool // 6), sizes.watched.prompt_tokens // 60)
        rate = min(60 / seconds, 0.2 / sizes.step_s)
        own = max(1, sizes.block_size)
        common: dict[str, Any] = {"prompt": (1, own), "output": (2, 10), "prefixes": 10, "prefix": prefix}
        found.append(Clients("f", rate=rate, until_s=seconds * 0.8, **common))
    if "stuck.never-fits" in sizes.codes:
        large = round(pool * rng.uniform(1.02, 1.5)) + sizes.block_size
        found.append(Clients("large", times=(seconds * rng.uniform(0.05, 0.5),), prompt=(large, large), output=(2, 5)))
    if "stuck.head-of-line" in sizes.codes:
        half = max(1, pool // 2)
        found.append(Clients("hog", times=(0.0,), prompt=(half, half), output=(200, 800)))
        long = max(8, int(0.8 * pool))
        found.append(Clients("long", times=(seconds * 0.05,), prompt=(max(1, long // 40),) * 2, output=(long, long)))
    if "stuck.grammar" in sizes.codes or rng.random() < 0.15:
        found.append(Clients("s", rate=20 / seconds, until_s=seconds * 0.8, prompt=(8, 40), regex="[ab]{9}"))
    return tuple(found)
