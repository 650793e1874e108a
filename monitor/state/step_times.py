"""The work of recent steps, and how long each took."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvscope.monitor.state.records import RequestState

MAX_STEPS_OF_A_KIND: Final = 128
MAX_IN_FLIGHT: Final = 64
LEAST_SECONDS: Final = 1e-5


class StepWork(NamedTuple):
    """The work of a step. `context`: KV tokens of its requests. `pairs`: of new tokens and context, of prompts."""

    tokens: int
    context: int
    pairs: int

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """The model's terms."""
        return 1.0, float(self.tokens), float(self.context), float(self.pairs)


class StepTimes:
    """The recent steps of one epoch, and the steps in flight.

    A step runs from its launch or from the end of the step before it, whichever is later: an engine that schedules
    ahead launches it while the other still runs.
    """

    def __init__(self) -> None:
        self.count = 0
        """Steps seen from launch to end."""
        self.longest_s = 0.0
        self.completed_ns = 0
        """When a step last completed, on the engine's monotonic clock."""
        self.last_work: StepWork | None = None
        """The work of the step whose launch was received last."""
        self._in_flight: dict[int, tuple[int, StepWork, dict[int, int]]] = {}
        """By step: when it was launched, its work, and its tokens of each request."""
        self._decode: deque[tuple[StepWork, float]] = deque(maxlen=MAX_STEPS_OF_A_KIND)
        self._prefill: deque[tuple[StepWork, float]] = deque(maxlen=MAX_STEPS_OF_A_KIND)

    def launch(
        self, step: int, at_ns: int, ids: list[int], tokens: list[int], requests: Mapping[int, RequestState]
    ) -> None:
        """Note a step that computes `tokens` of the requests `ids`."""
        context = pairs = 0
        ahead = [tokens_of for _, _, tokens_of in self._in_flight.values()]
        for number, count in zip(ids, tokens, strict=False):
            record = requests.get(number)
            computed = record.computed_tokens if record is not None else 0
            for tokens_of in ahead:  # an engine that schedules ahead has not computed these yet
                computed += tokens_of.get(number, 0)
            context += computed + count
            if count > 1:
                pairs += count * (computed + count // 2)
        if len(self._in_flight) >= MAX_IN_FLIGHT:  # their ends were lost
            self._in_flight.clear()
        self.last_work = StepWork(sum(tokens), context, pairs)
        self._in_flight[step] = at_ns, self.last_work, dict(zip(ids, tokens, strict=False))

    def complete(self, step: int, at_ns: int) -> None:
        """Note the end of a step."""
        launched = self._in_flight.pop(step, None)
        if launched is not None:
            launched_ns, work, _ = launched
            seconds = max((at_ns - max(launched_ns, self.completed_ns)) / 1e9, LEAST_SECONDS)
            (self._prefill if work.pairs else self._decode).append((work, seconds))
            self.count += 1
            self.longest_s = max(self.longest_s, seconds)
        self.completed_ns = at_ns

    def work_of(self, step: int) -> StepWork | None:
        """Return the work of a step in flight, or None if its launch was not seen."""
        launched = self._in_flight.get(step)
        return launched[1] if launched is not None else None

    @property
    def steps(self) -> list[tuple[StepWork, float]]:
        """The recent steps and their seconds, steps with and without a prompt in equal number where there are both."""
        return [*self._decode, *self._prefill]
