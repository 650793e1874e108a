"""Requests on their way in, checked and numbered for the engine's thread, and statistics of how long they take."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.trace_context import TraceContext

from ..blocks.kv_cache_manager import KVCacheManager
from ..faults import Faults
from ..requests.request import KVTransferParams, Request, SamplingParams


class Refused(ValueError):
    """The request cannot be admitted in any state of the engine. The message names the reason and the bounds."""


class EngineDead(RuntimeError):
    """The engine has stopped, or an error in its own books has stopped it."""


class PromptCheck:
    """Which prompts the model can take and the pool can hold."""

    def __init__(self, max_model_len: int, vocab_size: int, manager: KVCacheManager, faults: Faults) -> None:
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._manager = manager
        self._faults = faults

    def __call__(self, prompt_token_ids: list[int], request_id: str) -> None:
        """Raise Refused for a prompt that the model cannot take, or the pool cannot hold."""
        length, vocab, manager = len(prompt_token_ids), self._vocab_size, self._manager
        if length == 0:
            raise Refused("the prompt is empty: it must have at least one token")
        if length >= self._max_model_len:
            raise Refused(
                f"the prompt has {length} tokens and max_model_len is {self._max_model_len}, the output included:"
                f" send at most {self._max_model_len - 1}"
            )
        if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab:
            raise Refused(f"the prompt has a token id outside of the vocabulary, which is 0 to {vocab - 1}")
        if not manager.fits(length) and not self._faults.triggers_on_request("stuck.never-fits", request_id):
            fitting = bisect_left(range(length), True, key=lambda tokens: not manager.fits(tokens)) - 1
            raise Refused(
                f"the prompt has {length} tokens and needs {manager.blocks_for(length)} KV blocks; the whole pool"
                f" has {manager.pool.usable}: send at most {fitting} tokens, or give the engine a larger pool"
                " (kv_cache_memory_bytes, num_gpu_blocks_override)"
            )


class Intake:
    """Requests of other threads to the engine's thread, and the event that wakes it. Any thread may call it."""

    def __init__(self, log: EventLog, faults: Faults) -> None:
        self.open: set[int] = set()
        """Numbers of the requests whose last output has not been handed out."""
        self.woken = False
        self.refusing = False
        self.fetched = False
        """Whether the connector has something for `Scheduler.take_loads`."""
        self._log = log
        self._faults = faults
        self._numbers = itertools.count(1)
        self._arrivals: deque[Request] = deque()
        self._ends: deque[tuple[int, Status]] = deque()
        self._wake = threading.Condition()

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        priority: int,
        kv_transfer: KVTransferParams | None,
        trace: TraceContext | None,
    ) -> int:
        """Queue a request that was checked, and return its number."""
        number = next(self._numbers)
        arrived_ns = self._log.clock.monotonic_ns()
        request = Request(number, request_id, prompt_token_ids, params, priority, arrived_ns, kv_transfer)
        self.open.add(number)
        self._log.received(number, request_id, len(prompt_token_ids), trace)
        if not self._faults.triggers("stuck.front-end", request_id):
            self._arrivals.append(request)
            self.notify()
        return number

    def end(self, number: int, status: Status) -> None:
        """Have a request ended by the next pass, if it has not ended by then."""
        self._ends.append((number, status))
        self.notify()

    def refuse_all(self) -> None:
        """Take no more requests, and end those that there are."""
        self.refusing = True
        self._ends += [(number, Status.FINISHED_ABORTED) for number in list(self.open)]
        self.notify()

    def notify(self) -> None:
        """Wake the engine's thread."""
        with self._wake:
            self.woken = True
            self._wake.notify()

    def fetch_ended(self) -> None:
        """Wake the engine's thread because the connector has loaded something. From the connector's own thread."""
        if not self._faults.triggers("stuck.lost-wakeup", ""):
            self.fetched = True
            self.notify()

    def rest(self, wait: Callable[[float | None], None], pause: float | None, closing: Callable[[], bool]) -> None:
        """Have the engine's thread `wait` for so many seconds (None: without end), or until it is woken."""
        with self._wake:
            if not (self.woken or closing()):
                wait(pause)
            self.woken = False

    def wait(self, pause: float | None) -> None:
        """Wait in `rest`, in real time."""
        self._wake.wait(pause)

    def arrivals(self) -> Iterator[Request]:
        """Take the requests that came since the last pass."""
        while self._arrivals:
            yield self._arrivals.popleft()

    def ends(self) -> Iterator[tuple[int, Status]]:
        """Take the ends that were asked for since the last pass."""
        while self._ends:
            yield self._ends.popleft()


