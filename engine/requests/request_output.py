"""The engine's report on a request after a step: sampled tokens, log probabilities, how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvscope.engine.requests.kv_transfer import KVTransferParams
from kvscope.monitor.events.kinds import Status


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
    """

    number: int
    sampled: Sequence[Sampled] = ()
    status: Status | None = None
    error: str = ""
    kv_offer: KVTransferParams | None = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens alone."""
        return [sampled.token_id for sampled in self.sampled]
