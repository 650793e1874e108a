"""Latencies of an engine in virtual time besides its model: copies of a connector, and grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Any

from ..connectors.host import HostConnector
from ..models import LoadedModel
from ..requests.structured_output import GrammarCompiler, StructuredOutputs
from .clock import VirtualClock


@dataclass(frozen=True)
class OutsideTimes:
    """Seconds of virtual time that each of these takes (0: none).

    A copy in or out takes copy_s and copy_block_s for each block, one after the other over one link. A grammar takes
    grammar_s, one after the other.
    """

    copy_s: float = 0.0
    copy_block_s: float = 0.0
    grammar_s: float = 0.0

    @property
    def takes_time_to_copy(self) -> bool:
        """Whether copies take any time."""
        return self.copy_s > 0 or self.copy_block_s > 0


class VirtualLink:
    """One job at a time, each for so many seconds of virtual time. `wake` is called when one is done.

    `deliver` hands over finished jobs, outside of the engine's own locks: other threads work on it.
    """

    def __init__(self, clock: VirtualClock, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._free_ns = 0
        self._due: list[Callable[[], None]] = []
        self.pending = 0
        """Jobs that were asked for and are not handed over."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` made when the jobs before this one are done, and `seconds` more have passed."""
        self._free_ns = max(self._free_ns, self._clock.ns) + round(seconds * 1e9)
        self.pending += 1

        def done() -> None:
            self._due.append(call)
            self._wake()

        self._clock.at(self._free_ns, done)

    def deliver(self) -> None:
        """Make the calls that are due."""
        due, self._due = self._due, []
        for call in due:
            self.pending -= 1
            call()


class DelayedJobs(Queue[Any]):
    """The jobs of a HostConnector, which its worker gets when their time on the link has passed."""

    def __init__(self, link: VirtualLink, latencies: OutsideTimes) -> None:
        super().__init__()
        self.link = link
        self._latencies = latencies

    def put(self, job: Any, block: bool = True, timeout: float | None = None) -> None:
        """Put the job on the link. None, which ends the worker, goes at once."""
        if job is None:
            super().put(None, block, timeout)
            return
        seconds = self._latencies.copy_s + self._latencies.copy_block_s * len(job.blocks)
        self.link.after(seconds, lambda: self._arrive(job))

    def _arrive(self, job: Any) -> None:
        super().put(job)
        self.join()  # the worker's copy takes no virtual time of its own


def delay_copies(connector: HostConnector, link: VirtualLink, latencies: OutsideTimes) -> None:
    """Let the connector's copies take virtual time over the link. None must have been asked for yet."""
    connector.replace_jobs(DelayedJobs(link, latencies))


class DelayedGrammars(GrammarCompiler):
    """Compiles a grammar when its virtual time has passed."""

    def __init__(self, loaded: LoadedModel, wake: Callable[[], None], link: VirtualLink, seconds: float) -> None:
        super().__init__(lambda: loaded.tokenizer.for_grammars(loaded.config.eos_token_ids), wake)
        self._link = link
        self._seconds = seconds

    def start(self, number: int, wanted: StructuredOutputs) -> None:
        """Compile it for the request `number`, after those that were asked for before."""
        self._link.after(self._seconds, lambda: self._compile_now(number, wanted))

    def _compile_now(self, number: int, wanted: StructuredOutputs) -> None:
        super().start(number, wanted)
        self.settle()
