"""Offline use: prompts in, texts out, in the caller's own thread.

with LLM("tiny") as llm:
    for output in llm.generate(["Hello", "Bye"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvscope.monitor.contract.kinds import Status

from ..config import TINY, EngineConfig
from ..core.assembly import EventStream
from ..core.engine_core import EngineCore
from ..models import load_model
from ..requests.request import Logprob, Output, Sampled, SamplingParams
from .text_stream import OPENAI_FINISH_REASONS, TextStream

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

PromptInput = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One text and the tokens it was made of. finish_reason: stop, length, abort or error."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None = None
    """At each place, by token id: the chosen token's, and those of the likeliest (None unless requested)."""


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log probabilities of each token of the prompt, by token id: its own, and those of the likeliest, or None for the
    first, which nothing precedes. None unless asked for.
    """


class LLM:
    """An engine for offline use. `settings` are EngineConfig's fields. `stream` is the endpoint of its events, if any.

    Raises ValueError for settings that are none, or do not fit each other or the model.
    """

    def __init__(self, model: str = TINY, *, stream: EventStream | None = None, **settings: Any) -> None:
        unknown = settings.keys() - EngineConfig.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ValueError(f"there is no setting {', '.join(sorted(unknown))}; there are {known}")
        config = EngineConfig(model=model, **settings)
        self.core = EngineCore(config, load_model(config), stream)
        self._requests = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine."""
        self.core.close()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs, in the order of the prompts. A prompt is a text or a list of token ids.

        sampling_params: for all prompts, or one for each. Raises ValueError for a prompt that the model cannot take or
        the pool cannot hold, before any has run, and RuntimeError if the engine fails.
        """
        wanted = _as_list(prompts)
        given = sampling_params or SamplingParams()
        each = [given] * len(wanted) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(wanted):
            raise ValueError(f"there are {len(wanted)} prompts and {len(each)} sampling params: give one, or one each")
        tokenizer = self.core.loaded.tokenizer
        ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in wanted]
        names_of = [self._names(params.n) for params in each]
        for prompt_ids, names in zip(ids, names_of, strict=True):
            for name in names:
                self.core.check(prompt_ids, name)
        work: dict[int, _Work] = {}
        outputs: list[list[_Work]] = []
        for prompt_ids, params, names in zip(ids, each, names_of, strict=True):
            numbers = [self.core.submit(name, prompt_ids, p) for name, p in zip(names, params.each(), strict=True)]
            outputs.append([_Work(TextStream(tokenizer, params), params.logprobs) for _ in numbers])
            work |= zip(numbers, outputs[-1], strict=True)
        first = self._requests - len(wanted) + 1
        try:
            self._run(work)
        except BaseException:
            for number in work:
                self.core.end(number)
            if not self.core.failure:
                self.core.step()
            raise
        return [
            RequestOutput(
                f"llm-{first + place}",
                prompt if isinstance(prompt, str) else None,
                prompt_ids,
                [one.output(index) for index, one in enumerate(of_prompt)],
                of_prompt[0].prompt_logprobs,
            )
            for place, (prompt, prompt_ids, of_prompt) in enumerate(zip(wanted, ids, outputs, strict=True))
        ]

    def _names(self, count: int) -> list[str]:
        """Ids of the next prompt's outputs."""
        self._requests += 1
        return [f"llm-{self._requests}" + (f"-{index}" if count > 1 else "") for index in range(count)]

    def _run(self, work: dict[int, _Work]) -> None:
        scheduler = self.core.scheduler
        while self.core.in_flight:
            launched = scheduler.step
            outputs = self.core.step()
            for output in outputs:
                if work[output.number].take(output):
                    self.core.end(output.number, Status.FINISHED_STOPPED)
            if scheduler.step == launched and not outputs:
                time.sleep(0.001)  # a grammar is compiled first, or the connector must give blocks back


class _Work:
    """One output on its way."""

    def __init__(self, text: TextStream, logprobs: int | None) -> None:
        self.text = text
        self.sampled: list[Sampled] = []
        self.reason = ""
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._logprobs = logprobs

    def take(self, output: Output) -> bool:
        """Whether a stop string ended it before the engine did. Raises RuntimeError if the engine failed at it, and
        ValueError if it did for a field of the SamplingParams.
        """
        if output.blamed:
            raise ValueError(f"{output.blamed}: {output.error}")
        if output.error:
            raise RuntimeError(output.error)
        if self.reason:
            return False
        self.sampled += output.sampled
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [
                _by_token(logprobs_of_prompt) if logprobs_of_prompt else None
                for logprobs_of_prompt in output.prompt_logprobs
            ]
        self.text.add(output.token_ids, output.status)
        if self.text.stopped:
            self.reason = "stop"
        elif output.status is not None:
            self.reason = OPENAI_FINISH_REASONS[output.status]
        return self.text.stopped and output.status is None

    def output(self, index: int) -> CompletionOutput:
        logprobs = None
        if self._logprobs is not None:
            logprobs = [_by_token(chosen.logprobs) for chosen in self.sampled]
        return CompletionOutput(index, self.text.text, self.text.token_ids, self.reason, logprobs)


def _by_token(logprobs: Sequence[Logprob]) -> dict[int, Logprob]:
    """Backwards, so that the chosen token's own rank stands where it is among the likeliest too."""
    return {one.token_id: one for one in reversed(logprobs)}


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(token, int) for token in prompts):
        return [[token for token in prompts if isinstance(token, int)]]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]
