"""An engine in virtual time: all of it is real but the model, whose steps last as long as a formula gives.

    a step's seconds = base_s + per_token_s * tokens computed + per_kv_token_s * tokens of KV read
                     + per_attended_s * pairs of a computed token and one that it attends to

Nothing waits for real time, so ten minutes of a fault pass in a second or a few. The connector's copies and a compiled
grammar take the time that OutsideTimes gives them, by default none. The watchdog, the heartbeats and the loop's own
pauses take their time on the virtual clock. Time passes where the engine would wait for a step: with async_scheduling
the next one is planned by then. The same load gives the same run each time.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kvscope.monitor.contract.event_log import EventLog, SilentLog
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.wire import Batch, encode
from kvscope.monitor.probes.packer import Packer

from ..config import EngineConfig
from ..connectors.host import HostConnector
from ..core.engine_core import EngineCore, LaunchedStep
from ..core.idle import BLOCKED_PAUSE_S
from ..execution.cuda_graphs import DecodeGraphs
from ..execution.input_batch import InputBatch as ModelBatch
from ..execution.memory_plan import Reading
from ..models import LoadedModel, ModelConfig
from ..requests.request import Output, Sampled
from ..scheduling.scheduler_state import SchedulerOutput
from .clock import VirtualClock
from .latencies import DelayedGrammars, OutsideTimes, VirtualLink, delay_copies

DRAIN_S: Final = 0.1
"""How often events are kept."""
SIMULATED_HEARTBEAT_S: Final = 1.0
MOST_DOUBLED_PAUSES: Final = 9
"""Five seconds between passes that do nothing, at most."""
DISCARD_S: Final = 20.0
"""How often what was logged is dropped once nothing records it."""
NON_TORCH: Final = 128 << 20
ACTIVATIONS: Final = 64 << 20
LOGITS: Final = 4 * 131_072
"""Bytes of a token's, in a vocabulary of that size."""
PRINTABLE: Final = range(0x20, 0x7F)
"""Tokens that are sampled: there in any vocabulary, and none of them ends an output."""


@dataclass(frozen=True)
class StepTime:
    """How long a step takes. Raises ValueError, naming the figure and what it may be.

    The defaults are about those of a dense model of 8 billion parameters in 16 bits, of which a device reads 3.3 TB/s
    and computes 500 TFLOP/s: 16 GB of weights in each step, 16 GFLOP a token, and 128 KiB of KV for each token read.
    jitter: the standard deviation of the logarithm of each step's time. The first `slow_steps` steps of an epoch take
    `slow_factor` times as long, as kernels that are compiled while requests wait do.
    """

    base_s: float = 5e-3
    per_token_s: float = 32e-6
    per_kv_token_s: float = 40e-9
    per_attended_s: float = 0.0
    jitter: float = 0.0
    slow_steps: int = 0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.base_s <= 0:
            raise ValueError(f"base_s is {self.base_s} and must be above 0: time passes in steps")
        for name in ("per_token_s", "per_kv_token_s", "per_attended_s", "jitter", "slow_steps", "slow_factor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)} and must be 0 or above")

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        """Return the seconds of a step that computes this many tokens and reads the KV of this many."""
        return self.base_s + self.per_token_s * tokens + self.per_kv_token_s * kv_tokens

    def of(self, plan: SchedulerOutput) -> float:
        """Seconds of a step with that plan. The same step of the same plan takes the same time."""
        tokens = sum(share.num_tokens for share in plan.shares)
        seconds = self.seconds(tokens, sum(share.start + share.num_tokens for share in plan.shares))
        if self.per_attended_s:
            pairs = sum(share.num_tokens * (share.start + share.num_tokens / 2) for share in plan.shares)
            seconds += self.per_attended_s * pairs
        if self.jitter:
            seconds *= random.Random(plan.step).lognormvariate(0.0, self.jitter)
        return seconds * self.slow_factor if plan.step < self.slow_steps else seconds


class SampledPlace(NamedTuple):
    """The place of a token to sample, with its request by number."""

    number: int
    place: int


class SimulatedDevice:
    """A device of `total` bytes by its figures alone. `held`: what the engine has of it now."""

    def __init__(self, total: int) -> None:
        self.held = 0
        self._total = total

    def read(self) -> Reading:
        """See Device."""
        return Reading(self._total, max(self._total - self.held, 0), self.held, 0)

    def peak_of(self, _run: Callable[[], None]) -> int:
        """See Device."""
        return ACTIVATIONS

    def non_torch(self, weights: int) -> int:
        """See Device. It is asked first, when nothing but the weights is there."""
        self.held = weights + NON_TORCH
        return NON_TORCH


