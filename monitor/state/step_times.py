"""The work of recent steps, and how long each took."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvscope.monitor.state.records import RequestState

MAX_STEPS_OF_A_KIND: Final = 128
MAX_IN_FLIGHT: Final = 64
MAX_PROMPT_REACHES: Final = 4096
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


class PromptReach(NamedTuple):
    """The tokens of a request that steps were launched for, from a chunk of its prompt on, and up to which they lead.

    A probe reports now and then how far requests are, and not after each step. preemptions: of the request, then.
    """

    preemptions: int
    chunk_end: int
    reached: int


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
        self._prompts: dict[int, PromptReach] = {}
        """By request, until it is reported that the chunk is computed."""
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
            if record is not None and (count > 1 or number in self._prompts):
                computed = self._reached(record, computed, count)
            context += computed + count
            if count > 1:
                pairs += count * (computed + count // 2)
        if len(self._in_flight) >= MAX_IN_FLIGHT:  # their ends were lost
            self._in_flight.clear()
        if len(self._prompts) > MAX_PROMPT_REACHES:
            self._prompts = {number: known for number, known in self._prompts.items() if number in requests}
        self.last_work = StepWork(sum(tokens), context, pairs)
        self._in_flight[step] = at_ns, self.last_work, dict(zip(ids, tokens, strict=False))

    def _reached(self, record: RequestState, computed: int, count: int) -> int:
        """Return the tokens that precede the `count` new ones, at least as many as the state knows, `computed`."""
        known = self._prompts.pop(record.number, None)
        if known is not None and known.preemptions == record.preemptions and record.computed_tokens < known.chunk_end:
            computed = max(computed, known.reached)
        else:
            known = None
        if count > 1 and computed + 1 < record.prompt_tokens + record.output_tokens:  # not drafts after its last token
            known = PromptReach(record.preemptions, computed + count, 0)
        if known is not None:
            self._prompts[record.number] = known._replace(reached=computed + count)
        return computed

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
