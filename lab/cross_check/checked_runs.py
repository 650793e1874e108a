"""Runs drawn at random whose events are recorded to the end of the drain, with their faults and without them.

Each is kept in a directory: `recording` and `end.json`, and `undone` and `undone.json` if it has a fault. No batch of
these recordings is lost, also where the draw would lose some: another method needs all events.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..draws import Draw, draw_run
from ..on_vllm.fork_server import EpisodeOrder
from ..on_vllm.vllm_draws import draw_vllm_run
from ..on_vllm.vllm_faults import Breaker
from ..on_vllm.vllm_worker import shared_worker
from ..own_episode import OwnEpisode
from ..truth.episode_end import EpisodeEnd

LARGEST_NUMBER = 100_000


class RunToCheck(NamedTuple):
    """A run of the lab: its engine, own or vllm, its number and its seed."""

    engine: str
    number: int
    seed: int

    @property
    def name(self) -> str:
        """A short name, which its directory has too."""
        return f"{self.engine}-{self.number}"


class KeptRun(NamedTuple):
    """A run that was run: its faults, the engine's final state, and that of the same without the faults.

    by_load: the load alone is the fault, and undoing it changes nothing. lease_s: see SecondTruth.
    """

    run: RunToCheck
    faults: Sequence[str]
    by_load: bool
    lease_s: float
    recording: Path
    end: EpisodeEnd
    undone: EpisodeEnd | None


def drawn_at_random(count: int, seed: int) -> list[RunToCheck]:
    """Return so many different runs, the first half on kvscope's own engine and the rest on vLLM."""
    numbers = random.Random(seed).sample(range(LARGEST_NUMBER), count)
    own = count // 2
    return [RunToCheck("own" if place < own else "vllm", number, seed) for place, number in enumerate(numbers)]


def kept_run(run: RunToCheck, directory: Path) -> KeptRun:
    """Return the run, run now if `directory` does not have it yet."""
    faults, by_load, lease_s = _faults_of(run)
    folder = directory / run.name
    ends = [_end_of(run, folder / "recording", folder / "end.json", undone=False)]
    if faults:
        ends.append(_end_of(run, folder / "undone", folder / "undone.json", undone=True))
    undone = ends[1] if faults else None
    return KeptRun(run, faults, by_load, lease_s, folder / "recording", ends[0], undone)


def end_of_draw(draw: Draw, recording: Path) -> EpisodeEnd:
    """Run an episode of kvscope's own engine, recorded to the end of its drain."""
    episode = OwnEpisode(draw, recording, keep_recording=True)
    episode.watch()
    return episode.drain()


def _faults_of(run: RunToCheck) -> tuple[Sequence[str], bool, float]:
    if run.engine == "own":
        return draw_run(run.number, run.seed).faults, False, 0.0
    draw = draw_vllm_run(run.number, run.seed, shared_worker().release)
    patched = hasattr(Breaker, draw.fault.replace("-", "_"))
    return ((draw.fault,) if draw.fault else ()), not patched, 0.0 if draw.renews else draw.lease_s


def _end_of(run: RunToCheck, recording: Path, end: Path, *, undone: bool) -> EpisodeEnd:
    if not end.exists():
        recording.mkdir(parents=True)
        end.write_bytes((_own_end if run.engine == "own" else _vllm_end)(run, recording, undone))
    return msgspec.json.decode(end.read_bytes(), type=EpisodeEnd)


def _own_end(run: RunToCheck, recording: Path, undone: bool) -> bytes:
    draw = replace(draw_run(run.number, run.seed), lost=())
    return msgspec.json.encode(end_of_draw(draw.undone() if undone else draw, recording))


def _vllm_end(run: RunToCheck, recording: Path, undone: bool) -> bytes:
    """Raise RuntimeError with what went wrong in vLLM's process."""
    worker = shared_worker()
    with tempfile.TemporaryDirectory(prefix="kvscope-vllm-") as scratch:
        order = EpisodeOrder(
            run.number, run.seed, worker.release, str(recording), scratch, undone=undone, to_the_end=True
        )
        answer = worker.run(order)
        if answer.error:
            raise RuntimeError(answer.error)
        return Path(answer.end).read_bytes()