class SimulatedRunner:
    """Stands for ModelRunner. Its samples depend on the seed, the request's number and the place alone."""

    def __init__(self, seed: int, model: ModelConfig, block_size: int) -> None:
        self._seed = seed
        self._model = model
        self._block_size = block_size

    def capture(self, sizes: Sequence[int]) -> DecodeGraphs:
        """See ModelRunner: their inputs."""
        return DecodeGraphs(_compute_nothing, sizes, self._model, self._block_size, "cpu")

    def prepare(self, plan: SchedulerOutput, _tables: Mapping[int, Sequence[Sequence[int]]]) -> list[SampledPlace]:
        """See ModelRunner."""
        return [SampledPlace(s.request.number, s.start + s.num_tokens) for s in plan.shares if s.samples]

    def run(self, batch: list[SampledPlace]) -> Callable[[], list[Sampled]]:
        """See ModelRunner."""
        drawn = [zlib.crc32(f"{self._seed} {number} {place}".encode()) for number, place in batch]
        return lambda: [Sampled(PRINTABLE[each % len(PRINTABLE)]) for each in drawn]

    def check(self) -> None:
        """See ModelRunner: nothing that could fail."""

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """See ModelRunner: nothing, of as many blocks."""
        return torch.empty(0, 2, len(blocks))

    def scatter(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """See ModelRunner."""


class SimulatedEngine(EngineCore):
    """An engine of `config` in virtual time, which passes while `run` is called, with `time` as its clock.

    step_time: of the model that it pretends to run, where `loaded` gives only its settings. latencies: of the engine's
    other waits. drain_s: how often events are kept. blocked_s: seconds between passes while requests wait and none can
    be scheduled. A memory_budget is that of a device which holds nothing besides. journal: a directory to keep the
    events in, as engine `name`. Raises ValueError for settings that do not go with that.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        *,
        step_time: StepTime | None = None,
        latencies: OutsideTimes | None = None,
        journal: Path | None = None,
        name: str = "simulated@127.0.0.1:0/0",
        stall_s: float = 30.0,
        drain_s: float = DRAIN_S,
        blocked_s: float = BLOCKED_PAUSE_S,
    ) -> None:
        _refuse_what_takes_real_time(config)
        self.time = VirtualClock()
        self._step_time = step_time or StepTime()
        self._until = 0
        self._blocked_s = blocked_s
        self._doublings = 0
        """Doublings of the pause between passes that do nothing, once nothing records them."""
        self._recording_stopped = False
        self._hangs = False
        self._device = SimulatedDevice(config.memory_budget) if config.memory_budget is not None else None
        super().__init__(
            config,
            loaded,
            stall_s=stall_s,
            clock=self.time,
            log=SilentLog(self.time) if journal is None else EventLog(self.time),
            runner=SimulatedRunner(config.seed, loaded.config, config.block_size),
            device=self._device,
        )
        self._links: list[VirtualLink] = []
        latencies = latencies or OutsideTimes()
        if isinstance(self.connector, HostConnector) and latencies.takes_time_to_copy:
            self._links.append(VirtualLink(self.time, self.intake.notify))
            delay_copies(self.connector, self._links[-1], latencies)
        if latencies.grammar_s:
            self._links.append(VirtualLink(self.time, self.intake.notify))
            self._grammars = DelayedGrammars(loaded, self.intake.notify, self._links[-1], latencies.grammar_s)
        self._stop_repeating = [self.time.every(min(1.0, stall_s / 4), self.watchdog.look)]
        self._batches_to_lose = 0
        self.lost_batches = 0
        """Batches that were left out of the journal."""
        self._journal: JournalWriter | None = None
        if journal is not None:
            self._packer = Packer(self.log, name, self.vitals, folds_late=True)
            keyframe = lambda: encode(self._packer.keyframe())  # noqa: E731
            self._journal = JournalWriter(journal, self._packer.epoch, keyframe, clock=self.time)
            self._stop_repeating += (
                self.time.every(drain_s, self._drain),
                self.time.every(SIMULATED_HEARTBEAT_S, lambda: self._keep(self._packer.heartbeat())),
            )

    @property
    def now_s(self) -> float:
        """Seconds on the virtual clock."""
        return self.time.ns / 1e9

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Have `call` made so long after now: a client that comes, or goes."""
        self.time.at(self.time.ns + round(seconds * 1e9), call)

    def run(self, seconds: float, deliver: Callable[[list[Output]], None] = lambda _: None) -> None:
        """Let that much time pass. `deliver` gets the outputs of each pass."""
        self._until = self.time.ns + round(seconds * 1e9)
        while self.time.ns < self._until and not self.failure:
            if self._hangs:  # all that the engine's thread does is wait
                self.time.pass_to(self._until)
                continue
            deliver(self.step())
            if self._worked:
                self._doublings = 0
            self._deliver_jobs()
            if self.scheduler.parked:
                self._grammars.settle()
            if isinstance(self.connector, HostConnector):
                self.connector.settle()
            self._rest()
            self._deliver_jobs()

    def _deliver_jobs(self) -> None:
        for link in self._links:
            link.deliver()

    def close(self) -> None:
        """Close as EngineCore does, and keep the last events."""
        super().close()
        self.stop_recording()

    def lose_batches(self, count: int) -> None:
        """Leave the next `count` batches out of the journal, which then goes on with a keyframe."""
        self._batches_to_lose = count

    def stop_recording(self) -> None:
        """Close the journal with all that was logged so far. The engine can run on, and audits itself no more.

        Nothing reads what it logs from then on, so that hours without a step cost no more than a step.
        """
        if self._journal is not None:
            self._drain()
            self._journal.close()
            self._journal = None
            for stop in self._stop_repeating:
                stop()
            self.log.on = False
            self._recording_stopped = True
            self.time.every(DISCARD_S, self.log.flushed.clear)

    @property
    def virtual_jobs(self) -> int:
        """Copies and grammars that were asked for and will be done in virtual time."""
        return sum(link.pending for link in self._links)

    @property
    def hangs(self) -> bool:
        """Whether a step was launched that never returns."""
        return self._hangs

    @property
    def leaked(self) -> int:
        """Bytes of the simulated device that the fault sizing.elsewhere took."""
        return 0 if self._device is None else self._device.held - self._planned_bytes

    @property
    def _planned_bytes(self) -> int:
        plan = self.plan
        return plan.weights + plan.non_torch + plan.activations + plan.kv_pool + plan.graphs

    def _emit_started(self) -> None:
        if self._device is not None:
            self._device.held = self._planned_bytes
        super()._emit_started()

    def _run_model(self, _step: int, batch: list[SampledPlace], sampled: Future[Callable[[], list[Sampled]]]) -> None:
        if self._device is not None and self.faults.triggers("sizing.elsewhere", ""):
            self._device.held += len(batch) * LOGITS
        sampled.set_result(self.runner.run(batch))

    def _complete(self, launched: LaunchedStep) -> list[Output]:
        """Time passes until the step is over. One that hangs stays in flight, until the engine is closed."""
        step = launched.plan.step
        if not self._closing and self.faults.triggers_on_request("stuck.engine-stalled", f"step {step}"):
            self._in_flight.appendleft(launched)
            self._hangs = True
            return []
        self.time.sleep(self._step_time.of(launched.plan))
        return super()._complete(launched)

    def _wait(self, pause: float | None) -> None:
        if pause is not None and self.scheduler.has_work:
            pause = max(pause, self._blocked_s)
        if pause is not None and self._recording_stopped:
            pause *= 1 << self._doublings
            self._doublings = min(self._doublings + 1, MOST_DOUBLED_PAUSES)
        end = self._until if pause is None else min(self._until, self.time.ns + round(pause * 1e9))
        while not self.intake.woken and self.time.pass_to(end):
            pass
        while self.time.pass_to(self.time.ns):  # who comes at the same time is there for the same pass
            pass

    def _drain(self) -> None:
        for batch in self._packer.pack():
            self._keep(batch)

    def _keep(self, batch: Batch) -> None:
        if self._journal is None:
            return
        if self._batches_to_lose:
            self._batches_to_lose -= 1
            self.lost_batches += 1
            if not self._batches_to_lose:  # a live reader asks for one when it sees the gap
                self._journal.append(encode(self._packer.keyframe()), batch.sequence)
            return
        self._journal.append(encode(batch), batch.sequence)


def _compute_nothing(_batch: ModelBatch) -> torch.Tensor:
    raise AssertionError("a simulated decode is not computed")


def _refuse_what_takes_real_time(config: EngineConfig) -> None:
    if config.kv_connector == "peer":
        raise ValueError("kv_connector 'peer' needs another engine, which real time passes for: take 'host'")
