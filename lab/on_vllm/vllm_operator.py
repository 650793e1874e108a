"""The operator of a bare scheduler: pauses it, puts it to sleep and gives it new weights, as vLLM's engine core does.

The core aborts or keeps the requests, waits until no step is in flight, and then drops its caches and its memory
(`pause_scheduler`, `sleep` and `wake_up` of vllm/v1/engine/core.py).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .vllm_draws import Outage

if TYPE_CHECKING:
    from .vllm_engine import VllmEngine


class ExecutorStandIn:
    """Stands in for the executor, whose `sleep` and `wake_up` the probe watches. There is no memory to give up."""

    def sleep(self, level: int = 1) -> None:
        """Do nothing."""

    def wake_up(self, tags: Any = None) -> None:
        """Do nothing."""


class Operator:
    """Has the outages of the engine's draw begin and end."""

    def __init__(self, engine: VllmEngine) -> None:
        self.executor = ExecutorStandIn()
        self._engine = engine
        self._begun: Outage | None = None
        for outage in engine.draw.outages:
            engine.at(outage.at_s, partial(self._begin, outage))

    def _begin(self, outage: Outage) -> None:
        if outage.kind == "sleep":
            self._engine.abort_all()
        self._pause("PAUSED_NEW" if outage.kind == "sleep" else "PAUSED_ALL")
        self._begun = outage
        self.check_in_flight()

    def check_in_flight(self) -> None:
        """Go on with what waits until no step is in flight."""
        outage = self._begun
        if outage is None or self._engine.has_steps_in_flight:
            return
        self._begun = None
        if outage.kind != "pause":
            self._engine.vllm.reset_prefix_cache(reset_running_requests=True)
        if outage.kind == "sleep":
            self.executor.sleep()
        self._engine.at(outage.seconds, partial(self._end, outage))

    def _end(self, outage: Outage) -> None:
        if outage.kind == "sleep":
            self.executor.wake_up()
        self._pause("UNPAUSED")

    def _pause(self, state: str) -> None:
        self._engine.vllm.set_pause_state(type(self._engine.vllm._pause_state)[state])
        self._engine.pause_noted()