LATENCY_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's bounds, as all that follow."""
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
TOKENS_OF_A_STEP: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
S_PER_NS: Final = 1e-9


class BucketCounts:
    """Counts of values by upper bound. The last count is of those above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestStatistics:
    """How long requests wait and run, and how many tokens they have, as histograms with vLLM's names and bounds.

    The engine's thread counts, and /metrics reads. Each interval covers the same as in vLLM
    (`vllm/v1/metrics/stats.py`): queue from arrival to the first admission, prefill from there to the first token,
    decode from there to the last, inference from admission to the last token. Preemptions in between are part of them.
    `max_model_len` bounds the histograms of tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.histograms: dict[str, BucketCounts] = {
            "time_to_first_token_seconds": BucketCounts(FIRST_TOKEN_S),
            "inter_token_latency_seconds": BucketCounts(BETWEEN_TOKENS_S),
            "request_time_per_output_token_seconds": BucketCounts(BETWEEN_TOKENS_S),
            "e2e_request_latency_seconds": BucketCounts(LATENCY_S),
            "request_queue_time_seconds": BucketCounts(LATENCY_S),
            "request_inference_time_seconds": BucketCounts(LATENCY_S),
            "request_prefill_time_seconds": BucketCounts(LATENCY_S),
            "request_decode_time_seconds": BucketCounts(LATENCY_S),
            "request_prompt_tokens": BucketCounts(tokens),
            "request_generation_tokens": BucketCounts(tokens),
            "request_max_num_generation_tokens": BucketCounts(tokens),
            "request_params_max_tokens": BucketCounts(tokens),
            "request_num_preemptions": BucketCounts(PREEMPTIONS),
            "iteration_tokens_total": BucketCounts(TOKENS_OF_A_STEP),
        }
        """By name, without vLLM's prefix."""
        self._first = self.histograms["time_to_first_token_seconds"]
        self._between = self.histograms["inter_token_latency_seconds"]

    def token(self, request: Request, now_ns: int) -> None:
        """Count a token that the request was given."""
        if request.first_token_ns:
            self._between.observe((now_ns - request.last_token_ns) * S_PER_NS)
        else:
            request.first_token_ns = now_ns
            self._first.observe((now_ns - request.arrived_ns) * S_PER_NS)
        request.last_token_ns = now_ns

    def step(self, tokens: int) -> None:
        """Count a step that computed so many tokens of prompts, and sampled the others."""
        self.histograms["iteration_tokens_total"].observe(tokens)

    def finished(self, request: Request, now_ns: int) -> None:
        """Count a request that has ended. Intervals that it never began are 0, as in vLLM."""
        outputs = len(request.output_token_ids)
        first, last = request.first_token_ns, request.last_token_ns
        admitted = request.admitted_ns or now_ns
        decode_s = (last - first) * S_PER_NS
        self._observe("e2e_request_latency_seconds", (now_ns - request.arrived_ns) * S_PER_NS)
        self._observe("request_queue_time_seconds", (admitted - request.arrived_ns) * S_PER_NS)
        self._observe("request_prefill_time_seconds", (first - admitted) * S_PER_NS if first else 0.0)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_inference_time_seconds", (last - admitted) * S_PER_NS if last else 0.0)
        self._observe("request_time_per_output_token_seconds", decode_s / (outputs - 1) if outputs > 1 else 0.0)
        self._observe("request_prompt_tokens", request.num_prompt_tokens)
        self._observe("request_generation_tokens", outputs)
        self._observe("request_max_num_generation_tokens", outputs)
        self._observe("request_params_max_tokens", request.params.max_tokens)
        self._observe("request_num_preemptions", request.num_preemptions)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


def token_bounds(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, … up to `most`: vLLM's bounds of counts of tokens."""
    bounds = [step * 10**power for power in range(len(str(most))) for step in (1, 2, 5)]
    return [bound for bound in bounds if bound <= most]
