"""Episodes of vLLM's scheduler: engine and clients as for kvscope's own engine, and what only vLLM has."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

from kvscope.monitor.incidents.draw_sizes import WatchRange, log_uniform
from kvscope.monitor.incidents.draws import (
    BRIEF_WATCH,
    FETCHING,
    HEALTHY_SHARE,
    KEEPING,
    Draw,
    draw_run,
)
from kvscope.monitor.incidents.on_vllm.fault_table import FAULT_TABLE, VllmFault, release_tuple

MOST_VLLM_BLOCKS: Final = 50_000
"""vLLM has a Python object for each block: more take longer to make than the episode to run."""
FETCHED_SHARE: Final = 0.3
LEASES_S: Final = (5.0, 480.0)


@dataclass(frozen=True)
class VllmDraw:
    """An episode. base: engine and clients, whose faults do not count. fault: name in the table, empty for none.

    fetched, kept: shares of the requests whose prompt is fetched and whose blocks are kept for another engine (0 for
    both: there is no connector). consumer_s: from least to most, how long another engine takes to read kept blocks.
    lease_s: kept blocks are freed after this long (0: never). pauses: seconds at which the operator pauses the engine,
    and for how long. drifts: the share of draft tokens that are accepted falls over the episode.
    """

    base: Draw
    release: tuple[int, ...]
    fault: str = ""
    fetched: float = 0.0
    kept: float = 0.0
    consumer_s: tuple[float, float] = (0.1, 5.0)
    lease_s: float = 0.0
    loras: int = 0
    drafts: int = 0
    drifts: bool = False
    pauses: tuple[tuple[float, float], ...] = ()

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
    base = _within_vllm(base, chosen)
    fetches = chosen is not None and (chosen.fetches or chosen.draws_like in FETCHING)
    keeps = chosen is not None and (chosen.keeps or chosen.draws_like in KEEPING)
    paired = bool(base.engine["kv_connector"]) or fetches or keeps
    decodes = rng.random() < 0.5
    lease_s = float(round(log_uniform(rng, *LEASES_S))) if keeps and chosen is not None and chosen.lease else 0.0
    longest = log_uniform(rng, 0.1, 60)
    return VllmDraw(
        base,
        version,
        chosen.name if chosen is not None else "",
        fetched=FETCHED_SHARE if paired and (fetches or (decodes and not keeps)) else 0.0,
        kept=rng.uniform(0.2, 1.0) if paired and (keeps or (not decodes and not fetches)) else 0.0,
        consumer_s=(longest / 10, longest),
        lease_s=lease_s,
        loras=rng.randint(1, 4) if rng.random() < 0.2 and not paired else 0,
        drafts=rng.randint(1, 5) if rng.random() < 0.2 and not base.engine["async_scheduling"] and not paired else 0,
        drifts=rng.random() < 0.5,
        pauses=_draw_pauses(rng, base.seconds) if chosen is None and version >= (0, 18) else (),
    )


def _within_vllm(base: Draw, fault: VllmFault | None) -> Draw:
    """Return the draw with what vLLM's releases take."""
    engine = dict(base.engine)
    engine["num_gpu_blocks_override"] = min(engine["num_gpu_blocks_override"], MOST_VLLM_BLOCKS)
    if fault is not None:
        engine["num_gpu_blocks_override"] -= fault.fewer_blocks
        for key, wanted in (("async_scheduling", fault.asynchronous), ("enable_prefix_caching", fault.prefixes)):
            engine[key] = engine[key] if wanted is None else wanted
    pool = (engine["num_gpu_blocks_override"] - 1) * engine["block_size"]
    longest = base.max_model_len
    if fault is None or not fault.beyond_pool:
        groups = 2 if base.window else 1
        longest = min(longest, max(pool // groups, 2))  # vLLM does not start with a pool that holds less than one
    return replace(base, engine=engine, max_model_len=longest)


def _draw_pauses(rng: random.Random, seconds: float) -> tuple[tuple[float, float], ...]:
    if rng.random() > 0.15:
        return ()
    return ((rng.uniform(0.2, 0.6) * seconds, min(log_uniform(rng, 2, 120), 0.3 * seconds)),)
