"""A bare vLLM Scheduler under a probe, in virtual time: what the incidents of tests.probes.bare_incidents act on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO, Final

from kvscope.engine.bench.clock import VirtualClock
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.wire import Batch, Keyframe, encode
from kvscope.monitor.probes.packer import Packer
from kvscope.monitor.probes.vllm.plugin import engine_name
from kvscope.monitor.probes.vllm.probe import Probe
from tests.probes.bare_scheduler import Bare

STEP_S: Final = 0.02
DRAIN_NS: Final = 50_000_000
HEARTBEAT_NS: Final = 1_000_000_000
os.environ.setdefault("KVSCOPE_EVENTS", "tcp://127.0.0.1:5757")


class Scene:
    """A bare scheduler under a probe. `turn` is a pass and its step; `clock` stands still but for it and `hang`."""

    def __init__(self, model: str, file: BinaryIO, *, clock: VirtualClock | None = None, **settings: Any) -> None:
        self.clock = clock or VirtualClock()
        self._file = file
        self._next_drain_ns = self._next_beat_ns = 0
        rank, batched_tokens = settings.pop("rank", None), settings.pop("batched_tokens", 0)
        self.bare = Bare(model, **settings)
        if batched_tokens:
            self.bare.scheduler.max_num_scheduled_tokens = batched_tokens
        if rank is not None:
            parallel = self.bare.scheduler.vllm_config.parallel_config
            parallel.data_parallel_size, parallel.data_parallel_rank, parallel.data_parallel_index = 2, rank, rank
        self.scheduler = self.bare.scheduler
        log = EventLog(self.clock)
        self.probe = Probe(self.scheduler, log, b"test", self.clock)
        self.probe.start()
        self.packer = Packer(log, engine_name(self.scheduler), self.probe.vitals)
        self.came = 0
        self.write()

    def write(self) -> None:
        """Write what was sent, as often as the drain thread does; a heartbeat too if one is due."""
        if self.clock.ns < self._next_drain_ns:
            return
        self._next_drain_ns = self.clock.ns + DRAIN_NS
        self.probe.flush()
        frames: list[Batch | Keyframe] = [*self.packer.pack()]
        if self.clock.ns >= self._next_beat_ns:
            self._next_beat_ns = self.clock.ns + HEARTBEAT_NS
            frames += [self.packer.heartbeat(), *self.packer.pack()]
        for frame in frames:
            payload = encode(frame)
            self._file.write(len(payload).to_bytes(4, "little") + payload)

    def turn(self, step_s: float = STEP_S) -> None:
        """One pass of the engine core's loop; an engine without requests makes none."""
        if self.scheduler.has_requests():
            self.bare.schedule()
            self.write()
            self.clock.sleep(step_s)
            self.bare.update()
        else:
            self.clock.sleep(step_s)
        self.write()

    def run(self, seconds: float, load: Callable[[], None] = lambda: None, step_s: float = STEP_S) -> None:
        """Passes for so long; `load` is called before each."""
        until = self.clock.ns + round(seconds * 1e9)
        while self.clock.ns < until:
            load()
            self.turn(step_s)

    def hang(self, seconds: float) -> None:
        """A step is launched, and does not return for so long."""
        self.bare.schedule()
        self.idle(seconds)
        self.bare.update()
        self.write()

    def idle(self, seconds: float) -> None:
        """The engine's thread makes no pass for so long; its heart beats."""
        for _ in range(round(seconds * 4)):
            self.clock.sleep(0.25)
            self.write()

    def ask(self, name: str, prompt_tokens: int, max_tokens: int, priority: int = 0) -> Any:
        """A request comes; vLLM's object for it."""
        self.came += 1
        known = set(self.scheduler.requests)
        prompt = [1 + (7 * self.came + n) % 300 for n in range(prompt_tokens)]
        self.bare.arrive(name, prompt, max_tokens, priority)
        (new,) = set(self.scheduler.requests) - known
        return self.scheduler.requests[new]

    def ask_prepared(self, prepare: Callable[[Any], None], name: str, prompt_tokens: int, max_tokens: int) -> Any:
        """The same, of a request that is changed before the scheduler gets it."""
        add = self.scheduler.add_request

        def prepared(request: Any) -> None:
            prepare(request)
            add(request)

        self.scheduler.add_request = prepared
        try:
            return self.ask(name, prompt_tokens, max_tokens)
        finally:
            del self.scheduler.add_request

    def chat(self) -> None:
        """Short requests, two at a time."""
        if sum(request.request_id.startswith("chat") for request in self.scheduler.requests.values()) < 2:
            self.ask(f"chat-{self.came}", 40, 30)


Open = Callable[..., Scene]
"""Make a scene that writes to the incident's file."""
