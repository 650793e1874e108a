"""A request: its sampling parameters, its record inside the engine, and the outputs that it gets."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvscope.monitor.contract.kinds import FIRST_FINISHED, Cause, Status

from .structured_output import Matcher, StructuredOutputs


class KVTransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of a transfer between two engines, in vLLM's words.

    The engine that computes the prompt gets `do_remote_decode`, keeps the blocks when it is done, and answers with the
    parameters for the other engine: `do_remote_prefill`, and where the prompt's KV can be fetched.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_endpoint: str = ""
    remote_request_id: str = ""
    remote_num_blocks: int = 0

    def check(self) -> None:
        """Raise ValueError for values that contradict each other, or an endpoint that is not of this machine."""
        if self.do_remote_decode == self.do_remote_prefill:
            raise ValueError("kv_transfer_params: one of do_remote_decode and do_remote_prefill must be true")
        if self.do_remote_prefill:
            if not self.remote_request_id or self.remote_num_blocks < 0:
                raise ValueError("kv_transfer_params: do_remote_prefill needs what the other engine answered with")
            check_endpoint(self.remote_endpoint)


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError unless it is on this machine: the KV of prompts goes over it in the clear."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and endpoint != "ipc://":
        return
    try:
        local = parts.scheme == "tcp" and ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        local = False
    if not local:
        raise ValueError(
            f"{endpoint!r} is not an endpoint for KV: it must be on this machine, tcp://127.0.0.1:PORT or ipc://PATH"
        )


MAX_N: Final = 128
"""OpenAI's limit."""
MAX_LOGPROBS: Final = 20
"""vLLM's default limit, and OpenAI's for chats."""
MAX_PENALTY: Final = 2.0


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, as OpenAI and vLLM define it. temperature 0 is greedy, and top_k 0 means all.

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


class Logprob(NamedTuple):
    """How likely a token was, before penalties and temperature: the natural logarithm, and the rank, from 1."""

    token_id: int
    logprob: float
    rank: int


PromptLogprobs = list[Sequence[Logprob]]
"""Log probabilities of each token of a prompt: its own, then those of the likeliest by rank. Nothing precedes the
first, which has none.
"""


class Sampled(NamedTuple):
    """A token that was chosen. `logprobs`, if asked for: its own, then those of the likeliest by rank.

    ends: the output's grammar lets nothing follow. error: why none of what it lets follow can.
    """

    token_id: int
    logprobs: Sequence[Logprob] = ()
    ends: bool = False
    error: str = ""


class Output(NamedTuple):
    """News of one request: the tokens that came, and, in its last news only, how it ended, what went wrong, and which
    KV it leaves for another engine. With the first token, the prompt's log probabilities, if asked for.

    blamed: the field of SamplingParams that `error` is about, if it is the client's and not the engine's.
    """

    number: int
    sampled: Sequence[Sampled] = ()
    status: Status | None = None
    error: str = ""
    kv_offer: KVTransferParams | None = None
    prompt_logprobs: PromptLogprobs | None = None
    blamed: str = ""

    @property
    def token_ids(self) -> list[int]:
        """The tokens alone."""
        return [sampled.token_id for sampled in self.sampled]


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one request, from its arrival to its end."""

    number: int
    """Its name in events."""
    id: str
    """Its name to its client."""
    token_ids: list[int]
    """Its prompt, and its output so far."""
    params: SamplingParams
    priority: int = 0
    arrived_ns: int = 0
    kv_transfer: KVTransferParams | None = None
    """What it asks of a transfer between engines."""
    kv_offer: KVTransferParams | None = None
    """What its end offers to another engine."""
    admitted_ns: int = 0
    """When it was first admitted, or 0 before."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    """When the engine handed tokens out, or 0 before."""
    num_prompt_tokens: int = field(init=False)
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache. A preemption sets it to 0: prompt and output so far are computed again."""
    num_in_flight_tokens: int = 0
    """Tokens that steps compute which were launched and are not complete."""
    num_output_placeholders: int = 0
    """Tokens that these steps will sample."""
    num_preemptions: int = 0
    last_step: int = -1
    """The last step that it is part of."""
    digests: list[bytes] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = field(init=False, default=None)
    """Those of each token of the prompt, if requested, or None once they were handed out."""
    matcher: Matcher | None = None
    """There as soon as its grammar is compiled, and None if it has none."""
    status: Status = Status.WAITING
    cause: Cause = Cause.NEW
    times_passed_over: int = 0
    shortage: tuple[int, int] | None = None
    progressed_step: int = -1

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [()] * self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens whose K and V are in the cache once the steps in flight are complete."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def is_finished(self) -> bool:
        """Whether its status is terminal."""
        return self.status >= FIRST_FINISHED

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
