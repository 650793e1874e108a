"""Make the parts of an engine from its settings, its event stream and its description of itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope.monitor.contract.description import EngineDescription, KVGroup
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.probes.packer import Vitals
from kvscope.monitor.probes.publisher import ENGINE_RING_BYTES, Publisher
from kvscope.monitor.probes.stall_capture import StallCapture, stacks_enabled
from kvscope.version import kvscope_version

from ..blocks.block_pool import BlockPool
from ..blocks.kv_cache_manager import KVCacheManager
from ..blocks.prefix_hashes import PrefixHasher
from ..config import EngineConfig
from ..connectors.base import KVConnector
from ..connectors.host import HostConnector
from ..connectors.peer import PeerConnector
from ..execution.memory_plan import Device, Plan, make_plan
from ..execution.model_runner import Runner, kv_bytes_per_block
from ..faults import Faults
from ..models import LoadedModel
from ..scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class EventStream:
    """The endpoint and identity under which an engine publishes its events."""

    engine: str
    events: str
    replay: str
    journal: Path | None = None
    ring_bytes: int = ENGINE_RING_BYTES

    def publisher(self, log: EventLog, vitals: Callable[[], Vitals], thread: Callable[[], int | None]) -> Publisher:
        """Bind the stream's sockets. `thread` is the engine's, once it runs. Raises what Publisher raises."""
        return Publisher(
            log,
            self.engine,
            vitals,
            events=self.events,
            replay=self.replay,
            journal_dir=self.journal,
            ring_bytes=self.ring_bytes,
            stacks=StallCapture(log, thread) if stacks_enabled() else None,
        )


def describe_engine(config: EngineConfig, loaded: LoadedModel, total_blocks: int, faults: Faults) -> EngineDescription:
    """Return the settings in force, the pool, the model's shape as the pool sees it, and the faults that are on."""
    return EngineDescription(
        engine="kvscope",
        version=kvscope_version(),
        model=config.model,
        served_model_name=config.served_model_name,
        device=config.device,
        pid=os.getpid(),
        block_size=config.block_size,
        num_gpu_blocks=total_blocks,
        max_model_len=loaded.config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        kv_connector=config.kv_connector,
        queues_ready=True,
        kv_bytes_per_block=kv_bytes_per_block(loaded.config, config.block_size, config.dtype),
        groups=[
            KVGroup("full_attention" if window is None else "sliding_window", len(layers), window or 0)
            for window, layers in loaded.config.kv_groups
        ],
        faults=[str(fault) for fault in faults.on.values()],
    )


HOST_STORE_POOLS: Final = 2
"""The host connector keeps at most so many times the blocks of the pool."""
STEPS_AHEAD: Final = 1
"""How many steps are planned beyond the one that runs, with async_scheduling."""


def most_in_flight(config: EngineConfig) -> int:
    """Return the number of steps that may be launched and not complete."""
    return 1 + STEPS_AHEAD * config.async_scheduling


def check_fit(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raise ValueError if the connector cannot keep the model's KV."""
    if config.kv_connector and loaded.config.sliding_layers:
        raise ValueError(
            f"kv_connector {config.kv_connector!r} keeps whole prefixes, and {config.model} has layers with a"
            " sliding window, whose blocks are freed before the request ends: leave kv_connector out"
        )


def plan_memory(config: EngineConfig, loaded: LoadedModel, device: Device, faults: Faults) -> Plan:
    """Plan the device's memory, and on a CPU the host connector's store with it."""
    stored = HOST_STORE_POOLS if config.kv_connector == "host" and config.device == "cpu" else 0
    return make_plan(config, loaded, device, stored, faults)


def make_manager(config: EngineConfig, loaded: LoadedModel, pool: BlockPool, faults: Faults) -> KVCacheManager:
    """Make the block tables over `pool`."""
    return KVCacheManager(
        pool,
        config.block_size,
        PrefixHasher(config.block_size, config.hash_key) if config.enable_prefix_caching else None,
        faults,
        [group.window for group in loaded.config.kv_groups],
        most_in_flight(config) * config.max_num_batched_tokens,
        pool.keeps_duplicates,
    )


def make_connector(
    config: EngineConfig, runner: Runner, total: int, log: EventLog, wake: Callable[[], None], faults: Faults
) -> KVConnector | None:
    """Make the connector that the settings name, over a pool of `total` blocks, or None for none."""
    if config.kv_connector == "host":
        return HostConnector(
            runner.gather,
            runner.scatter,
            block_size=config.block_size,
            capacity=HOST_STORE_POOLS * total,
            log=log,
            wake=wake,
            faults=faults,
        )
    if config.kv_connector == "peer":
        return PeerConnector(
            runner.gather,
            runner.scatter,
            block_size=config.block_size,
            log=log,
            wake=wake,
            endpoint=config.kv_transfer_endpoint,
        )
    return None


def make_scheduler(
    config: EngineConfig, manager: KVCacheManager, max_model_len: int, connector: KVConnector | None, faults: Faults
) -> Scheduler:
    """Make the scheduler over `manager`."""
    return Scheduler(
        manager,
        manager.pool.log,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
        connector=connector,
        lease_s=config.kv_lease_seconds or 0.0,
        faults=faults,
    )
