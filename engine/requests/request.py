"""A request inside the engine, from its arrival to its end."""

from __future__ import annotations

from kvscope.engine.requests.kv_transfer import KVTransferParams
from kvscope.engine.requests.request_output import PromptLogprobs
from kvscope.engine.requests.sampling_params import SamplingParams
from kvscope.engine.requests.structured_output import Matcher
from kvscope.monitor.events.kinds import FIRST_FINISHED, Cause, Status


class Request:
    """The scheduler's record of one request.

    `number` names it in events, `id` to its client. `num_computed_tokens` counts the tokens whose K and V are in the
    cache. A preemption sets it back to 0, and prompt and output so far are computed again.

    For steps that were launched and are not complete, `num_in_flight_tokens` counts the tokens they compute,
    `num_output_placeholders` those they will sample. `last_step` is the last step that it is part of.

    `kv_transfer` is what it asks of a transfer between engines, `kv_offer` what its end offers to another.
    `admitted_ns` is when it was first admitted, `first_token_ns` and `last_token_ns` when the engine handed tokens out,
    or 0 before.

    `prompt_logprobs` has those of each token of the prompt, if requested, or None once they were handed out.

    `matcher` is there as soon as its grammar is compiled, and None if it has none.
    """

    __slots__ = (
        "admitted_ns",
        "arrived_ns",
        "cause",
        "digests",
        "first_token_ns",
        "id",
        "kv_offer",
        "kv_transfer",
        "last_step",
        "last_token_ns",
        "matcher",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "number",
        "output_token_ids",
        "params",
        "priority",
        "progressed_step",
        "prompt_logprobs",
        "shortage",
        "status",
        "times_passed_over",
        "token_ids",
    )

    def __init__(
        self,
        number: int,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        arrived_ns: int = 0,
        kv_transfer: KVTransferParams | None = None,
    ) -> None:
        self.number = number
        self.id = request_id
        self.params = params
        self.priority = priority
        self.arrived_ns = arrived_ns
        self.admitted_ns = self.first_token_ns = self.last_token_ns = 0
        self.kv_transfer = kv_transfer
        self.kv_offer: KVTransferParams | None = None
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.last_step = -1
        self.digests: list[bytes] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [()] * len(prompt_token_ids)
        self.matcher: Matcher | None = None
        self.status = Status.WAITING
        self.cause = Cause.NEW
        self.times_passed_over = 0
        self.shortage: tuple[int, int] | None = None
        self.progressed_step = -1

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
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
        """One more output token."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
