"""The memory plan: what the device has, what the engine needs of it besides KV, and what that leaves for KV.

On CUDA the plan is over the device's memory, as the driver and torch's allocator count it. On the CPU it is over a
budget that is stated (`memory_budget`): all that the process keeps resident counts against it, the interpreter and its
libraries too, as non-torch. Without a budget the CPU has no plan, and the pool has its configured size.

    requested     = total * gpu_memory_utilization
    fit_requested = requested           - weights - activations - non-torch - graphs - headroom
    use_all       = free at the start   - weights - activations - non-torch - graphs - headroom

Graphs are captured over the pool, so its size includes an estimate of them. The advice uses their real size.

`kvscope.monitor.ledger.memory_breakdown` repeats these sums from logs and events, so that wrong advice shows there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvscope.monitor.contract.event_log import Clock, EventLog

from ..config import EngineConfig
from ..faults import Faults
from ..models import LoadedModel
from ..requests.request import MAX_LOGPROBS, Request, SamplingParams
from ..scheduling.scheduler_state import SchedulerOutput, Share
from .cuda_graphs import sizes_up_to
from .model_runner import ModelRunner, Runner, kv_bytes_per_block, num_blocks_for

logger = logging.getLogger(__name__)

DEVICE_GIB: Final = 1 << 30
DEVICE_HEADROOM: Final = 150 << 20
"""Bytes that stay free besides: for what grows with requests, and for memory that comes back in pieces."""
UNMEASURED: Final = -1
MEASURE_EVERY_NS: Final = 5_000_000_000
"""The interval between two readings of the device while steps are made. One takes less than a millisecond."""
PROFILED_BLOCKS: Final = 2
"""The reserved block, and one that stands for all others."""
TOO_SMALL: Final = 6
"""By how much the fault sizing.kv-too-small divides the pool."""


class Reading(NamedTuple):
    """A device's memory now, in bytes (-1 where it is not known)."""

    total: int
    free: int
    used_here: int
    used_by_others: int
    allocator_reserved: int = UNMEASURED
    allocator_allocated: int = UNMEASURED


class Device(Protocol):
    """Where the memory is."""

    def read(self) -> Reading:
        """Return the device's memory, and its users."""
        ...

    def peak_of(self, run: Callable[[], None]) -> int:
        """Bytes that `run` takes at its most, above what is in use before it."""
        ...

    def non_torch(self, weights: int) -> int:
        """Bytes in use by this process that torch has not allocated, while it has no more than the weights."""
        ...


class Host:
    """The memory of the machine, or a `budget` of so many bytes that this process is to stay within."""

    def __init__(self, budget: int | None) -> None:
        self._budget = budget

    def read(self) -> Reading:
        """See Device. Resident memory counts, by /proc, without pages that were never written."""
        here = _resident("VmRSS")
        total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
        if self._budget is not None:
            total, free = self._budget, min(free, max(self._budget - here, 0))
        return Reading(total, free, here, max(total - free - here, 0))

    def peak_of(self, run: Callable[[], None]) -> int:
        """See Device. Where the system does not let a process reset its peak, this is the life's, which is no less."""
        before = _resident("VmRSS")
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        run()
        return max(_resident("VmHWM") - before, 0)

    def non_torch(self, weights: int) -> int:
        """See Device."""
        return max(_resident("VmRSS") - weights, 0)


