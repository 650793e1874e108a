"""An engine without a model: the real pool, manager, scheduler and event log, in virtual time, with random tokens.

What it says goes the real road: log, packer, bytes, decode, ledger.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

from kvscope.engine.bench.clock import VirtualClock
from kvscope.engine.blocks.block_pool import NULL_BLOCK_COUNT, BlockPool
from kvscope.engine.blocks.kv_cache_manager import KVCacheManager
from kvscope.engine.blocks.prefix_hashes import PrefixHasher
from kvscope.engine.blocks.table_audit import TableAuditor
from kvscope.engine.connectors.base import KVLoad
from kvscope.engine.faults import Faults
from kvscope.engine.requests.request import Request, SamplingParams
from kvscope.engine.scheduling.scheduler import Scheduler
from kvscope.engine.scheduling.scheduler_state import SchedulerOutput
from kvscope.monitor.contract.description import EngineDescription, KVGroup
from kvscope.monitor.contract.event_log import Clock, EventLog
from kvscope.monitor.contract.wire import Batch, Keyframe, decode, encode
from kvscope.monitor.probes.packer import Packer, Vitals


class SlowConnector:
    """Keeps the blocks of finished requests for some polls, as a transfer would; `share` of requests.

    And has some of the blocks that `load_share` of the requests look for, which come after some polls, or fail.
    """

    def __init__(self, rng: random.Random, share: float = 1.0, polls_needed: int = 3, load_share: float = 0.0) -> None:
        self.rng = rng
        self.share = share
        self.polls_needed = polls_needed
        self.load_share = load_share
        self.failing = 0.2
        self.whole = False
        """Whether it has all that is looked for."""
        self.polls = 0
        self.loads = 0
        self._pending: dict[int, int] = {}
        self._loading: dict[int, int] = {}

    def find(self, request: Request, first: int, end: int) -> int:
        if self.rng.random() >= self.load_share:
            return 0
        return end - first if self.whole else self.rng.randint(min(1, end - first), end - first)

    def start_load(self, load: KVLoad) -> None:
        self.loads += 1
        self._loading[load.request.number] = self.polls + self.rng.randint(1, self.polls_needed)

    def loaded(self) -> list[tuple[int, bool]]:
        ended = [number for number, due in self._loading.items() if due <= self.polls]
        for number in ended:
            del self._loading[number]
        return [(number, self.rng.random() >= self.failing) for number in ended]

    def request_finished(self, request: Request, blocks: list[int]) -> bool:
        if not blocks or self.rng.random() >= self.share:
            return False
        self._pending[request.number] = self.polls + self.rng.randint(1, self.polls_needed)
        return True

    def completed(self) -> list[int]:
        self.polls += 1
        done = [number for number, due in self._pending.items() if due <= self.polls]
        for number in done:
            del self._pending[number]
        return done

    def lease_ended(self, number: int) -> None:
        self._pending.pop(number, None)

    def close(self) -> None:
        pass


class Lab:
    """One engine in virtual time. `frames` has everything it ever sent."""

    def __init__(
        self,
        *,
        total: int = 65,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 10_000,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        window: int | None = None,
        connector_share: float = 0.0,
        load_share: float = 0.0,
        lease_s: float = 0.0,
        async_scheduling: bool = False,
        faults: Iterable[str] = (),
        seed: int = 0,
        capacity: int = 4096,
        engine: str = "lab@127.0.0.1:0/0",
        clock: Clock | None = None,
        pack: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = clock or VirtualClock()
        self._pack = pack  # False: a Publisher takes what is logged
        self.log = EventLog(self.clock, capacity)
        self.faults = Faults.parse(faults)
        self.pool = BlockPool(total, self.log, self.faults)
        hasher = PrefixHasher(block_size, b"lab") if prefix_caching else None
        self._most_in_flight = 1 + async_scheduling
        # With a window there are two KV groups: layers that see everything, and layers that see so many tokens.
        windows = [None] if window is None else [None, window]
        ahead = self._most_in_flight * max_num_batched_tokens
        self.manager = KVCacheManager(self.pool, block_size, hasher, self.faults, windows, ahead)
        moves_kv = connector_share or load_share
        self.connector = SlowConnector(self.rng, connector_share, load_share=load_share) if moves_kv else None
        self.scheduler = Scheduler(
            self.manager,
            self.log,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=policy,
            connector=self.connector,
            lease_s=lease_s,
            faults=self.faults,
        )
        self.auditor = TableAuditor(self.manager, self.scheduler.requests, self.scheduler.deferred)
        self.packer = Packer(self.log, engine, self.vitals)
        self.frames: list[Batch | Keyframe] = []
        self.in_flight: deque[SchedulerOutput] = deque()
        """Steps launched and not complete, oldest first; each runs when the one before it is."""
        self.launched = (-1, 0)
        self._numbers = 0
        self.passed_over = 0
        """Requests that wait as a test says: the scheduler does not have them, and the engine's queues count them."""
        description = EngineDescription(engine="kvscope", max_num_seqs=max_num_seqs, scheduling_policy=policy)
        description.groups = [KVGroup("sliding_window" if w else "full_attention", 1, w or 0) for w in windows]
        description.enable_prefix_caching, description.faults = prefix_caching, list(faults)
        self._start(description)

    def _start(self, description: EngineDescription) -> None:
        """Log the start of the engine, with its description."""
        description.block_size = self.manager.block_size
        description.num_gpu_blocks = self.pool.total
        description.max_num_batched_tokens = self.scheduler.max_num_batched_tokens
        self.log.started(self.pool.total, NULL_BLOCK_COUNT, self.manager.block_size, description.to_json())
        self.flush()

    def vitals(self) -> Vitals:
        s = self.scheduler
        polls = self.connector.polls if self.connector else 0
        return Vitals(*self.launched, len(s.running), s.num_waiting + self.passed_over, 0, polls, s.passes)

    def arrive(self, prompt: int | list[int], max_tokens: int = 8, priority: int = 0, name: str = "") -> Request:
        """A request with a prompt of that many random tokens, or of those tokens."""
        self._numbers += 1
        if isinstance(prompt, int):
            prompt = [self.rng.randrange(1000) for _ in range(prompt)]
        self.log.tick()
        request = Request(
            self._numbers,
            name or f"r-{self._numbers}",
            prompt,
            SamplingParams(max_tokens=max_tokens),
            priority,
            self.clock.monotonic_ns(),
        )
        self.scheduler.add(request)
        return request

    def blocks_of(self, number: int) -> list[int]:
        """The blocks that a request has, of all groups."""
        return [block for held in self.manager.held(number) for block in held]

    def abort(self, request: Request) -> None:
        self.log.tick()
        self.scheduler.abort(request.number)

    def step(self, seconds: float = 0.01, stop_chance: float = 0.0) -> list[Request]:
        """One pass of the engine's loop; the requests that finished in it."""
        self.log.tick()
        self.scheduler.take_completions()
        if self.connector is not None:
            self.scheduler.take_loads()
        plan = self.scheduler.schedule()
        if plan.shares:
            self._launch(plan)
        self._pass(seconds)
        finished: list[Request] = []
        if self.in_flight and (len(self.in_flight) == self._most_in_flight or not plan.shares):
            finished = self._complete(seconds, stop_chance)
        self.auditor.slice()
        self.flush()
        return finished

    def _launch(self, plan: SchedulerOutput) -> None:
        if not self.in_flight:
            self.launched = (plan.step, self.clock.monotonic_ns())
        self.in_flight.append(plan)

    def _complete(self, seconds: float, stop_chance: float) -> list[Request]:
        plan = self.in_flight.popleft()
        self.launched = (self.in_flight[0].step, self.clock.monotonic_ns()) if self.in_flight else (-1, 0)
        count = sum(share.samples for share in plan.shares)
        sampled = [self.rng.randrange(1000) for _ in range(count)]
        stops = [self.rng.random() < stop_chance for _ in range(count)]
        self.log.tick()
        finished = self.scheduler.complete(plan, sampled, stops)
        self.log.step_completed(plan.step, round(seconds * 1e9), plan.limit, *self.pool.counts()[:3])
        return finished

    def _pass(self, seconds: float) -> None:
        """Virtual time is told to pass; real time passes by itself."""
        if isinstance(self.clock, VirtualClock):
            self.clock.sleep(seconds)

    def flush(self) -> list[Batch]:
        """Pack what was logged; the new frames, through bytes and back."""
        step = self.scheduler.step
        self.log.flush(step - 1, step - 1, self.pool.counts())
        return self.take()

    def take(self) -> list[Batch]:
        new = [decode(encode(batch)) for batch in self.packer.pack()] if self._pack else []
        self.frames += [frame for frame in new if isinstance(frame, Batch)]
        return [frame for frame in new if isinstance(frame, Batch)]

    def keyframe(self) -> Keyframe:
        frame = decode(encode(self.packer.keyframe()))
        assert isinstance(frame, Keyframe)
        return frame

    def heartbeat(self) -> Batch:
        frame = decode(encode(self.packer.heartbeat()))
        assert isinstance(frame, Batch)
        self.frames.append(frame)
        return frame

    def run_until_idle(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.scheduler.parked and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")
