"""Episodes of vLLM's scheduler: engine and clients as for kvscope's own engine, and what only vLLM has."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final, Literal

from ..draws import BRIEF_WATCH, FETCHING, HEALTHY_SHARE, KEEPING, Draw, draw_run
from ..needed_loads import WatchRange, log_uniform
from .fault_table import FAULT_TABLE, VllmFault, release_tuple

MOST_VLLM_BLOCKS: Final = 50_000
"""vLLM has a Python object for each block: more take longer to make than the episode to run."""
FETCHED_SHARE: Final = 0.3
LEASES_S: Final = (5.0, 480.0)
RENEWED_LEASES_S: Final = (5.0, 120.0)
LONGEST_QUEUE_S: Final = 600.0
"""The longest that a consumer which renews its leases lets requests wait in its own queue."""
LEASES_RENEWED: Final = (0, 32)
"""The first of the releases that the lab runs whose NIXL leases consumers renew (vLLM PR #41383)."""
OUTAGES: Final = (0, 18)
"""The first of the releases that the lab runs whose scheduler can be paused."""
MOST_WINDOW_GROUPS: Final = 4

OutageKind = Literal["pause", "sleep", "weights"]


@dataclass(frozen=True)
class Outage:
    """A time in which the operator keeps the engine from its requests, `seconds` from when no step is in flight.

    A pause leaves requests as they are. A sleep aborts them and drops the prefix cache. New weights drop the prefix
    cache and preempt the requests that run.
    """

    kind: OutageKind
    at_s: float
    seconds: float


@dataclass(frozen=True)
class VllmDraw:
    """An episode. base: engine and clients, whose faults do not count. fault: name in the table, empty for none.

    fetched, kept: shares of the requests whose prompt is fetched and whose blocks are kept for another engine (0 for
    both: there is no connector). consumer_s: from least to most, how long another engine takes to read kept blocks.
    lease_s: kept blocks are freed after this long (0: never). renews: consumers renew that lease for as long as they
    live. drifts: the share of draft tokens that are accepted falls over the episode. window_groups: KV groups with the
    window of the base.
    """

    base: Draw
    release: tuple[int, ...]
    fault: str = ""
    fetched: float = 0.0
    kept: float = 0.0
    consumer_s: tuple[float, float] = (0.1, 5.0)
    lease_s: float = 0.0
    renews: bool = False
    loras: int = 0
    drafts: int = 0
    drifts: bool = False
    outages: tuple[Outage, ...] = ()
    window_groups: int = 0

    @property
    def has_connector(self) -> bool:
        """Whether the engine is one of a prefill/decode pair."""
        return bool(self.fetched or self.kept)

    def undone(self) -> VllmDraw:
        """Return the same without the fault. The load stays, which alone is some faults."""
        return replace(self, fault="")

    def of_rank(self, rank: int) -> VllmDraw:
        """Return data-parallel rank `rank` of the same server. See Draw.of_rank."""
        of_rank = replace(self, base=self.base.of_rank(rank))
        return of_rank.undone() if rank else of_rank

    def recorded_whole(self) -> VllmDraw:
        """Return the same without lost batches."""
        return replace(self, base=replace(self.base, lost=()))


def faults_of(release: tuple[int, ...]) -> list[VllmFault]:
    """Return the faults whose mechanism this release has."""
    return [fault for fault in FAULT_TABLE.values() if fault.since <= release < fault.until]


def vllm_fault_in_turn(number: int, release: str) -> str:
    """Return the fault of run `number` where each has one, and each fault of the release its turn."""
    candidates = faults_of(release_tuple(release))
    return candidates[number % len(candidates)].name


def draw_vllm_run(
    number: int, seed: int, release: str, fault: str | None = None, watched: WatchRange = BRIEF_WATCH
) -> VllmDraw:
    """Draw run `number` for a release. fault: the one to have, empty for none, or None to draw it too."""
    rng = random.Random(f"vllm {seed} {number}")
    version = release_tuple(release)
    chosen: VllmFault | None = None
    if fault is None:
        candidates = [each for each in faults_of(version) if each.mixed]
        drawn = rng.random() >= HEALTHY_SHARE
        chosen = candidates[number % len(candidates)] if drawn else None
    elif fault:
        chosen = FAULT_TABLE[fault]
    base = draw_run(number, seed, chosen.draws_like if chosen is not None else "", watched)
    more = random.Random(f"more {seed} {number}")  # what was added to the lab: all else stays as it was
    window_groups = more.choice((1, 1, more.randint(2, MOST_WINDOW_GROUPS))) if base.window else 0
    base = _within_vllm(base, chosen, 1 + window_groups)
    fetches = chosen is not None and (chosen.fetches or chosen.draws_like in FETCHING)
    keeps = chosen is not None and (chosen.keeps or chosen.draws_like in KEEPING)
    paired = bool(base.engine["kv_connector"]) or fetches or keeps
    decodes = rng.random() < 0.5
    lease_s = float(round(log_uniform(rng, *LEASES_S))) if keeps and chosen is not None and chosen.lease else 0.0
    longest = log_uniform(rng, 0.1, 60)
    kept = rng.uniform(0.2, 1.0) if paired and (keeps or (not decodes and not fetches)) else 0.0
    renews = chosen.renews if chosen is not None else kept > 0 and version >= LEASES_RENEWED and more.random() < 0.5
    if renews:
        lease_s, longest = float(round(log_uniform(more, *RENEWED_LEASES_S))), log_uniform(more, 0.1, LONGEST_QUEUE_S)
    return VllmDraw(
        base,
        version,
        chosen.name if chosen is not None else "",
        fetched=FETCHED_SHARE if paired and (fetches or (decodes and not keeps)) else 0.0,
        kept=kept,
        consumer_s=(longest / 10, longest),
        lease_s=lease_s,
        renews=renews,
        loras=rng.randint(1, 4) if rng.random() < 0.2 and not paired else 0,
        drafts=rng.randint(1, 5) if rng.random() < 0.2 and not base.engine["async_scheduling"] and not paired else 0,
        drifts=rng.random() < 0.5,
        outages=_draw_outages(rng, more, base.seconds, paired) if chosen is None and version >= OUTAGES else (),
        window_groups=window_groups,
    )


def _within_vllm(base: Draw, fault: VllmFault | None, groups: int) -> Draw:
    """Return the draw with what vLLM's releases take. groups: KV groups, each with blocks of its own."""
    engine = dict(base.engine)
    engine["num_gpu_blocks_override"] = min(engine["num_gpu_blocks_override"], MOST_VLLM_BLOCKS)
    if fault is not None:
        engine["num_gpu_blocks_override"] -= fault.fewer_blocks
        for key, wanted in (("async_scheduling", fault.asynchronous), ("enable_prefix_caching", fault.prefixes)):
            engine[key] = engine[key] if wanted is None else wanted
    pool = (engine["num_gpu_blocks_override"] - 1) * engine["block_size"]
    longest = base.max_model_len
    if fault is None or not fault.beyond_pool:
        longest = min(longest, max(pool // groups, 2))  # vLLM does not start with a pool that holds less than one
    return replace(base, engine=engine, max_model_len=longest)


def _draw_outages(rng: random.Random, more: random.Random, seconds: float, paired: bool) -> tuple[Outage, ...]:
    """Draw the operator's acts: mostly none. more: draws the kinds that vLLM refuses while a connector keeps blocks."""
    if rng.random() <= 0.15:
        return (Outage("pause", rng.uniform(0.2, 0.6) * seconds, min(log_uniform(rng, 2, 120), 0.3 * seconds)),)
    if paired or more.random() > 0.25:
        return ()
    kind: OutageKind = more.choice(("sleep", "weights"))
    count, longest = (more.randint(1, 2), 600) if kind == "sleep" else (more.randint(1, 10), 60)
    apart_s = 0.8 * seconds / count
    return tuple(
        Outage(kind, apart_s * (each + more.uniform(0.2, 0.6)), min(log_uniform(more, 1, longest), 0.3 * apart_s))
        for each in range(count)
    )
