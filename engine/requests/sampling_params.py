"""How the next token is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvscope.engine.requests.structured_output import StructuredOutputs

MAX_N: Final = 128
"""OpenAI's limit."""
MAX_LOGPROBS: Final = 20
"""vLLM's default limit, and OpenAI's for chats."""
MAX_PENALTY: Final = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """As OpenAI and vLLM define them. temperature 0 is greedy, and top_k 0 means all.

    min_p: tokens less likely than this share of the likeliest are not drawn. presence_penalty and frequency_penalty are
    taken from the logit of a token that is in the output, once and for each time, while repetition_penalty divides a
    positive logit, and multiplies another, of a token that is in prompt or output. n: how many outputs, where each but
    the first has a seed of its own, the next number. logprobs: how many of the likeliest tokens are reported at each
    place, besides the one that was chosen (None: none are reported). prompt_logprobs: the same of each token of the
    prompt but the first. All of the prompt is computed then, whatever the prefix cache has. `stop` strings end the
    output and are not part of it, unless include_stop_str_in_output. min_tokens: before so many, no stop string, stop
    token or end of sequence counts, though a grammar may end an output before. logit_bias: added to the logits of these
    token ids. structured_outputs: a schema or a regular expression that the output keeps to, and ends with.

    Raises ValueError, naming the parameter and what it may be.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature} and must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p} and must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k} and must be 0 (all) or above")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p} and must be 0 (all) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise ValueError(f"{name} is {getattr(self, name)} and must be -{MAX_PENALTY:g} to {MAX_PENALTY:g}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty} and must be above 0; 1 is none")
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n is {self.n} and must be 1 to {MAX_N}")
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MAX_LOGPROBS:
                raise ValueError(f"{name} is {getattr(self, name)} and must be 0 to {MAX_LOGPROBS}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens} and must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens} and must be 0 to max_tokens, which is {self.max_tokens}")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise ValueError("logit_bias holds a number that is not finite")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every output at once")
        # Lists are what JSON and callers bring.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids))

    @property
    def penalises(self) -> bool:
        """Whether tokens that were there already have other logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def each(self) -> list[SamplingParams]:
        """Return the parameters of the n outputs, one for each."""
        return [replace(self, n=1, seed=None if self.seed is None else self.seed + i) for i in range(self.n)]
