"""Between the engine's thread and an event loop: requests go in, their texts come out as they are made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.trace_context import TraceContext

from ..core.engine_core import EngineCore
from ..requests.request import KVTransferParams, Output, PromptLogprobs, Sampled, SamplingParams
from .text_stream import OPENAI_FINISH_REASONS, TextStream

SUBMITTED_AT_ONCE: Final = 16
"""Requests of one client that go to the engine before others' turn."""


class EngineError(RuntimeError):
    """The engine failed at a request, or stops. `blamed`: the field of SamplingParams that it failed for, if any."""

    def __init__(self, message: str, blamed: str = "") -> None:
        super().__init__(message)
        self.blamed = blamed


@dataclass(frozen=True)
class Delta:
    """The new part of the `index`-th text: its tokens, and the text that is certain by now.

    `reason` and `stop_reason`, the stop string or token that ended it, in its last one only.
    """

    index: int
    text: str = ""
    sampled: Sequence[Sampled] = ()
    reason: str = ""
    stop_reason: str | int | None = None


class FrontEnd:
    """Takes requests to `core`, and its outputs to the waiting clients."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._queues: dict[int, asyncio.Queue[Output]] = {}

    def start(self, on_failure: Callable[[], None]) -> None:
        """Let the engine run, and hand its outputs out in the event loop that calls this. Call `on_failure` if it
        dies.
        """
        loop = asyncio.get_running_loop()

        def hand_out(outputs: list[Output]) -> None:
            for output in outputs:
                queue = self._queues.get(output.number)
                if queue is not None:
                    queue.put_nowait(output)
            if self.core.failure:
                on_failure()

        def deliver(outputs: list[Output]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed, so no caller waits any more
                loop.call_soon_threadsafe(hand_out, outputs)

        self.core.start(deliver)

    async def submit(
        self,
        names: Sequence[str],
        prompts: list[list[int]],
        params: SamplingParams,
        priority: int,
        kv_transfer: KVTransferParams | None = None,
        trace: TraceContext | None = None,
    ) -> Texts:
        """Have params.n texts made for each prompt. Raises Refused, and then has none made, and EngineDead.

        `names`: of the requests, one a text. Other clients are served between every few of them.
        """
        each = [(prompt, one) for prompt in prompts for one in params.each()]
        for place, (name, (prompt, _)) in enumerate(zip(names, each, strict=True), 1):
            self.core.check(prompt, name)
            await _let_others_run(place)
        texts = Texts(self, sum(len(prompt) for prompt in prompts))
        try:
            for place, (name, (prompt, one)) in enumerate(zip(names, each, strict=True), 1):
                number = self.core.submit(name, prompt, one, priority, kv_transfer, trace)
                texts.made[number] = TextStream(self.core.loaded.tokenizer, one)
                texts.sampled[number] = []
                texts.prompts[number] = prompt
                self._queues[number] = texts.outputs
                await _let_others_run(place)
        except BaseException:
            texts.close(client_gone=False)
            raise
        return texts

    def forget(self, number: int) -> None:
        """Drop this request's outputs, which no client waits for any more."""
        del self._queues[number]


async def _let_others_run(place: int) -> None:
    if place % SUBMITTED_AT_ONCE == 0:
        await asyncio.sleep(0)


class Texts:
    """The texts that one client waits for, in the order of its prompts, those of one prompt together."""

    def __init__(self, front_end: FrontEnd, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()
        self.made: dict[int, TextStream] = {}
        self.sampled: dict[int, list[Sampled]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        """Where they were asked for, from the first token on."""
        self.reasons: dict[int, str] = {}
        self.kv_offer: KVTransferParams | None = None
        self._front_end = front_end

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far."""
        return sum(len(text.token_ids) for text in self.made.values())

    def prompt_tokens_of(self, number: int) -> list[Sampled]:
        """Return the prompt's tokens, with the requested log probabilities."""
        prompt = self.prompts[number]
        logprobs_by_token = self.prompt_logprobs.get(number) or [()] * len(prompt)
        return [Sampled(token, logprobs) for token, logprobs in zip(prompt, logprobs_by_token, strict=True)]

    async def next(self) -> Delta | None:
        """Return the next part of any of the texts, or None when all have ended. Raises EngineError."""
        if len(self.reasons) == len(self.made):
            return None
        output = await self.outputs.get()
        number, text = output.number, self.made[output.number]
        if number in self.reasons:
            return Delta(list(self.made).index(number))  # made after its stop string, before the engine knew
        if output.status is not None:
            self.reasons[number] = OPENAI_FINISH_REASONS[output.status]
            self.kv_offer = output.kv_offer
        if output.error or output.status == Status.FINISHED_ABORTED:
            raise EngineError(output.error or "the engine is stopping", output.blamed)
        self.sampled[number] += output.sampled
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[number] = output.prompt_logprobs
        new = text.add(output.token_ids, output.status)
        if text.stopped and output.status is None:
            self._front_end.core.end(number, Status.FINISHED_STOPPED)
        if text.stopped:
            self.reasons[number] = "stop"
        reason = self.reasons.get(number, "")
        return Delta(list(self.made).index(number), new, output.sampled, reason, text.stop_reason)

    def close(self, *, client_gone: bool) -> None:
        """Wait no longer. Texts that have not ended are ended, and the engine learns whether their client has gone."""
        core = self._front_end.core
        for number in self.made:
            self._front_end.forget(number)
            if number in self.reasons:
                continue
            if client_gone:
                core.client_gone(number)
            else:
                core.end(number)