class Cuda:
    """A CUDA device. Only how much of it other processes use is NVML's, and not known where that does not answer: on a
    MIG slice, on AMD, in a container without the driver's tools.
    """

    def __init__(self, device: str) -> None:
        self._index = torch.device(device).index or 0
        self._processes: Callable[[], list[Any]] | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(self._index).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._processes = partial(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
        except Exception as error:  # a library that is missing or too old, as well as whatever it raises
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("NVML does not report which process uses the device's memory: %s", error)
        self._processes = None

    def read(self) -> Reading:
        """See Device. The driver does not separate processes in a container: the two `used` are not known there."""
        free, total = torch.cuda.mem_get_info(self._index)
        reserved, allocated = torch.cuda.memory_reserved(self._index), torch.cuda.memory_allocated(self._index)
        here = self._used_here()
        if here is None:
            return Reading(total, free, UNMEASURED, UNMEASURED, reserved, allocated)
        return Reading(total, free, here, max(total - free - here, 0), reserved, allocated)

    def _used_here(self) -> int | None:
        """Return the bytes of this process, or None where the driver does not report them, or fails: the engine works
        on without it.
        """
        if self._processes is None:
            return None
        try:
            processes = self._processes()
        except Exception as error:  # NVML's, of a module that may not be there
            self._give_up(error)
            return None
        used = next((p.usedGpuMemory for p in processes if p.pid == os.getpid()), None)
        return None if used is None else int(used)

    def peak_of(self, run: Callable[[], None]) -> int:
        """See Device. By torch's allocator, whose cache is freed afterwards."""
        before = torch.cuda.memory_allocated(self._index)
        torch.cuda.reset_peak_memory_stats(self._index)
        run()
        torch.cuda.synchronize(self._index)
        peak = torch.cuda.max_memory_allocated(self._index) - before
        torch.cuda.empty_cache()
        return peak

    def non_torch(self, weights: int) -> int:
        """See Device. Where the driver does not separate processes, others' counts as ours, never too little."""
        reading = self.read()
        used = reading.used_here if reading.used_here >= 0 else reading.total - reading.free
        return max(used - reading.allocator_reserved, 0)


@dataclass(frozen=True)
class Plan:
    """The bill in bytes. `activations` and `non_torch` are -1 where nothing was planned, and so nothing measured.

    `graphs` are those that were captured, before that the estimate, and 0 where none are. `graphs_estimated` is -1
    where nothing was estimated. `counted_twice` is what is subtracted of them once more, by the fault
    sizing.bad-suggestion.
    """

    total: int
    free_at_start: int
    requested: int
    weights: int
    activations: int
    non_torch: int
    num_blocks: int
    kv_pool: int
    graphs: int = 0
    graphs_estimated: int = UNMEASURED
    counted_twice: int = 0

    @property
    def is_measured(self) -> bool:
        """Whether there is a bill to show."""
        return self.activations >= 0

    @property
    def fit_requested(self) -> int:
        """Bytes of KV that keep within the requested share. Below 0, that many are missing."""
        return self.requested - self._besides_kv

    @property
    def use_all(self) -> int:
        """Bytes of KV that take all that was free at the start. Below 0, that many are missing."""
        return self.free_at_start - self._besides_kv

    @property
    def _besides_kv(self) -> int:
        return self.weights + self.activations + self.non_torch + self.graphs + self.counted_twice + DEVICE_HEADROOM

    def event(self, now: Reading) -> list[int]:
        """Return the numbers of a MEMORY event, in the order of its schema."""
        advice = [max(self.fit_requested, 0), max(self.use_all, 0)] if self.is_measured else [UNMEASURED, UNMEASURED]
        return [
            now.total,
            now.free,
            now.used_here,
            now.used_by_others,
            self.weights,
            self.activations,
            self.graphs_estimated,
            self.graphs,
            self.non_torch,
            self.kv_pool,
            now.allocator_reserved,
            now.allocator_allocated,
            *advice,
        ]

    def line(self, share: float) -> str:
        """Return the breakdown in one line, in the words of vLLM 0.11 to 0.26, which parsers of logs expect."""
        advice = [
            f"`--kv-cache-memory={left}` ({_in_gib(left)} GiB) {purpose}"
            for left, purpose in (
                (self.fit_requested, "to fit into requested memory"),
                (self.use_all, "to fully utilize gpu memory"),
            )
            if left >= 0
        ]
        short = f"The requested memory cannot be met: it is short by {_in_gib(-self.fit_requested)} GiB. "
        return (
            f"Free memory on device ({_in_gib(self.free_at_start)}/{_in_gib(self.total)} GiB) on startup. "
            f"Desired GPU memory utilization is ({share:g}, {_in_gib(self.requested)} GiB). "
            f"Actual usage is {_in_gib(self.weights)} GiB for weight, "
            f"{_in_gib(self.activations)} GiB for peak activation, "
            f"{_in_gib(self.non_torch)} GiB for non-torch memory, and {_in_gib(self.graphs)} GiB for CUDAGraph memory. "
            + (short if self.fit_requested < 0 else "")
            + (f"Replace gpu_memory_utilization config with {', or '.join(advice)}. " if advice else "")
            + f"Current kv cache memory in use is {_in_gib(self.kv_pool)} GiB."
        )


class Meter:
    """Logs the breakdown and the device's memory as events: at the first tick, then as they become old."""

    def __init__(self, plan: Plan, device: Device, log: EventLog, clock: Clock) -> None:
        self._plan = plan
        self._device = device
        self._log = log
        self._clock = clock
        self._next_ns = 0

    def tick(self) -> None:
        """Measure, if it is time to."""
        now = self._clock.monotonic_ns()
        if self._log.on and now >= self._next_ns:
            self._next_ns = now + MEASURE_EVERY_NS
            self._log.memory(self._plan.event(self._device.read()))


def device_of(config: EngineConfig) -> Device:
    """Return the device that `config` names."""
    return Host(config.memory_budget) if config.device == "cpu" else Cuda(config.device)


def make_plan(
    config: EngineConfig, loaded: LoadedModel, device: Device, copies: int = 0, faults: Faults | None = None
) -> Plan:
    """Measure, and size the pool. Raises ValueError, saying by how much, if the share cannot be met.

    The pool is num_gpu_blocks_override, or else kv_cache_memory_bytes, or else as large as fits into the share.
    Measurements do not change the first two. copies: how many blocks a connector may keep in the same memory for each
    of the pool's.
    """
    faults = faults or Faults()
    block = kv_bytes_per_block(loaded.config, config.block_size, config.dtype)
    if config.device == "cpu" and config.memory_budget is None:
        now, blocks = device.read(), _blocks_left(config, num_blocks_for(config, loaded.config), faults)
        return Plan(now.total, now.free, now.total, loaded.weight_bytes, UNMEASURED, UNMEASURED, blocks, blocks * block)
    non_torch = device.non_torch(loaded.weight_bytes)
    now = device.read()
    # Memory that the engine has taken by now was free before it.
    before = now.free + (now.used_here if now.used_here >= 0 else now.allocator_reserved)
    requested = int(now.total * config.gpu_memory_utilization)
    plan = Plan(now.total, min(before, now.total), requested, loaded.weight_bytes, 0, non_torch, 0, 0)
    if _is_by_share(config) and plan.free_at_start < requested:
        raise ValueError(
            f"the requested memory cannot be met: {_in_gib(requested)} GiB, {config.gpu_memory_utilization:g} of"
            f" {_in_gib(plan.total)} GiB, are {_in_gib(requested - plan.free_at_start)} GiB more than is free on the"
            " device;"
            " give a lower gpu_memory_utilization, or end what else uses it"
        )
    # Before what comes after the pool is thought of.
    too_early = faults.triggers("sizing.kv-too-large", "")
    activations = 0
    if config.device == "cpu":
        # The plain kernels copy out the KV that a layer reads: seen to be too much before it is tried.
        activations = _largest_gather(config, loaded)
    if replace(plan, activations=activations).fit_requested >= 0:
        logger.info("Measuring the largest step that the settings allow")
        activations = device.peak_of(lambda: _largest_step(config, loaded))
        if config.captures_graphs:
            graphs = 0 if too_early else _estimate_graphs(config, loaded, faults)
            plan = replace(plan, graphs_estimated=graphs, graphs=graphs)
        if config.device != "cpu":
            # Libraries of the run stay loaded. On the CPU they are part of the peak of the whole process.
            plan = replace(plan, non_torch=device.non_torch(loaded.weight_bytes))
    plan = replace(plan, activations=activations)
    if not _is_by_share(config):
        blocks = _blocks_left(config, num_blocks_for(config, loaded.config), faults)
    else:
        left = plan.fit_requested + (DEVICE_HEADROOM if too_early else 0)
        blocks = left // (block * (1 + copies))
        if blocks < 2:
            short = 2 * block * (1 + copies) - left
            raise ValueError(
                f"there is no room for KV, {short} bytes are missing for the least, two blocks: give a higher"
                f" {'memory_budget' if config.device == 'cpu' else 'gpu_memory_utilization'}, or a lower"
                f" max_num_seqs, max_num_batched_tokens or max_model_len. {plan.line(config.gpu_memory_utilization)}"
            )
        blocks = _blocks_left(config, blocks, faults)
    return replace(plan, num_blocks=blocks, kv_pool=blocks * block)


def capture_graphs(config: EngineConfig, runner: Runner, plan: Plan, faults: Faults) -> Plan:
    """Let `runner` capture its decodes, if configured. Return the plan with their memory.

    Raises ValueError if the device has not the memory for it.
    """
    if not config.captures_graphs:
        return plan
    began = time.perf_counter()
    try:
        took = runner.capture(_sizes(config)).memory
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"there is no room for CUDA graphs beside a pool of {_in_gib(plan.kv_pool)} GiB: give a lower"
            " gpu_memory_utilization or kv_cache_memory_bytes, or enforce_eager"
        ) from error
    logger.info("Graph capturing finished in %.0f secs, took %s GiB", time.perf_counter() - began, _in_gib(took))
    twice = plan.graphs_estimated if plan.is_measured and faults.triggers("sizing.bad-suggestion", "") else 0
    return replace(plan, graphs=took, counted_twice=twice)


