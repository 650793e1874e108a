"""An episode of vLLM's scheduler as the lab sees it: another process runs it, and this one judges the recording."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvscope.engine.bench.clock import VirtualClock

from ..drain_limits import NotFinished
from ..draws import BRIEF_WATCH
from ..needed_loads import WatchRange
from ..truth.episode_end import EpisodeEnd
from .fork_server import EpisodeOrder
from .vllm_draws import draw_vllm_run
from .vllm_worker import shared_worker


class VllmEpisode:
    """A drawn episode of vLLM's scheduler whose events are recorded in `directory`. See LabEpisode.

    Raises RuntimeError from `watch` with what went wrong in the other process.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        directory: Path,
        fault: str | None = None,
        watched: WatchRange = BRIEF_WATCH,
        rank: int = 0,
    ) -> None:
        self._worker = shared_worker()
        release = self._worker.release
        draw = draw_vllm_run(number, seed, release, fault, watched).of_rank(rank)
        self.faults: Sequence[str] = (draw.fault,) if draw.fault else ()
        self.began_ns = VirtualClock().time_ns()
        self.pages: Sequence[tuple[int, str]] = ()
        self._scratch = Path(tempfile.mkdtemp(prefix="kvscope-vllm-"))
        self._order = EpisodeOrder(number, seed, release, str(directory), str(self._scratch), fault, watched, rank=rank)
        self._end: EpisodeEnd | None = None

    def watch(self) -> None:
        """Run all of it. The recording is complete when this returns."""
        try:
            answer = self._worker.run(self._order)
            if answer.error:
                raise RuntimeError(answer.error)
            self._end = msgspec.json.decode(Path(answer.end).read_bytes(), type=EpisodeEnd)
        except NotFinished:  # its process runs on, and would give its answer to the next episode
            shared_worker().kill()
            shared_worker.cache_clear()
            raise
        finally:
            shutil.rmtree(self._scratch)

    def drain(self) -> EpisodeEnd:
        """Return the final state."""
        assert self._end is not None
        return self._end
