"""The seam between the lab and an engine under test: what an episode offers, and which engines there are.

An engine in another process is an episode too: `watch` has it write its recording into the directory, and `drain` reads
the EpisodeEnd that it sent. Nothing else passes between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from kvscope.monitor.incidents.draws import LONG_WATCH, draw_run
from kvscope.monitor.incidents.on_vllm.vllm_episode import VllmEpisode
from kvscope.monitor.incidents.own_episode import OwnEpisode
from kvscope.monitor.incidents.truth.episode_end import EpisodeEnd


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


MakeEpisode = Callable[[int, int, Path, bool], LabEpisode]
"""Make the episode of a run's number and a seed, with a directory for its recording.

The last argument asks for an engine without a fault that is watched for long.
"""


def own_episode(number: int, seed: int, directory: Path, only_healthy: bool = False) -> OwnEpisode:
    """Make a drawn episode of kvscope's own engine."""
    drawn = draw_run(number, seed, "", LONG_WATCH) if only_healthy else draw_run(number, seed)
    return OwnEpisode(drawn, directory)


def vllm_episode(number: int, seed: int, directory: Path, only_healthy: bool = False) -> VllmEpisode:
    """Make a drawn episode of vLLM's scheduler."""
    if only_healthy:
        return VllmEpisode(number, seed, directory, "", LONG_WATCH)
    return VllmEpisode(number, seed, directory)


ENGINES_UNDER_TEST: Final[Mapping[str, MakeEpisode]] = {"own": own_episode, "vllm": vllm_episode}
"""By the name that `monitor incidents --engine` takes. A trial names vLLM with its release: `vllm 0.32.0`."""
