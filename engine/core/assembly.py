"""Make the parts of an engine from its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscope.engine.blocks.block_pool import BlockPool
from kvscope.engine.blocks.kv_cache_manager import KVCacheManager
from kvscope.engine.blocks.prefix_hashes import PrefixHasher
from kvscope.engine.config import EngineConfig
from kvscope.engine.connectors.base import KVConnector
from kvscope.engine.connectors.host import HostConnector
from kvscope.engine.connectors.peer import PeerConnector
from kvscope.engine.execution.memory_plan import Device, Plan, make_plan
from kvscope.engine.execution.model_runner import Runner
from kvscope.engine.faults import Faults
from kvscope.engine.models import LoadedModel
from kvscope.engine.scheduling.scheduler import Scheduler
from kvscope.monitor.events.event_log import EventLog

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
