"""Requests on their way in: checked, numbered and handed to the engine's thread, with the ends that others ask for."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator

from kvscope.engine.blocks.kv_cache_manager import KVCacheManager
from kvscope.engine.faults import Faults
from kvscope.engine.requests.kv_transfer import KVTransferParams
from kvscope.engine.requests.request import Request
from kvscope.engine.requests.sampling_params import SamplingParams
from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.events.trace_context import TraceContext


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
