"""The seam between the lab and an engine under test: what an episode offers, and which engines there are.

An engine in another process is an episode too: `watch` has it write its recording into the directory, and `drain` reads
the EpisodeEnd that it sent. Nothing else passes between the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

from .draws import FAULT_CODES, LONG_WATCH, draw_run, fault_in_turn
from .on_vllm.fault_table import release_tuple
from .on_vllm.vllm_draws import faults_of, vllm_fault_in_turn
from .on_vllm.vllm_episode import VllmEpisode
from .on_vllm.vllm_worker import shared_worker
from .own_episode import OwnEpisode
from .truth.episode_end import EpisodeEnd


class LabEpisode(Protocol):
    """An episode of an engine under test, whose events go into a directory as a recording."""

    @property
    def faults(self) -> Sequence[str]:
        """The faults of the engine, none for a healthy one. The monitor never sees it."""
        ...

    @property
    def began_ns(self) -> int:
        """The wall time at which the episode began."""
        ...

    @property
    def pages(self) -> Sequence[tuple[int, str]]:
        """Metrics pages as text, each with the wall time in ns of its scrape."""
        ...

    def watch(self) -> None:
        """Run the watched part. The recording is complete when it returns."""
        ...

    def drain(self) -> EpisodeEnd:
        """Run on without new requests until nothing moves, and return the engine's final state."""
        ...


DrawnFrom = Literal["all", "healthy", "faults"]
"""The engines that runs are drawn from: all, those without a fault, each watched for long, or those with one fault,
where each fault has its turn.
"""
MakeEpisode = Callable[[int, int, Path, DrawnFrom, int], LabEpisode]
"""Make the episode of a run's number and a seed, with a directory for its recording, as the data-parallel rank of that
number.
"""
RANKS_SUFFIX: Final = "-ranks"
MOST_RANKS: Final = 4


def own_episode(number: int, seed: int, directory: Path, drawn_from: DrawnFrom = "all", rank: int = 0) -> OwnEpisode:
    """Make a drawn episode of kvscope's own engine."""
    if drawn_from == "healthy":
        return OwnEpisode(draw_run(number, seed, "", LONG_WATCH).of_rank(rank), directory)
    fault = fault_in_turn(number) if drawn_from == "faults" else None
    return OwnEpisode(draw_run(number, seed, fault).of_rank(rank), directory)


def vllm_episode(number: int, seed: int, directory: Path, drawn_from: DrawnFrom = "all", rank: int = 0) -> VllmEpisode:
    """Make a drawn episode of vLLM's scheduler."""
    if drawn_from == "healthy":
        return VllmEpisode(number, seed, directory, "", LONG_WATCH, rank)
    fault = vllm_fault_in_turn(number, shared_worker().release) if drawn_from == "faults" else None
    return VllmEpisode(number, seed, directory, fault, rank=rank)


def ranks_of(engine: str, number: int, seed: int) -> int:
    """Return how many data-parallel ranks the server of this run has, by the name of its engine under test."""
    several = engine.partition(" ")[0].endswith(RANKS_SUFFIX)
    return random.Random(f"ranks {seed} {number}").randint(2, MOST_RANKS) if several else 1


def make_ranks(
    engine: str, number: int, seed: int, directory: Path, drawn_from: DrawnFrom = "all"
) -> dict[Path, LabEpisode]:
    """Make the episodes of all ranks of a run's server, by the directory of each one's recording.

    Ranks of a dense model step independently of each other, and so do these.
    """
    make = ENGINES_UNDER_TEST[engine.partition(" ")[0].removesuffix(RANKS_SUFFIX)]
    ranks = ranks_of(engine, number, seed)
    directories = [directory / f"rank {rank}" for rank in range(ranks)] if ranks > 1 else [directory]
    return {path: make(number, seed, path, drawn_from, rank) for rank, path in enumerate(directories)}


def faults_in_turn(engine: str) -> Sequence[str]:
    """Return the faults of an engine under test in the order of their turns. vLLM is named with its release."""
    release = engine.partition(" ")[2]
    return [fault.name for fault in faults_of(release_tuple(release))] if release else FAULT_CODES


ENGINES_UNDER_TEST: Final[Mapping[str, MakeEpisode]] = {"own": own_episode, "vllm": vllm_episode}
"""By the name that `--engine` of `python -m kvscope.lab` takes. A trial names vLLM with its release: `vllm 0.32.0`."""
ENGINE_NAMES: Final = (*ENGINES_UNDER_TEST, *(name + RANKS_SUFFIX for name in ENGINES_UNDER_TEST))
"""Each engine alone, and as the data-parallel ranks of a server."""
