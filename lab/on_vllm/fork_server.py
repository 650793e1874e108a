"""Imports vLLM once and forks for each episode: run by vLLM's Python, driven by VllmWorker.

Each line of its input is an order as JSON, each line of its output the answer: the path of a file with the encoded
EpisodeEnd, or what went wrong. The first line of output is vLLM's release.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Final

import msgspec

from kvscope.engine.requests.request import SamplingParams
from kvscope.monitor.base.process_limits import collect_rarely

from ..drain_limits import LAB_THRESHOLDS
from ..draws import BRIEF_WATCH
from ..needed_loads import WatchRange
from .vllm_draws import draw_vllm_run
from .vllm_end import VllmRun

WARM_UP_FAULT: Final = "sending-never-reported"
"""A fault of every release whose engine has a connector."""


class EpisodeOrder(msgspec.Struct):
    """An episode to run: what to draw, and the directories for its recording and for all else.

    undone: run it without its fault. to_the_end: record the drain too, and lose no batch of it. rank: of the server's
    data-parallel ranks.
    """

    number: int
    seed: int
    release: str
    recording: str
    scratch: str
    fault: str | None = None
    watched: WatchRange = BRIEF_WATCH
    undone: bool = False
    to_the_end: bool = False
    rank: int = 0


class EpisodeAnswer(msgspec.Struct):
    """Where the encoded EpisodeEnd is, or what went wrong."""

    end: str = ""
    error: str = ""


def run_order(order: EpisodeOrder) -> EpisodeAnswer:
    """Run one episode in this process."""
    scratch = Path(order.scratch)
    draw = draw_vllm_run(order.number, order.seed, order.release, order.fault, order.watched).of_rank(order.rank)
    draw = draw.undone() if order.undone else draw
    draw = draw.recorded_whole() if order.to_the_end else draw
    run = VllmRun(draw, Path(order.recording), scratch / "model", keep_recording=order.to_the_end)
    run.watch()
    path = scratch / "end.json"
    path.write_bytes(msgspec.json.encode(run.drain()))
    return EpisodeAnswer(end=str(path))


def _in_a_fork(order: EpisodeOrder) -> EpisodeAnswer:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = run_order(order)
        except BaseException as error:  # whatever it is, the lab shows it beside the run's number
            traceback.print_exc()
            answer = EpisodeAnswer(error=f"{type(error).__name__}: {error}")
        os.write(writer, msgspec.json.encode(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answered = pipe.read()
    os.waitpid(child, 0)
    return msgspec.json.decode(answered, type=EpisodeAnswer) if answered else EpisodeAnswer(error="the episode died")


def _warm_up(release: str) -> None:
    """Make a scheduler and a request, for what that imports: an episode imports nothing, since each is a fork of this
    process.

    The imports of vLLM 0.18 alone take most of a minute on a busy core, and a fork would repeat them.
    """
    with tempfile.TemporaryDirectory(prefix="kvscope-vllm-") as directory:
        draw = draw_vllm_run(0, 0, release, WARM_UP_FAULT)
        run = VllmRun(draw, Path(directory), Path(directory) / "model")
        run.engine.submit("warm-up", [1], SamplingParams(max_tokens=1))
        run.engine.stop_recording()
    collect_rarely(LAB_THRESHOLDS)


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    import vllm

    _warm_up(vllm.__version__)
    print(vllm.__version__, file=answers)
    for line in sys.stdin.buffer:
        answer = _in_a_fork(msgspec.json.decode(line, type=EpisodeOrder))
        print(msgspec.json.encode(answer).decode(), file=answers)


if __name__ == "__main__":
    main()