def _blocks_left(config: EngineConfig, blocks: int, faults: Faults) -> int:
    """Return the pool's blocks out of the number that there is room for, or that was configured."""
    if config.num_gpu_blocks_override is None and faults.triggers("sizing.kv-too-small", ""):
        return max(blocks // TOO_SMALL, 2)
    return blocks


def _sizes(config: EngineConfig) -> list[int]:
    return sizes_up_to(min(config.max_num_seqs, config.max_num_batched_tokens))


def _estimate_graphs(config: EngineConfig, loaded: LoadedModel, faults: Faults) -> int:
    """Bytes that all graphs will take, from the two largest: each of the others takes as much as the second."""
    sizes = _sizes(config)
    graphs = _profiled(config, loaded).capture(sizes[-2:])
    first, *rest = graphs.captured_bytes
    first += graphs.inputs_bytes
    each = first if faults.triggers("sizing.overreserved", "") else max(rest, default=0)
    estimate = first + each * (len(sizes) - 1)
    logger.info("Estimated CUDA graph memory: %s GiB total", _in_gib(estimate))
    return estimate


def _is_by_share(config: EngineConfig) -> bool:
    return config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None


def _largest_gather(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of one layer's keys and values for as many requests as may run, each as long as it may be."""
    blocks = config.max_num_seqs * -(-loaded.config.max_model_len // config.block_size)
    return blocks * kv_bytes_per_block(loaded.config, config.block_size, config.dtype) // loaded.config.layers_per_block


def _largest_step(config: EngineConfig, loaded: LoadedModel) -> None:
    """Run the step that takes the most: max_num_seqs requests that share max_num_batched_tokens, each at
    max_model_len, drawn with everything that changes or reports a probability.
    """
    length = loaded.config.max_model_len
    count = min(config.max_num_seqs, config.max_num_batched_tokens)
    tokens = min(config.max_num_batched_tokens // count, length)
    params = SamplingParams(top_p=0.5, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=MAX_LOGPROBS)
    requests = [Request(number, "", [0] * length, params) for number in range(count)]
    for request in requests:
        request.num_computed_tokens = length - tokens
    table = [PROFILED_BLOCKS - 1] * -(-length // config.block_size)
    runner = _profiled(config, loaded)
    plan = SchedulerOutput(0, [Share(request, request.num_computed_tokens, tokens, True) for request in requests])
    tables = [table] * len(loaded.config.kv_groups)
    runner.run(runner.prepare(plan, dict.fromkeys(range(count), tables)))()


def _profiled(config: EngineConfig, loaded: LoadedModel) -> ModelRunner:
    """Return a runner to measure with, that has hardly a pool."""
    return ModelRunner(loaded, PROFILED_BLOCKS, config.block_size, config.device, config.dtype)


def _in_gib(size: int) -> str:
    """To four decimals: a small model has no more than that, and who reads two reads four."""
    return f"{size / DEVICE_GIB:.4f}"


def _resident(name: str) -> int:
    return _kib(Path("/proc/self/status"), name)


def _meminfo(name: str) -> int:
    return _kib(Path("/proc/meminfo"), name)


def _kib(path: Path, name: str) -> int:
    """Return the number after `name:`, which these files give in units of 1024 bytes."""
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
