"""Stand-ins for the connector's worker, the grammar compiler and the model, on the lab's virtual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from kvscope.engine.bench.clock import VirtualClock

from .cache_groups import takes
from .scheduler_maker import AnyGrammar
from .vllm_draws import VllmDraw

SAMPLED_TOKENS: Final = (32, 256)
FETCHING_CLIENTS: Final = ("f-", "g-")
"""Clients whose prompts another engine always has."""
RENEWED_SHARE: Final = 2 / 3
"""The share of a lease for which NIXL's consumer renews it (vLLM, nixl/base_worker.py: `_lease_extension`)."""


class OtherEngine:
    """The other side of a prefill/decode pair, and the worker that reports transfers to the scheduler."""

    def __init__(self, draw: VllmDraw, clock: VirtualClock, note: Callable[[str, str], None]) -> None:
        self._draw = draw
        self._clock = clock
        self._note = note
        self._rng = random.Random(f"other {draw.base.seed}")
        self.never_ends: Callable[[Any], bool] = lambda _request: False
        """Whether the fetch of this request never ends."""
        self.never_sent: Callable[[Any], bool] = lambda _request: False
        """Whether the blocks of this request are never reported as sent."""
        self.is_asleep: Callable[[], bool] = lambda: False
        """Whether the engine waits for a request and asks for no reports."""
        self.fetching_s: dict[str, float] = {}
        """When the last fetch of a request began, in seconds of the clock."""
        self.loading: dict[str, bool] = {}
        """Fetches by request, and whether their end was reported to the scheduler."""
        self.kept: set[str] = set()
        """Finished requests whose blocks are kept."""
        self.pending = 0
        """Transfers and leases that will end by themselves."""
        self.polls = 0
        self.polled_s = 0.0
        """When the engine last asked, in seconds of the clock."""
        self._received: set[str] = set()
        self._sent: set[str] = set()

    def fetches(self, request: Any) -> bool:
        """Return whether another engine has the prompt."""
        draw = self._draw
        return bool(draw.fetched) and (
            request.request_id.startswith(FETCHING_CLIENTS) or self._rng.random() < draw.fetched
        )

    def keeps(self, _request: Any) -> bool:
        """Return whether another engine is to read the blocks."""
        return self._rng.random() < self._draw.kept

    def fetch_begins(self, request: Any, blocks: int) -> None:
        """Start the copy of so many blocks."""
        name = request.request_id
        self.loading[name] = False
        self.fetching_s[name] = self._clock.ns / 1e9
        if not self.never_ends(request):
            times = self._draw.base.latencies
            self._after(times.copy_s + times.copy_block_s * blocks, lambda: self._received.add(name))

    def keeping_begins(self, request: Any, _blocks: int) -> None:
        """Keep the blocks until the other engine has read them, or until the lease ends."""
        name = request.request_id
        self.kept.add(name)
        is_gone, draw = self.never_sent(request), self._draw
        if draw.renews:
            self._renew(name, is_gone)
            return
        lease_s = draw.lease_s or math.inf
        takes_s = math.inf if is_gone else self._rng.uniform(*draw.consumer_s)
        if takes_s < lease_s:
            self._after(takes_s, lambda: self._is_sent(name))
        elif draw.lease_s:
            self._after(lease_s, lambda: self._lease_ends(name))

    def _renew(self, name: str, dies: bool) -> None:
        """Keep blocks under a lease that the consumer renews until it has read them, or until it dies in its queue."""
        takes_s = self._rng.uniform(*self._draw.consumer_s)
        if not dies:
            self._after(takes_s, lambda: self._is_sent(name))
            return
        self._after(takes_s, lambda: self._note("moved", name))
        self._after(takes_s + RENEWED_SHARE * self._draw.lease_s, lambda: self._lease_ends(name))

    def _is_sent(self, name: str) -> None:
        self._sent.add(name)
        if self.is_asleep():
            self._note("sent-while-asleep", name)

    def _lease_ends(self, name: str) -> None:
        self._note("freed-by-lease", name)
        self._is_sent(name)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self.pending += 1

        def due() -> None:
            self.pending -= 1
            call()

        self._clock.at(self._clock.ns + round(seconds * 1e9), due)

    def report(self, scheduler: Any) -> Any:
        """Return the worker's report for the step that ends."""
        from vllm.v1.outputs import KVConnectorOutput

        self.polls += 1
        self.polled_s = self._clock.ns / 1e9
        requests = scheduler.requests
        received = {name for name in self._received if name in requests}
        sent = {name for name in self._sent if name in requests} - received
        for name in received:
            self.loading[name] = True
            self._note("moved", name)
        self._received, self._sent = set(), set()
        self.kept -= sent
        return KVConnectorOutput(finished_sending=sent or None, finished_recving=received or None)


class CompilerStandIn:
    """Compiles each grammar after a drawn time."""

    def __init__(self, scheduler: Any, clock: VirtualClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.never_compiles = False
        self.pending = 0
        if hasattr(scheduler.structured_output_manager, "grammar_bitmask"):
            scheduler.structured_output_manager.grammar_bitmask = lambda *_args, **_kwargs: None

    def compile(self, request: Any) -> None:
        """Start to compile the grammar of a request that has one."""
        wanted = request.structured_output_request
        if wanted is None:
            return
        future: Future[AnyGrammar] = Future()
        wanted._grammar = future
        if self.never_compiles:
            return
        self.pending += 1

        def done() -> None:
            self.pending -= 1
            future.set_result(AnyGrammar())

        self._clock.at(self._clock.ns + round(self._seconds * 1e9), done)


class ModelStandIn:
    """Stands in for the model: samples tokens, and accepts a share of the drafts that may fall over the episode."""

    def __init__(self, draw: VllmDraw, takes_arrays: bool) -> None:
        self._rng = random.Random(f"sampler {draw.base.seed}")
        self._draw = draw
        self._takes_arrays = takes_arrays
        self.gives_nothing: set[str] = set()
        """Requests whose sampled tokens are lost."""

    def output_of(self, plan: Any, partial: set[str], progress: float, connector_output: Any) -> Any:
        """Return the model's output of a step. partial: requests whose prompt is not computed yet."""
        import numpy as np
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(plan.num_scheduled_tokens)
        drafted = plan.scheduled_spec_decode_tokens
        sampled: list[Any] = [
            []
            if name in partial or name in self.gives_nothing
            else self.tokens(1 + self._accepted(drafted.get(name, ()), progress))
            for name in names
        ]
        if self._takes_arrays:
            sampled = [np.array(tokens, dtype=int) for tokens in sampled]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=connector_output,
            **takes(ModelRunnerOutput, spec_token_ids=None),
        )

    def tokens(self, count: int) -> list[int]:
        """Return so many tokens."""
        return [self._rng.randrange(*SAMPLED_TOKENS) for _ in range(count)]

    def _accepted(self, drafts: Sequence[int], progress: float) -> int:
        share = 0.8 * (1 - progress) if self._draw.drifts else 0.6
        count = 0
        for token in drafts:
            if token < 0 or self._rng.random() > share:
                break
            count += 1
        return count

    def draft(self, scheduler: Any, names: list[str]) -> None:
        """Propose drafts for the next step."""
        from vllm.v1.outputs import DraftTokenIds

        drafts = [self.tokens(self._draw.drafts) for _ in names]
        scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
